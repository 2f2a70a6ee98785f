"""The command `dsv4-jax plan`."""

import bisect
import dataclasses
import functools
import json
from typing import Annotated, Literal, NamedTuple

import tyro
from rich.console import Console

from dsv4_jax.cli import options
from dsv4_jax.cli.options import (
    CacheFormat,
    Command,
    ContextParallel,
    Dtype,
    ExpertParallel,
    MeshOption,
)
from dsv4_jax.cli.weight_plan import expert_table, number_table, plan_experts, plan_weights, weight_table
from dsv4_jax.common.sizes import parse_bytes, readable_bytes
from dsv4_jax.data import block_tokens
from dsv4_jax.parallel.mesh import check_context_parallel


_CONTEXTS = tuple(4096 * 4**i for i in range(5))  # 4k to 1M


class PlanCommand(Command):
    """Computes how many requests of a given context fit a memory, exact to the byte.

    A request takes a fixed number of bytes (sliding windows, compressor states, a row of the block table) and, for each
    --block-tokens tokens, a block in each compressed pool. The sums count the arrays that the cache allocates.

    For example:
      dsv4-jax plan --config v4_flash --memory 80GiB --context 1048576
      dsv4-jax plan --config path/to/folder --memory 141GB --weights 96GB --context 65536 --max-requests 64
      dsv4-jax plan --config v4_pro --memory 141GB --weights quantized --context 131072 --mesh model=8
      dsv4-jax plan --config v4_flash --memory 80GiB --context 65536 --expert-memory auto

    Attributes:
      config: v4_flash, v4_pro, v4_flash_0731, v4_pro_0813 or v41_flash, or a folder with a config.json.
      memory: memory of a device, such as 80GiB (2**30 bytes each) or 80GB (10**9 bytes each). With --mesh, each device
        has that much.
      context: maximum number of tokens in a request.
      max_requests: maximum number of requests; also report the longest context that so many requests can have.
      dtype: dtype of the model and of plain rows.
      block_tokens: number of tokens in a block. Default: 128, or the next multiple of the model's compression rates.
      max_query_tokens: maximum number of tokens of a request in a decode step (speculative decoding: more than 1).
      drafts: plan for K drafts of the model's draft layers: their sliding windows, the residual streams from which a
        multi-token-prediction block starts, and steps of 1 + K tokens.
      weights: bytes of the memory that are already taken, for instance by the model's weights. quantized: count the
        weights, stored as in the release, on each device of --mesh; with --drafts, also those of the draft layers.
      expert_memory: for a model that is larger than its GPU: how much of --memory the routed experts may take, such as
        60GB. auto: what the other weights, the programs and --max-requests full requests (default: one) leave. Reports
        how many experts stay in host memory and estimates the time of a step.
      gpu: GPU whose measured rates the estimate uses.
      json: print one JSON object instead.
    """

    config: Annotated[str, tyro.conf.arg(metavar=options.MODELS)]
    memory: str
    context: int
    max_requests: int | None = None
    cache_format: CacheFormat = None
    dtype: Dtype = "bfloat16"
    block_tokens: int | None = None
    max_query_tokens: int = 1
    drafts: int = 0
    weights: str | None = None
    mesh: MeshOption = None
    expert_parallel: ExpertParallel = False
    context_parallel: ContextParallel = False
    expert_memory: str | None = None
    gpu: Literal["h100", "h200"] = "h100"
    json: bool = False

    def run(self) -> None:
        """Runs the command. Raises ValueError after a user's mistake."""
        memory = parse_bytes(self.memory)
        given_bytes = None if self.weights in (None, "quantized") else parse_bytes(self.weights, "weights")
        config = options.named_config(self.config, "--config", mtp=self.drafts > 0)
        options.check_context(config, self.context, "--context")
        sizes = self.mesh_sizes(config)
        one = self._schema(config, self.context)
        kinds = plan_weights(config, sizes, self.expert_parallel) if self.weights == "quantized" else {}
        weights = given_bytes or sum(kind["device"] for kind in kinds.values())
        if weights > memory:
            raise ValueError(f"--weights {self.weights}: {weights} bytes are more than --memory {memory} bytes")
        experts = {}
        if self.expert_memory is not None:
            if self.weights is not None or self.mesh is not None:
                raise ValueError(
                    "--expert-memory is for one GPU and counts the weights: leave out --weights and --mesh"
                )
            cache = self._schema(config, self.context, self.max_requests or 1).memory_bytes()
            experts = plan_experts(config, self.expert_memory, memory, cache, self.gpu)
            weights = experts["weights_bytes"]
        devices_per_shard = check_context_parallel(sizes, self.context_parallel)
        report = self._report(one, memory, _Device(memory - weights, sizes.get("data", 1), devices_per_shard))
        if kinds:
            report["weights"] = kinds
        if experts:
            report["expert_memory"] = experts
        if self.json:
            print(json.dumps(report))
        else:
            _print_report(report, one)

    def _schema(self, config, context, requests=1):
        """Returns the schema of a cache that holds `requests` requests of `context` tokens each."""
        import jax.numpy as jnp

        from dsv4_jax.cache import CacheSchema

        empty = CacheSchema(
            config,
            num_blocks=0,
            max_requests=requests,
            max_context=context,
            kv_format=self.cache_format,
            dtype=jnp.dtype(self.dtype),
            block_tokens=block_tokens(config) if self.block_tokens is None else self.block_tokens,
            max_query_tokens=max(self.max_query_tokens, 1 + self.drafts),
        )
        return dataclasses.replace(empty, num_blocks=requests * empty.max_blocks)

    def _report(self, one, memory, device):
        """Returns the JSON object of --json, except its field about experts.

        Args:
          one: schema of a cache for one request with the whole context.
          memory: bytes of a device's memory.
          device: bytes of a device for the cache, and the numbers of devices that share requests and blocks.
        """
        fits = []
        config = one.config
        for context in sorted({c for c in _CONTEXTS if c <= config.max_position_embeddings} | {self.context}):
            schema = self._schema(config, context)
            requests = device.num_shards * device.requests(schema)
            if self.max_requests is not None:
                requests = min(requests, self.max_requests)
            bytes_left = device.memory - device.used(schema, -(-requests // device.num_shards))
            fit = {"context": context, "bytes_per_request": device.used(schema, 1)}
            fits.append(fit | {"requests": requests, "bytes_left": bytes_left})
        report = {
            "config": self.config,
            "mesh": self.mesh,
            "context_parallel": self.context_parallel,
            "cache_format": one.kv_format.name,
            "context": self.context,
            "drafts": self.drafts,
            "block_tokens": one.block_tokens,
            "bytes_per_token": one.bytes_per_token,
            "bytes_per_request": one.bytes_per_request,
            "memory_bytes": memory,
            "weights_bytes": memory - device.memory,
            "dense_bf16_bytes_per_token": one.dense_bytes_per_token,
            "pools": _pools(one),
            "fits": fits,
        }
        if self.max_requests is not None:
            report["max_requests"] = self.max_requests
            report["longest_context"] = self._longest_context(one, self.max_requests, device)
        return report

    def _longest_context(self, one, requests, device):
        """Returns the maximum context, in tokens, with which `requests` requests fit; 0 if not even a block fits."""
        size = one.block_tokens
        limit = one.config.max_position_embeddings
        shard = -(-requests // device.num_shards)

        def used(context):
            """Returns the bytes that a shard takes on a device if all requests have this context."""
            return device.used(self._schema(one.config, min(context, limit)), shard)

        return min(bisect.bisect_right(range(size, limit + size, size), device.memory, key=used) * size, limit)


def _pools(one):
    """Returns {name of a pool: {"per_block", "per_request", "full": size in bytes}}.

    The sizes are of a block, of a request without its blocks, and of a request with the whole context. `one` is the
    schema of a cache for one such request.
    """
    per_block = dataclasses.replace(one, num_blocks=1).block_bytes_by_pool()
    per_request = one.slot_bytes_by_pool()
    return {
        name: {"per_block": per_block.get(name, 0), "per_request": per_request.get(name, 0), "full": count}
        for name, count in one.pool_bytes().items()
    }


class _Device(NamedTuple):
    """The memory of a device for the cache, and the numbers of devices that share requests and blocks.

    In the methods, `one` is the schema of a cache for a single request with the maximum number of tokens.

    Attributes:
      memory: bytes of the device for the cache.
      num_shards: size of the mesh's axis "data", over which requests are distributed.
      holders: number of devices that a shard's blocks are distributed over: more than 1 with --context-parallel.
    """

    memory: int
    num_shards: int
    holders: int

    def used(self, one, requests):
        """Returns the bytes that a shard of `requests` full requests takes on the device."""
        # Every array of the cache has an axis of slots or of blocks, so its size is proportional to their number.
        slots = requests * sum(one.slot_bytes_by_pool().values())
        return slots + -(-requests * one.max_blocks // self.holders) * one.block_bytes

    def requests(self, one):
        """Returns the maximum number of full requests in a shard that fit the device."""
        return bisect.bisect_right(range(1, self.memory + 1), self.memory, key=functools.partial(self.used, one))


def _print_report(report, one):
    """Prints the JSON object of --json as text and tables. `one` is as for `PlanCommand._report`."""
    console = Console()
    context = report["context"]
    tokens = report["block_tokens"]
    console.print(_rows(one), highlight=False)

    columns = "pool", f"a block ({tokens} tokens)", "a token", "a request, fixed", f"a request of {context:,}"
    table = number_table("Bytes, over all layers", *columns)
    pools = report["pools"]
    sums = {key: sum(pool[key] for pool in pools.values()) for key in ("per_block", "per_request", "full")}
    for name, pool in (*pools.items(), ("sum", sums)):
        block = pool["per_block"]
        cells = f"{block:,}", f"{block / tokens:,.2f}", f"{pool['per_request']:,}", f"{pool['full']:,}"
        table.add_row(name, *cells, style="bold" if name == "sum" else None)
    console.print(table)

    if paged := report["bytes_per_token"]:
        dense = report["dense_bf16_bytes_per_token"]
        console.print(
            f"A token takes {paged:.2f} bytes; dense BF16 would take {dense}, {dense / paged:.1f} times as many."
        )
    if "weights" in report:
        console.print(weight_table(report["weights"]))
    free = report["memory_bytes"] - report["weights_bytes"]
    title = f"Requests that fit {free:,} bytes ({readable_bytes(free)})"
    if report["mesh"]:
        title += f" on each device of {report['mesh']}" + ", context parallel" * report["context_parallel"]
    fits = number_table(title, "context", "bytes a request", "requests", "bytes left")
    for row in report["fits"]:
        fits.add_row(*(f"{count:,}" for count in row.values()), style="bold" if row["context"] == context else None)
    console.print(fits)
    if "max_requests" in report:
        text = "{max_requests} requests can have a context of {longest_context:,} tokens each."
        console.print(text.format(**report), highlight=False)
    if "expert_memory" in report:
        console.print(expert_table(report["expert_memory"]))


def _rows(one):
    """Returns the bytes of a window row, an entry and an indexer key as text.

    For instance, "A KV row: 448 (nope) + 128 (rope) + 8 (scale) = 584 bytes; an indexer key: ...".
    """
    window = one.window_codec.struct
    groups = one.groups.values()
    entries = [group.entry.struct for group in groups if group.entry.struct != window]
    keys = [group.key.struct for group in groups if group.key is not None]
    structs = {"A window row" if entries else "A KV row": window}
    if entries:
        structs["an entry"] = entries[0]
    if keys:
        structs["an indexer key"] = keys[0]
    rows = []
    for name, struct in structs.items():
        sizes = {field: x.size * x.dtype.itemsize for field, x in vars(struct).items() if x is not None}
        parts = " + ".join(f"{size} ({field})" for field, size in sizes.items() if size)
        rows.append(f"{name}: {parts} = {sum(sizes.values())} bytes")
    return "; ".join(rows) + "."
