"""A stack of a model's attention layers, the part that uses the cache, for `dsv4-jax bench step`."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.cache import Batch, CacheSchema, KVCache, PoolGroup
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.decode.drafts import draft_block
from dsv4_jax.decode.program_store import compile_program, find_program
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn.attention import Attention, StepCarry
from dsv4_jax.nn.hyper_connection import ResidualStreams
from dsv4_jax.nn.layers import Linear, RMSNorm
from dsv4_jax.ops import all_reduce
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.parallel.mailboxes import make_mailboxes
from dsv4_jax.parallel.sharded_step import sharded_step


DRAWS = 32  # steps in a row that have different tokens


class AttentionLayer(nnx.Module):
    """`x + attention(norm(x))` of a layer, with random weights."""

    def __init__(self, config: DSV4Config, layer: int, rngs: nnx.Rngs):
        self.layer = layer
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.self_attn = Attention(config, layer, param_dtype=jnp.bfloat16, rngs=rngs)

    def attend(self, x, cache, batch, carry):
        """Maps x [T, hidden] to the attention's output; also returns the carry and the updated cache."""
        y, carry, cache = self.self_attn(self.norm(x), cache.handle(self.layer, batch), carry)
        return all_reduce(y), carry, cache

    def __call__(self, x, cache, batch, carry):
        """Maps x [T, hidden] to the same; also returns the carry and the updated cache."""
        y, carry, cache = self.attend(x, cache, batch, carry)
        return x + y, carry, cache


class DraftAttention(AttentionLayer):
    """The attention of the multi-token-prediction block and its input projections."""

    def __init__(self, config: DSV4Config, layer: int, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs)
        hidden, options = config.hidden_size, dict(param_dtype=jnp.bfloat16, rngs=rngs)
        self.e_proj, self.h_proj = Linear(hidden, hidden, **options), Linear(hidden, hidden, **options)

    def join(self, streams, embedded):
        """Combines the streams with the next token's embedding, like `MTPBlock.join`."""
        projected = self.h_proj(self.norm(streams.reshape(-1, streams.shape[-1]))).reshape(streams.shape)
        return projected + self.e_proj(self.norm(embedded))[:, None, :]

    def __call__(self, residual, cache, batch, carry):
        """Maps streams [T, hc_mult, hidden] to the same; also returns the carry and the updated cache."""
        y, carry, cache = self.attend(residual.streams[:, 0], cache, batch, carry)
        return ResidualStreams(residual.streams + y[:, None, :]), carry, cache

    def write_window(self, streams, cache, batch):
        """Returns the cache as `__call__` updates it."""
        rows = self.self_attn.window_rows(self.norm(streams[:, 0]), batch.positions)
        return cache.handle(self.layer, batch).write_swa(rows).cache


