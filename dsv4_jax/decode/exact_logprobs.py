"""`logprobs`: differentiable log-probabilities of sequences, whose values equal an engine's rollout bit for bit."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.common.mesh_axes import DATA_AXIS
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import log_probabilities
from dsv4_jax.decode.step import Model, run_model
from dsv4_jax.nn.layer_stack import LayerStack
from dsv4_jax.ops.views import int_range, tiles
from dsv4_jax.parallel.mesh import check_divisible
from dsv4_jax.parallel.sharded_step import mesh_of, sharded_rows
from pallas_kernels.runtime.pytrees import on_leaves


@dataclasses.dataclass(frozen=True)
class RolloutShape:
    """The shapes of a batch-invariant engine's program, on which the bits of its log-probabilities depend.

    `Engine.rollout_shape` returns the shapes of an engine.

    Attributes:
      schema: geometry of the engine's cache. Its fields `num_blocks` and `max_requests` do not matter.
      token_budget: number of tokens in each step.
      logits_rows: number of tokens for which a step computes logits.
    """

    schema: CacheSchema
    token_budget: int
    logits_rows: int


def logprobs(
    model: Model,
    tokens: Int[Array, "*shape"],
    lengths: Int[Array, "S"],
    shape: RolloutShape,
    adapters: Int[Array, "S"] | None = None,
) -> Float[Array, "*shape"]:
    """Computes the log-probability of each token given the earlier tokens of its sequence.

    The values equal `Request.logprobs` in a batch-invariant engine with this model, bit for bit. For this, the
    sequences run in chunks of `token_budget` tokens, with the shapes and the cache of the engine's program.

    Gradients are taken at the values of the rollout. The rounding of cache rows passes gradients on unchanged
    (straight-through, see `FakeQuantFormat`). The backward pass recomputes chunks and layers. For this, a copy of the
    cache before each chunk is kept, in the cache's own format. The memory of these copies grows with the square of the
    number of tokens: divide a large batch, and add up the gradients. Padding costs as much time as tokens, so pack
    sequences whose lengths differ much.

    If the model lies on a mesh, its devices compute as in a step of an engine on this mesh, and each gradient has the
    sharding of its parameter. Axis 0 of tokens, lengths, adapters and result is sharded over the mesh axis "data".
    Packed tokens [N] are therefore divided into one range of equal size for each shard, which holds the shard's
    sequences and then padding.

    Call this function within `jax.jit`. Elsewhere each call compiles again.

    Args:
      model: the model. Gradients are with respect to its floating-point arrays.
      tokens: [S, N] sequences of any integer type, padded at the end; or [N] sequences one after another, padded at
        the end.
      lengths: [S] number of tokens of each sequence, of any integer type, at most N and `max_context`. Packed sequences
        have at most N tokens together. Within `jax.jit` neither lengths nor adapters are checked.
      shape: shapes of the rollout's program (static).
      adapters: [S] int32 index of each sequence's adapter (see `nn.lora`), -1 = no adapter; None = no sequence has one.

    Returns:
      float32 array in the shape of `tokens`; zeros for the first token of each sequence and for padding.

    Raises:
      TypeError: tokens or lengths are no integers.
      ValueError: the shapes do not agree, a length or an adapter is out of range, or the mesh axis "data" does not
        divide the number of sequences or of packed tokens.
    """
    model = model.module if isinstance(model, CompiledModel) else model
    mesh = mesh_of(model)
    _check(tokens, lengths, shape, {} if mesh is None else mesh.shape)
    # The computation needs the vocabulary's size and negative numbers, which a small or unsigned type cannot hold.
    tokens, lengths = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths))
    adapter_names = getattr(model, "adapter_names", ())
    if adapters is None and adapter_names:
        adapters = jnp.full(lengths.shape, -1, jnp.int32)  # an engine's batches also hold -1 for "no adapter"
    elif adapter_names and not isinstance(adapters, jax.core.Tracer):
        adapter_ids = np.asarray(adapters)
        if adapter_ids.min(initial=-1) < -1 or adapter_ids.max(initial=-1) >= len(adapter_names):
            raise ValueError(f"adapters must be from -1 to {len(adapter_names) - 1}, got {adapter_ids.tolist()}")
    return sharded_rows(functools.partial(_local_logprobs, shape), placed=1)(model, tokens, lengths, adapters)


def _local_logprobs(shape, model, tokens, lengths, adapters):
    """Computes `logprobs` of the sequences of a shard. The model's arrays are this device's shards."""
    slots, positions = _places(tokens.shape, lengths)
    flat = tokens.reshape(-1)
    targets = jnp.roll(flat, -1)
    size = shape.token_budget
    chunks = tiles(flat, size), tiles(slots, size, -1), tiles(positions, size, -1), tiles(targets, size)
    blocks = -(-flat.size // shape.schema.block_tokens) + len(lengths)
    schema = dataclasses.replace(shape.schema, max_requests=len(lengths), num_blocks=blocks)
    shape = dataclasses.replace(shape, schema=schema)
    values = _run(shape, model, (lengths, adapters), chunks).reshape(-1)[: flat.size]
    return jnp.where(positions > 0, jnp.roll(values, 1), 0.0).reshape(tokens.shape)


def _check(tokens, lengths, shape, sizes):
    """Raises TypeError or ValueError for arguments of `logprobs` that do not fit. `sizes` is {mesh axis: its size}."""
    for name, array in {"tokens": tokens, "lengths": lengths}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {array.dtype}, it must be of an integer type")
    if tokens.ndim not in (1, 2) or (tokens.ndim == 2 and len(tokens) != len(lengths)):
        raise ValueError(
            f"tokens must be [S, N] or [N] for lengths [S], got {list(tokens.shape)} for lengths {list(lengths.shape)}"
        )
    check_divisible(sizes, **{"len(tokens)": len(tokens), "len(lengths)": len(lengths)})
    if isinstance(lengths, jax.core.Tracer):
        return
    longest = min(tokens.shape[-1], shape.schema.max_context)
    numbers = np.asarray(lengths)
    if numbers.min(initial=0) < 0 or numbers.max(initial=0) > longest:
        raise ValueError(f"lengths must be from 0 to {longest}, got {numbers.tolist()}")
    shards = sizes.get(DATA_AXIS, 1)
    total = numbers.reshape(shards, -1).sum(axis=1).max(initial=0)
    if tokens.ndim == 1 and total > (room := tokens.size // shards):
        where = " in a shard" * (shards > 1)
        raise ValueError(f"the lengths sum up to {total}, but there are {room} tokens{where}")


def _places(shape, lengths):
    """Returns (slots, positions) of the flattened tokens, both -1 for padding. A slot is the index of a sequence."""
    index = int_range(math.prod(shape))
    begins = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    if len(shape) == 2:
        begins = int_range(shape[0]) * shape[1]
    slots = jnp.searchsorted(begins, index, side="right").astype(jnp.int32) - 1
    positions = index - begins[slots]
    is_token = positions < lengths[slots]
    return jnp.where(is_token, slots, -1), jnp.where(is_token, positions, -1)


def _empty_cache(schema, lengths):
    """Returns an empty cache with blocks for sequences of these lengths."""
    counts = -(-lengths // schema.block_tokens)
    begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
    index = int_range(schema.max_blocks)[None, :]
    table = jnp.where(index < counts[:, None], begins[:, None] + index, -1).astype(jnp.int32)
    return dataclasses.replace(KVCache.zeros(schema), block_table=table)


def _run_chunk(shape, model, cache, chunk, adapters, *, remat=False):
    """Runs the tokens of a chunk like a step of an engine.

    Args:
      shape: the RolloutShape.
      model: the model.
      cache: the cache before the chunk.
      chunk: (ids, slots, positions, targets), each [token_budget] int32.
      adapters: [S] int32 index of each sequence's adapter, or None.
      remat: whether a backward pass recomputes the values within layers. The bits of the log-probabilities then may
        differ.

    Returns:
      ([token_budget] float32 log-probabilities, where entry i is that of targets[i] given the tokens up to ids[i]; the
      cache after the chunk).
    """
    if remat and isinstance(model, nnx.Module):
        for _, module in nnx.iter_modules(model):
            if isinstance(module, LayerStack):
                module.remat = True
    ids, slots, positions, targets = chunk
    batch = Batch(ids, positions, slots, prefill=True, adapters=adapters)
    hidden, cache = run_model(model, cache, batch)

    def score(group):
        """Returns the log-probabilities of a group of tokens."""
        hidden, targets = group
        return log_probabilities(model.logits(hidden), targets)[0]

    if remat:
        return jax.checkpoint(score)((hidden, targets)), cache
    values = jax.lax.map(score, (tiles(hidden, shape.logits_rows), tiles(targets, shape.logits_rows)))
    return values.reshape(-1)[: len(ids)], cache


def _is_float(x):
    """Returns whether a node of a tree is a floating-point array."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _floats(tree):
    """Returns the list of the floating-point arrays in a tree, which have gradients."""
    return list(filter(_is_float, jax.tree.leaves(tree)))


