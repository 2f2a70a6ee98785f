"""Steps of a model on a cache with random contents, for `dsv4-jax bench model`, `layer` and `prefill`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import Batch, CacheSchema, KVCache, PoolGroup
from dsv4_jax.decode import CompiledModel, SamplingParams, decode_loop, sample_step
from dsv4_jax.decode.program_store import compile_program, find_program
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.sharded_step import sharded_step


DRAWS = 32  # number of consecutive decode steps that have different tokens
SAMPLING = SamplingParams(temperature=1.0)  # the on-device loop samples its tokens; greedy tokens could repeat


@dataclasses.dataclass(eq=False)
class RandomSteps:
    """Runs steps of requests that all have the same length, in a cache that this object owns.

    Consecutive decode steps have different tokens, which select different experts, so that the mean time of `DRAWS`
    steps hardly depends on the choice of tokens. A step with more than the cache's `max_query_tokens` tokens of a
    request reads a chunk of a prompt, each time at the same positions.

    Attributes:
      model: the model.
      manager: manager of the cache, which decides the cache's sizes.
      requests: number of requests.
      tokens: number of tokens of each request in a step.
      drafts: number of tokens that a step drafts for each request, after it has run its `tokens`.
      batch_invariant: whether decode steps run in the program for prompts, as in a batch-invariant engine.
      cache: the cache; None before the first requests. Set it to None to free its memory.
      program: `decode.program_store.Program` of a step; None before the first step.
      is_prefill: whether a step reads a chunk of a prompt.
    """

    model: CompiledModel
    manager: KVCacheManager
    requests: int
    tokens: int = 1
    drafts: int = 0
    batch_invariant: bool = False
    cache: KVCache | None = None
    program: Any = None

    def __post_init__(self):
        self._chunk: Batch | None = None
        self._slots = []
        schema = self.manager.schema
        self.is_prefill = self.tokens > schema.max_query_tokens
        size = self.shard_requests * self.tokens
        # A decode step samples a token after each of its tokens, a chunk of a prompt only after its last token.
        indices = np.arange(size, dtype=np.int32)[-1 if self.is_prefill else 0 :]
        self._logits_indices = self.manager.devices.put(np.tile(indices, self.manager.shards.count), "tokens")
        slots = np.arange(schema.max_requests)
        self._seeds = self.manager.devices.put(slots.astype(np.uint32), "slots")
        names = self.model.module.adapter_names
        self._adapters = self.manager.devices.put((slots % len(names)).astype(np.int32), "slots") if names else None

    @property
    def shard_requests(self) -> int:
        """The number of requests of each shard along the mesh's axis "data"."""
        return self.requests // self.manager.shards.count

    def start_requests(self, past: int) -> None:
        """Replaces all requests by new requests that hold `past` tokens each. Makes the cache if there is none."""
        self._chunk = None
        for slot in self._slots:
            self.manager.release(slot)
        if self.cache is None:
            self.cache = random_cache(self.manager.schema, self.manager.mesh)
        self._slots = [self.manager.admit() for _ in range(self.requests)]
        if past:
            batch = self.manager.prepare_forward({slot: [0] for slot in self._slots}, reserve=past)
            (self.cache,) = _begin_step((), self.cache, batch)
            for slot in self._slots:
                self.manager.advance(slot, past - 1)

    def batch(self, reserve: int = 0) -> Batch:
        """Returns the batch of the next step, with `tokens` tokens of every request.

        If a decode step has several tokens of a request, only the first one counts as accepted: the manager is rewound
        by the other tokens. Steps that read a chunk of a prompt all have the same batch, which is made once.

        Args:
          reserve: number of further tokens of each request that blocks are allocated for.
        """
        if self._chunk is not None:
            return self._chunk
        num_tokens = self.requests * self.tokens
        step_number = self.manager.length(self._slots[0]) % DRAWS  # a decode step makes a request one token longer
        ids = (step_number * num_tokens + np.arange(num_tokens, dtype=np.int32)) % self.manager.schema.config.vocab_size
        shard_tokens = self.shard_requests * self.tokens
        batch = self.manager.prepare_forward(
            dict(zip(self._slots, np.split(ids, self.requests), strict=True)),
            reserve=reserve,
            prefill_size=shard_tokens,
            decode_size=0 if self.is_prefill or self.batch_invariant else shard_tokens,
        )
        batch = dataclasses.replace(batch, adapters=self._adapters)
        if self.is_prefill:
            self._chunk = batch
            return batch
        if self.tokens > 1:
            for slot in self._slots:
                self.manager.rewind(slot, self.tokens - 1)
        return batch

    def step(self, batch: Batch) -> Any:
        """Launches a step. Returns its `StepOutput` without waiting until the arrays are computed."""
        args = self.model, self.cache, batch, self._logits_indices, SAMPLING, self._seeds
        options = {"drafts": self.drafts}
        if self.program is None:
            self.program = find_program(sample_step, args, options) or compile_program(sample_step, args, options)
        output, self.cache = self.program.call(*args)
        return output

    def loop(self, batch: Batch, steps: int) -> Any:
        """Launches the on-device loop. Returns its `LoopOutput` without waiting until the arrays are computed.

        Args:
          batch: the first step's batch, made with `reserve=steps - 1`.
          steps: number of steps, each with one token of every request.
        """
        for slot in self._slots:
            self.manager.advance(slot, steps - 1)
        output, self.cache = self.model.run(decode_loop, self.cache, batch, self._seeds, SAMPLING, steps=steps)
        return output


def random_cache(schema: CacheSchema, mesh: Mesh | None = None) -> KVCache:
    """Returns a cache on the default device or on a mesh, whose pools and windows hold encoded random rows.

    At most 1,024 different blocks are drawn. They are repeated in a pool, and are the same in every layer.
    """
    # The jitted function returns the leaves only. For a KVCache, `out_shardings` would be a KVCache of shardings, which
    # cannot be built if a group lacks a pool.
    structs, structure = jax.tree.flatten(KVCache.abstract(schema, mesh))
    shardings = [struct.sharding for struct in structs]
    leaves = jax.jit(lambda: jax.tree.leaves(_random_cache(schema)), out_shardings=shardings)()
    cache = jax.tree.unflatten(structure, leaves)
    return cache.with_mailboxes(mesh)


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_step
def _begin_step(_, cache, batch):
    """Applies a batch's new requests, blocks and lengths to the cache, see `KVCache.begin_step`, but runs no model."""
    return (cache.begin_step(batch),)


def _random_cache(schema):
    """Returns the cache of `random_cache`, on a single device."""
    cache = KVCache.zeros(schema)

    def fill(pool, codec) -> Any:
        """Returns a pool with encoded random rows; None without a pool."""
        if pool is None:
            return None
        _, blocks, rows, _ = jax.tree.leaves(pool)[0].shape  # in windows, `blocks` is the number of slots
        count = min(blocks, 1024)
        encoded = codec.encode(jax.random.normal(jax.random.key(0), (count, rows, codec.dim), jnp.bfloat16))
        order = jnp.arange(blocks) % count
        return jax.tree.map(lambda old, x: jnp.broadcast_to(x[order], old.shape), pool, encoded)

    groups = {
        name: PoolGroup(fill(cache.groups[name].entries, group.entry), fill(cache.groups[name].keys, group.key))
        for name, group in schema.groups.items()
    }
    return dataclasses.replace(cache.with_groups(groups), swa=fill(cache.swa, schema.window_codec))