class DraftingStack(nnx.Module):
    """A stack of layers that can draft tokens."""

    config: DSV4Config
    mtp: nnx.List  # the layers that draft

    def step_bytes(self, tokens: int) -> int:
        """Returns the bytes of weights that a step of `tokens` tokens reads, without those that only drafts read."""
        return tree_bytes(nnx.state(self)) - tree_bytes(nnx.state(self.mtp))

    def draft_bytes(self, requests: int, count: int) -> int:
        """Returns the bytes of weights that drafts read: all of a block for each, or all of DSpark's layers once."""
        return (count if self.config.dspark is None else min(count, 1)) * tree_bytes(nnx.state(self.mtp))

    def draft(
        self, x: Float[Array, "T D"], cache: KVCache, batch: Batch, tokens: int, count: int
    ) -> tuple[Shaped[Array, "R ..."], KVCache]:
        """Writes the draft layers' windows for a step's tokens, then drafts as if all of them were accepted.

        Takes the step's output, cache and batch, its tokens a request, and the number of drafts of each request. What
        drafts are made from is made up from the output, and for an MTP block a draft's embedding from its streams.
        """
        last = jnp.arange(1, x.shape[0] // tokens + 1, dtype=jnp.int32) * tokens - 1
        at_last = {name: getattr(batch, name)[last] for name in ("token_ids", "positions", "slots")}
        last_tokens = dataclasses.replace(batch, **at_last)
        if (dspark := self.config.dspark) is not None:
            model, taps = cast(Any, self), jnp.repeat(x[:, None, :], len(dspark.target_layer_ids), axis=1)
            anchors = dataclasses.replace(last_tokens, positions=last_tokens.positions + 1)
            cache, seeds = model.dspark_write(taps, cache, batch), jnp.zeros(last.shape, jnp.uint32)
            drafts, _, _, cache = draft_block(model, cache, anchors, GREEDY, seeds, count=count)
            return drafts, cache
        (block,) = self.mtp
        streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))
        cache = block.write_window(block.join(streams, x), cache, batch)

        def draft_one(carry, ahead):
            streams, cache = carry
            drafted = dataclasses.replace(last_tokens, positions=last_tokens.positions + ahead)
            residual = ResidualStreams(block.join(streams, streams[:, -1]))
            residual, _, cache = block(residual, cache, drafted, StepCarry())
            return (residual.merged(), cache), None

        (streams, cache), _ = lax.scan(draft_one, (streams[last], cache), jnp.arange(1, count + 1, dtype=jnp.int32))
        return streams[:, 0], cache


class AttentionStack(DraftingStack):
    """`x + attention(norm(x))`, layer after layer, with random weights."""

    def __init__(self, config: DSV4Config, rngs: nnx.Rngs):
        self.config = config
        self.layers = nnx.List([AttentionLayer(config, i, rngs) for i in range(config.num_hidden_layers)])
        kind = DraftAttention if config.dspark is None else AttentionLayer
        self.mtp = nnx.List([kind(config, i, rngs) for i in range(config.num_hidden_layers, len(config.layers))])

    def __call__(self, x: Float[Array, "T D"], cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Maps [T, hidden] bfloat16 to the same; also returns the updated cache."""
        cache, carry = cache.begin_step(batch), StepCarry()
        for layer in self.layers:
            x, carry, cache = layer(x, cache, batch, carry)
        return x, cache

    def dspark_write(self, taps, cache, batch):
        """Returns the cache with the rows of DSpark's layers, made from taps [T, n, hidden]."""
        rows = {layer.layer: layer.self_attn.window_rows(taps[:, 0], batch.positions) for layer in self.mtp}
        return cache.write_windows(rows, batch)

    def dspark_forward(self, cache, batch):
        """Runs blocks whose embeddings are made up; returns x [T, hidden], logits [T, 1] and the updated cache."""
        x = jnp.broadcast_to(batch.token_ids[:, None], (*batch.token_ids.shape, self.config.hidden_size))
        x, carry = x.astype(jnp.bfloat16), StepCarry()
        for layer in self.mtp:
            x, carry, cache = layer(x, cache, batch, carry)
        return x, x[:, :1].astype(jnp.float32), cache

    def dspark_correct(self, hidden, logits, previous):
        """Returns the logits and as many confidences: this stack has no head."""
        return logits, logits[:, 0]


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("tokens", "drafts"))
@sharded_step
def stack_step(
    stack: CompiledModel, cache: KVCache, batch: Batch, embeddings: Float[Array, "N D"], *, tokens: int, drafts: int
) -> tuple[Int[Array, "_"], KVCache]:
    """Runs a decode step of `tokens` tokens a request, then drafts `drafts` tokens of each. The cache is donated.

    Tokens are those of `_draw_tokens`. The result is as small as the tokens that an engine's step draws: XLA would keep
    activations in a result of their size, and update every kernel that takes them in the CUDA graph at each call.
    """
    layers = stack.module
    x, batch = _draw_tokens(layers, batch, embeddings)
    y, cache = layers(x, cache, batch)
    if drafts:
        y, cache = layers.draft(y, cache, batch, tokens, drafts)
    return jnp.argmax(y.reshape(y.shape[0], -1), axis=1), cache


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="steps")
@sharded_step
def stack_loop(
    stack: CompiledModel, cache: KVCache, batch: Batch, embeddings: Float[Array, "N D"], *, steps: int
) -> tuple[Float[Array, "T D"], KVCache]:
    """Runs `steps` decode steps without the host. The batch is prepared with `reserve=steps - 1`."""
    layers, cache = stack.module, cache.begin_step(batch)
    x, _ = _draw_tokens(layers, batch, embeddings)
    batch = dataclasses.replace(batch, new_blocks=batch.new_blocks[:0], reset_slots=batch.reset_slots[:0])

    def step(i, carry):
        x, cache = carry
        _, drawn = _draw_tokens(layers, dataclasses.replace(batch, positions=batch.positions + i), embeddings)
        y, cache = layers(x, cache, drawn)
        # Like the next token's embedding, the next input depends on this step and has the scale of the first input.
        return rms_normalize(y.astype(jnp.float32), 1e-6).astype(y.dtype), cache

    return lax.fori_loop(0, steps, step, (x, cache))