def _scan(shape, model, sequences, chunks, *, keep):
    """Runs all chunks. Returns (log-probabilities [chunks, token_budget], the cache before each chunk if `keep`)."""
    lengths, adapters = sequences

    def step(cache, chunk):
        """Runs a chunk."""
        values, after = _run_chunk(shape, model, cache, chunk, adapters)
        return after, (values, cache if keep else None)

    return jax.lax.scan(step, _empty_cache(shape.schema, lengths), chunks)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(shape, model, sequences, chunks):
    """Returns the log-probabilities [chunks, token_budget]; `sequences` is (lengths, adapters)."""
    return _scan(shape, model, sequences, chunks, keep=False)[0]


def _run_forward(shape, model, sequences, chunks):
    """Returns the result of `_run`, and the values that `_run_backward` needs."""
    values, caches = _scan(shape, model, sequences, chunks, keep=True)
    return values, (model, sequences, chunks, caches)


def _run_backward(shape, saved, cotangents):
    """Goes through the chunks from last to first, and carries the cotangents of the model and of the cache.

    Caches are in `FakeQuantFormat` here, so that cotangents pass through them.
    """
    model, (_, adapters), chunks, caches = saved

    def step(carry, inputs):
        """Goes back through a chunk: adds its cotangents of the model to the carry."""
        model_total, cache_cotangents = carry
        cache, chunk, value_cotangents = inputs

        def outputs_of(model, cache):
            """Runs the chunk, and returns the results that have gradients."""
            values, after = _run_chunk(shape, model, cache, chunk, adapters, remat=True)
            return values, _floats(after)

        function_of_floats, floats = on_leaves(outputs_of, (model, cache.fake_quantized()), {}, _is_float)
        _, gradient_function = jax.vjp(function_of_floats, *floats)
        found = gradient_function((value_cotangents, cache_cotangents))
        count = len(model_total)
        model_total = [x + y.astype(jnp.float32) for x, y in zip(model_total, found[:count], strict=True)]
        return (model_total, list(found[count:])), None

    cache = jax.tree.map(lambda x: x[0], caches).fake_quantized()
    zeros = list(map(jnp.zeros_like, _floats(cache)))
    model_total = [jnp.zeros(x.shape, jnp.float32) for x in _floats(model)]
    (model_total, _), _ = jax.lax.scan(step, (model_total, zeros), (caches, chunks, cotangents), reverse=True)
    totals = iter(model_total)
    return jax.tree.map(lambda x: next(totals).astype(x.dtype) if _is_float(x) else None, model), None, None


_run.defvjp(_run_forward, _run_backward)
