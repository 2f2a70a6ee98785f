"""A stack of a model's attention layers, the part that uses the cache, for `dsv4-jax bench step`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.cache import Batch, CacheSchema, KVCache, PoolGroup
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.decode.drafts import draft
from dsv4_jax.decode.program_store import compile_program, find_program
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn.attention import Attention, StepCarry
from dsv4_jax.nn.hyper_connection import ResidualStreams
from dsv4_jax.nn.layer_stack import LayerStack
from dsv4_jax.nn.layers import AnyRngs, RMSNorm
from dsv4_jax.nn.make_drafts import make_drafts
from dsv4_jax.ops import all_reduce
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.parallel.mailboxes import make_mailboxes
from dsv4_jax.parallel.sharded_step import sharded_step


DRAWS = 32  # steps in a row that have different tokens


class FirstStream(nnx.Module):
    """Stands for a layer's hyper-connection: collapses streams to the first one."""

    def pre(self, residual: ResidualStreams, norm: RMSNorm) -> tuple[Float[Array, "T D"], ResidualStreams]:
        """Returns the normed first stream [T, hidden] and the residual."""
        return norm(residual.streams[:, 0]), residual


class AttentionLayer(nnx.Module):
    """The attention of a DecoderLayer, with random weights: each stream plus `attention(norm(first stream))`."""

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.self_attn = Attention(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.attn_hc = FirstStream()

    def __call__(
        self, residual: ResidualStreams, cache: KVCache, batch: Batch, carry: StepCarry, *, number: Any, **unused: Any
    ) -> tuple[ResidualStreams, StepCarry, KVCache]:
        """Runs the layer; arguments and results are those of `DecoderLayer`."""
        x, _ = self.attn_hc.pre(residual, self.input_layernorm)
        y, carry, cache = self.self_attn(x, cache.handle(number, batch, like=self.layer), carry)
        return dataclasses.replace(residual, streams=residual.streams + all_reduce(y)[:, None, :]), carry, cache


class DraftingStack(nnx.Module):
    """A stack of layers that can draft tokens.

    Attributes:
      config: DSV4Config.
      drafts: the module of the draft layers, or None.
    """

    config: DSV4Config
    drafts: Any

    def step_bytes(self, tokens: int) -> int:
        """Returns the bytes of weights that a step of `tokens` tokens reads, without those that only drafts read."""
        return tree_bytes(self) - tree_bytes(self.drafts)

    def draft_bytes(self, requests: int, count: int) -> int:
        """Returns the bytes of weights that drafting `count` tokens of each request reads.

        A pass reads all weights, but for those of DSpark's Markov head: `markov_w1` is looked up, and `markov_w2` is
        read for each draft.
        """
        times = dict(markov_w1=0, markov_w2=count)
        passes = draft_passes(self.config, count)
        weights = [] if self.drafts is None else nnx.to_flat_state(nnx.state(self.drafts))
        return sum(
            tree_bytes(weight) * next((times[name] for name in path if name in times), passes)
            for path, weight in weights
        )

    def draft(
        self, x: Float[Array, "T D"], cache: KVCache, batch: Batch, tokens: int, count: int
    ) -> tuple[Int[Array, "R count"], KVCache]:
        """Writes the draft layers' windows for a step's tokens, then drafts as if all of them were accepted.

        Takes the step's output, cache and batch, its tokens a request, and the number of drafts of each request. The
        streams that drafts are made from are copies of the output.
        """
        last = jnp.arange(1, x.shape[0] // tokens + 1, dtype=jnp.int32) * tokens - 1
        drafts = self.config.drafts
        assert drafts is not None
        width = len(drafts.target_layer_ids) or self.config.hc_mult
        streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], width, x.shape[1]))
        cache = self.drafts.write(self, streams, cache, batch)
        newest = dataclasses.replace(
            batch, token_ids=batch.token_ids[last], positions=batch.positions[last] + 1, slots=batch.slots[last]
        )
        seeds = jnp.zeros(last.shape, jnp.uint32)
        ids, _, _, cache = draft(self, cache, streams[last], newest, GREEDY, seeds, drafts=count)
        return ids, cache


def draft_passes(config: DSV4Config, count: int) -> int:
    """Returns the number of times that the draft layers run to draft `count` tokens of a request."""
    return 0 if config.drafts is None else -(-count // config.drafts.block_size)


class AttentionStack(DraftingStack):
    """`x + attention(norm(x))`, layer after layer, with random weights. Drafts have made-up embeddings and no head."""

    def __init__(self, config: DSV4Config, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(param_dtype=jnp.bfloat16, rngs=rngs)
        self.config = config
        self.layers = LayerStack(config, range(config.num_hidden_layers), AttentionLayer, **options)
        self.drafts = make_drafts(config, layer_type=AttentionLayer, **options)

    def __call__(self, x: Float[Array, "T D"], cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Maps [T, hidden] bfloat16 to the same; also returns the updated cache."""
        residual = ResidualStreams(x[:, None, :])
        residual, _, cache, _ = self.layers(residual, cache.begin_step(batch), batch, StepCarry())
        return residual.streams[:, 0], cache

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns token ids as embeddings [T, hidden]."""
        ids = batch.token_ids[:, None]
        return jnp.broadcast_to(ids, (len(ids), self.config.hidden_size)).astype(jnp.bfloat16)

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Returns copies of one channel as logits [T, vocab] float32."""
        return jnp.broadcast_to(hidden[:, :1], (len(hidden), self.config.vocab_size)).astype(jnp.float32)


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

    Draft layers and their windows are read in each pass over them. Of the routed experts, the expected number is
    counted that tokens hit at random.
    """
    schema, stack = decoder.manager.schema, decoder.stack.module
    config, row = schema.config, tree_bytes(schema.window_codec.struct)
    windows = config.num_draft_layers * draft_passes(config, decoder.drafts)
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