def _draw_tokens(layers, batch, embeddings):
    """Returns embeddings [T, hidden] of tokens that depend on the position, and the batch with these tokens.

    `DRAWS` steps in a row have different ones, which select different experts.
    """
    count = batch.token_ids.shape[0]
    rows = (batch.positions % DRAWS * count + batch.token_ids) % embeddings.shape[0]
    ids = rows % layers.config.vocab_size
    return embeddings.at[rows].get(mode="promise_in_bounds"), dataclasses.replace(batch, token_ids=ids)


@functools.partial(jax.jit, donate_argnames="cache")
def begin_step(cache: KVCache, batch: Batch) -> KVCache:
    """Runs `KVCache.begin_step` alone, which gives requests their blocks."""
    (cache,) = sharded_step(lambda _, cache, batch: (cache.begin_step(batch),))((), cache, batch)
    return cache


def random_cache(schema: CacheSchema, mesh: Mesh | None = None) -> KVCache:
    """Returns a cache, on the default device or on a mesh, whose pools and rings hold encoded random rows.

    1024 random blocks are repeated, and are the same in every layer.
    """
    cache = jax.jit(functools.partial(_random_cache, schema))
    if mesh is None:
        return cache()
    # Makes the leaves alone, because a cache of shardings cannot be built where a group lacks a pool.
    shardings, structure = jax.tree.flatten(KVCache.abstract(schema).shardings(mesh))
    leaves = jax.jit(lambda: jax.tree.leaves(cache()), out_shardings=shardings)()
    return dataclasses.replace(jax.tree.unflatten(structure, leaves), mailboxes=make_mailboxes(mesh))


def _random_cache(schema):
    cache = KVCache.zeros(schema)

    def fill(pool, codec):
        _, blocks, rows, _ = jax.tree.leaves(pool)[0].shape  # blocks or slots
        some = codec.encode(jax.random.normal(jax.random.key(0), (min(blocks, 1024), rows, codec.dim), jnp.bfloat16))
        order = jnp.arange(blocks) % min(blocks, 1024)
        return jax.tree.map(lambda old, x: jnp.broadcast_to(x[order][None], old.shape), pool, some)

    new = {
        name: PoolGroup(fill(pools.entries, group.entry), None if group.key is None else fill(pools.keys, group.key))
        for (name, group), pools in zip(schema.groups.items(), cache.groups.values(), strict=True)
    }
    return dataclasses.replace(cache.with_groups(new), swa=fill(cache.swa, schema.window_codec))


