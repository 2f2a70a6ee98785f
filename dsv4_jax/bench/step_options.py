"""Options of benchmarks of steps: how the model is made, and which sizes of steps are measured."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from dsv4_jax.bench.random_steps import DRAWS
from dsv4_jax.bench.tables import Row
from dsv4_jax.cache import CacheSchema
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS
from dsv4_jax.decode import CompiledModel
from dsv4_jax.expert_pages import ExpertMemory, HostTables, program_bytes
from dsv4_jax.nn import add_adapters
from dsv4_jax.nn.lora import adapter_variables, place_adapters
from dsv4_jax.parallel.mesh import check_divisible, check_shardable
from dsv4_jax.quant import quantized_shapes


# Requests start this number of tokens before the context, so that no measured step exceeds it. Each step that warms up
# or is measured makes a request one token longer.
MARGIN = 4 * DRAWS
MAX_TABLE_BYTES = 8 << 30  # maximum bytes of Engram's tables on a device; far more than the L2 cache holds
ENGRAM_KIND = "FP8_ROWS"  # storage of Engram's tables
ADAPTER_RANK = 16
MAX_DRAFTS = 8  # maximum number of drafts if the model does not limit them


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """The options from which a benchmark makes a model with random weights.

    Attributes:
      layers: number of the model's layers, see `layer_slices.chosen_layers`; 0 for all.
      drafts: number of tokens that a step drafts for each request; 0 for a model without draft layers.
      mesh: the devices; None for the default one.
      expert_parallel: whether each device gets whole experts instead of a shard of each expert.
      expert_memory: number of bytes of GPU memory for routed experts; the remaining experts lie in host memory. "auto"
        = the bytes that the cache and programs leave. None = all experts are on the GPU.
      host_tables: whether Engram's tables lie in host memory, see `expert_pages.HostTables`.
      adapters: number of adapters on each linear map that can have adapters, see `nn.add_adapters`. Requests use the
        adapters in turn.
    """

    layers: int = 0
    drafts: int = 0
    mesh: Mesh | None = None
    expert_parallel: bool = False
    expert_memory: int | Literal["auto"] | None = None
    host_tables: bool = False
    adapters: int = 0

    def fit_tables(self, config: DSV4Config, report: Row | None = None) -> DSV4Config:
        """Returns the configuration, with Engram's tables reduced if they are larger than what the machine holds.

        A token reads the same number of rows from a smaller table. Tables on devices take at most about
        `MAX_TABLE_BYTES` of each device. Tables in host memory take at most half of the host's memory.

        Args:
          config: configuration of the model.
          report: report to which the numbers of rows are added if they are reduced, and printed; None for no report.
        """
        engram = config.engram
        if engram is None:
            return config
        max_bytes = MAX_TABLE_BYTES * (1 if self.mesh is None else self.mesh.shape.get("model", 1))
        if self.host_tables or self.expert_memory is not None:
            max_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        row_bytes = sum(map(math.prod, quantized_shapes(ENGRAM_KIND, (1, engram.head_dim))))
        rows = max_bytes // (row_bytes * len(engram.layer_ids) * engram.rows)
        reduced = engram.resized(engram.layer_ids, max(2, min(engram.vocab_size, rows)))
        if report is not None and reduced != engram:
            rows = report["engram_rows"] = reduced.num_embeddings
            whole = report["engram_rows_of_release"] = engram.num_embeddings
            print(f"Engram's tables have {rows} rows, not {whole}, which this machine does not hold")
        return dataclasses.replace(config, engram=reduced)

    def make_model(self, config: DSV4Config, schema: CacheSchema, tokens: int, skew: float) -> CompiledModel:
        """Makes the model.

        Args:
          config: configuration of the model.
          schema: schema of the largest cache, for which `expert_memory` "auto" leaves room.
          tokens: number of tokens of the largest step. `expert_memory` "auto" also leaves room for this step's program.
          skew: skew of the routers, see `checkpoint.random_weights.random_model`.
        """
        experts = None
        if self.expert_memory is not None:
            experts = ExpertMemory(
                None if self.expert_memory == "auto" else self.expert_memory,
                reserved_bytes=program_bytes(tokens, config) + schema.memory_bytes(),
            )
        model = random_model(
            config,
            self.mesh,
            expert_parallel=self.expert_parallel,
            expert_memory=experts,
            host_tables=HostTables() if self.host_tables else None,
            skew=skew,
        )
        if self.adapters:
            _add_random_adapters(model, self.adapters)
        return CompiledModel(model, experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(ModelSetup):
    """Options of `dsv4-jax bench layer`, `model` and `prefill`.

    If `layers` is 0, all layers are measured, or as many of them as the device can hold.

    Attributes:
      batches: batch sizes to measure, in requests.
      contexts: contexts to measure, in tokens, see `step_cases.StepCase.context`.
      chunks: chunk sizes to measure: numbers of tokens of one prompt that a step reads; empty for decode steps.
      context_parallel: whether the compressed entries of a request are distributed over the devices.
      skew: skews of the routers to measure, see `checkpoint.random_weights.random_model`.
      batch_invariant: whether decode steps run in the program for prompts, see `EngineConfig.batch_invariant`.
      cache_format: name of the format of the cache's rows; None = the format of the model's release.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    context_parallel: bool = False
    skew: tuple[float, ...] = (0.0,)
    batch_invariant: bool = False
    cache_format: str | None = None

    def check(self, config: DSV4Config) -> None:
        """Raises ValueError if the mesh does not divide the model or a batch, or a number is out of range."""
        if self.mesh is not None:
            check_shardable(config, self.mesh.shape, self.expert_parallel)
            for requests in self.batches:
                check_divisible(self.mesh.shape, batches=requests)
        max_drafts = MAX_DRAFTS if config.drafts is None else config.drafts.max_drafts or MAX_DRAFTS
        longest = config.max_position_embeddings - max(self.chunks, default=0)
        check_numbers("batches", self.batches, 1)
        check_numbers("contexts", self.contexts, 0 if self.chunks else MARGIN + 1, longest)
        check_whole("drafts", self.drafts, 0, max_drafts)
        check_whole("layers", self.layers, 0, config.num_hidden_layers)
        check_whole("adapters", self.adapters, 0)

    @property
    def step_sizes(self) -> list[tuple[int, int]]:
        """The kinds of steps to measure: (tokens that a step runs, tokens that it then drafts), both per request."""
        if self.chunks:
            return [(chunk, 0) for chunk in self.chunks]
        verify = 1 + self.drafts
        return [(1, 0), (verify, 0), (verify, self.drafts)] if self.drafts else [(1, 0)]

    def cache_sizes(self, requests: int, context: int) -> dict[str, Any]:
        """Returns the sizes of a cache, as arguments of `CacheSchema`.

        The cache has room for `requests` requests of `context` tokens, each followed by the largest chunk.
        """
        context += max(self.chunks, default=0)
        blocks = requests * -(-context // BLOCK_TOKENS)
        devices = self.mesh.size if self.mesh and self.context_parallel else 1
        return {
            "num_blocks": blocks + -blocks % devices,
            "max_requests": requests,
            "max_context": context,
            "max_query_tokens": 1 + self.drafts,
            "context_parallel": self.context_parallel,
            "kv_format": self.cache_format,
        }

    def largest_cache(self, config: DSV4Config) -> CacheSchema:
        """Returns the schema of the cache for the largest batch and the longest context."""
        return CacheSchema(config, **self.cache_sizes(max(self.batches), max(self.contexts)))


def _add_random_adapters(model, count):
    add_adapters(model, [f"adapter {i}" for i in range(count)], rank=ADAPTER_RANK, dtype=model.model.dtype, place=False)
    for i, variable in enumerate(adapter_variables(model)):
        value = variable.get_value()
        variable.set_value(0.01 * jax.random.normal(jax.random.key(i), value.shape, value.dtype))
    place_adapters(model)


def check_numbers(option: str, numbers: Sequence[int], minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless there is a number and all numbers are in a range.

    Args:
      option: name of the command-line option, for the message.
      numbers: values of the option.
      minimum: smallest valid number.
      maximum: largest valid number; None for no limit.
    """
    if not numbers:
        raise ValueError(f"--{option} needs at least one number")
    for number in numbers:
        check_whole(option, number, minimum, maximum)