class StackDecoder:
    """Decodes `requests` requests of one length in a cache of its own.

    A step has `tokens` tokens of each request, and drafts `drafts` more. Steps in a row have different tokens, which
    select different experts, so a mean of `DRAWS` steps hardly depends on a draw. After the first step, `step_text` is
    XLA's text of the program, and `compile_seconds` the time to trace, lower and compile it.
    """

    def __init__(self, stack: CompiledModel, manager: KVCacheManager, requests: int, tokens: int = 1, drafts: int = 0):
        self.stack, self.manager, self.requests, self.step_text = stack, manager, requests, ""
        self.tokens, self.drafts, self.num_shards = tokens, drafts, manager.requests.num_shards
        self.compile_seconds: dict[str, float] = {}
        shape = DRAWS * requests * tokens, manager.schema.config.hidden_size
        embeddings = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
        self._embeddings = manager.requests.put(embeddings, "tokens")
        self._cache: KVCache | None = None
        self._slots: list[int] = []
        self._step: Any = None  # the programs, compiled or loaded when they first run
        self._loop: Any = None

    def start_requests(self, past: int) -> None:
        """Replaces all requests by new ones with `past` tokens each."""
        for slot in self._slots:
            self.manager.release(slot)
        self._slots = [self.manager.admit() for _ in range(self.requests)]
        batch = self.manager.prepare_forward({slot: [0] for slot in self._slots}, reserve=past)
        self._cache = begin_step(
            random_cache(self.manager.schema, self.manager.mesh) if self._cache is None else self._cache, batch
        )
        for slot in self._slots:
            self.manager.advance(slot, past - 1)

    def batch(self, reserve: int = 0) -> Batch:
        """Returns a batch of every request's tokens, with room for `reserve` more. Requests keep one token each."""
        size, vocab = self.requests // self.num_shards * self.tokens, self.manager.schema.config.vocab_size
        ids = {slot: [(slot * self.tokens + i) % vocab for i in range(self.tokens)] for slot in self._slots}
        batch = self.manager.prepare_forward(ids, reserve=reserve, prefill_size=size, decode_size=size)
        for slot in self._slots:
            self.manager.rewind(slot, self.tokens - 1)
        return batch

    def step(self, batch: Batch) -> Int[Array, "_"]:
        """Runs one decode step and returns the result of `stack_step`."""
        args = self.stack, self._cache, batch, self._embeddings
        if self._step is None:
            program = _program(stack_step, args, tokens=self.tokens, drafts=self.drafts)
            self._step, self.step_text = program.call, program.call.as_text() or ""
            self.compile_seconds = {name: round(seconds, 2) for name, seconds in program.seconds.items()}
        y, self._cache = self._step(*args)
        return y

    def loop(self, batch: Batch, steps: int) -> Float[Array, "T D"]:
        """Runs `steps` steps of one token on the device. Returns the last output. `batch` has `reserve=steps - 1`."""
        for slot in self._slots:
            self.manager.advance(slot, steps - 1)
        args = self.stack, self._cache, batch, self._embeddings
        if self._loop is None:
            self._loop = _program(stack_loop, args, steps=steps).call
        y, self._cache = self._loop(*args)
        return y

    def free_cache(self) -> None:
        """Frees the cache's memory. `start_requests` makes a new cache."""
        self._cache = None


def _program(function, args, **options):
    return find_program(function, args, options) or compile_program(function, args, options)


def floor_bytes(decoder: StackDecoder, context: int) -> int:
    """Returns the bytes that a device has to read in a step: weights, attended rows and scored keys.

    An MTP block and its window are read once for each draft, DSpark's layers once. Of the routed experts, the expected
    number is counted that tokens hit at random.
    """
    schema, stack = decoder.manager.schema, decoder.stack.module
    config, row = schema.config, tree_bytes(schema.window_codec.struct)
    windows = decoder.drafts if config.dspark is None else config.num_draft_layers * (decoder.drafts > 0)
    read = windows * min(context, config.sliding_window) * row
    for spec in config.specs:
        read += min(context, config.window(spec.layer)) * row
        if spec.group is not None:
            group, entries = schema.groups[spec.group], context // spec.compress_rate
            attended = entries if spec.selection is None else min(entries, config.topk(spec.selection))
            read += attended * tree_bytes(group.entry.struct)
            if spec.selects and group.key is not None:
                read += entries * tree_bytes(group.key.struct)
    requests = decoder.requests // decoder.num_shards
    return requests * read + stack.step_bytes(requests * decoder.tokens) + stack.draft_bytes(requests, decoder.drafts)
