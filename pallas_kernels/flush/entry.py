"""One compressed entry: softmax-weighted pooling of a window's rows, then norm, rotation, quantization and store."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.formats import exact_math
from pallas_kernels.formats.exact_math import round_bfloat16, vector_product
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.formats.row_encoder import encode_key, encode_row
from pallas_kernels.mgpu import vectors


@dataclasses.dataclass(frozen=True)
class FlushContext:
    """The operands and the buffers of a warpgroup that pools windows or stores entries of a compressor."""

    c: CompressorOperands  # references to the compressor's operands and its static options
    slots_gmem: Any  # [T] int32, each token's request slot; -1 = padding
    positions_gmem: Any  # [T] int32, each token's position in its request; -1 = padding
    max_in_call: int  # maximum number of tokens of a slot in the call; rows of earlier tokens are in the ring
    results_gmem: Any = None  # [n, D] bfloat16, pooled vectors; None if they are stored as entries
    # [T] int32, the row of `results_gmem` for the window that token t closes. If None, this is row t.
    result_rows_gmem: Any = None
    first: Any = 0  # index of the warpgroup's first channel
    scratch_smem: Any = None  # [channels of the warpgroup] float32, scratch for `vectors.exchange`
    stage_smem: Any = None  # [2 * rows * D] float32, the values, then the logits of a short window
    # [n * D] float32, position biases of those n rows of a short window that can be in the call: the rows from
    # `first_in_call` to the last one.
    biases_smem: Any = None

    @property
    def first_in_call(self) -> int:
        """The index of a window's first row that can be in the call. The preceding rows are always in the ring."""
        return max(self.c.rows - self.max_in_call, 0)

    def state_row(self, slot, position):
        """Returns the index of the state row of a slot's position, counted over the rows of all layers and slots."""
        c = self.c
        return (c.state_layer[0] * c.num_slots + slot) * c.ring + lax.rem(position, c.ring)


def rows_in_call(ctx: FlushContext, token) -> Any:
    """Returns how many rows of the window that closes at `token` are in the call, as an int32 scalar."""
    limit = min(ctx.max_in_call, ctx.c.rows)
    if limit == 1:
        return jnp.int32(1)
    back = vectors.thread()  # thread i looks at token `token - i`
    slots = vectors.take(ctx.slots_gmem, token - back)
    # The tokens of a slot are adjacent. So the window's rows in the call are the tokens of the same slot among the
    # `limit` tokens that end with `token`.
    is_row = (slots == ctx.slots_gmem[token]) & (back <= token) & (back < limit)
    return vectors.count(jnp.where(is_row, 1, 0))


@dataclasses.dataclass(frozen=True)
class EntryTarget:
    """References to the rows of the pools that receive an entry, and the operands of the entry's norm and rotation."""

    row_gmem: Any  # references to the entry's row in each pool, a tuple like the pools
    keep: Any  # bool scalar, whether the request has a block for the entry; otherwise the entry is not stored
    norm: Any  # [channels] float32, weights of the norm; None if the entry is normed already
    angle: jax.Array  # [channels] float32, angles of the rotation in radians, arbitrary for channels without RoPE


def find_target(ctx: FlushContext, slot, position) -> EntryTarget:
    """Finds where to store the entry of the window that closes at `position` in the request of a slot."""
    c = ctx.c
    per_block = jnp.int32(c.pools[0].shape[2])
    entry = lax.div(position, c.rate)
    logical = lax.div(entry, per_block)
    block = c.block_table[slot, jnp.minimum(logical, c.block_table.shape[1] - 1)]
    keep = (logical < c.block_table.shape[1]) & (block >= 0)

    def row_of(pool):
        return pool.at[c.pool_layer[0], jnp.maximum(block, 0), lax.rem(entry, per_block)]

    row_gmem = jax.tree.map(row_of, c.pools)
    channel = vectors.channels(ctx.scratch_smem.shape[0]) + ctx.first
    norm = None if c.norm_weight is None else vectors.take(c.norm_weight, channel)
    rotated = channel - (c.dim - 2 * c.inv_freq.shape[0])
    frequency = vectors.take(c.inv_freq, rotated >> 1)
    window_start = position - (c.rate - 1)
    return EntryTarget(row_gmem, keep, norm, frequency * window_start.astype(jnp.float32))


def rotation(ctx: FlushContext, target: EntryTarget) -> tuple[jax.Array, jax.Array]:
    """Returns (cosine, sine) of the target's angles, each [channels] float32, arbitrary for channels without RoPE."""
    per_thread = ctx.scratch_smem.shape[0] // vectors.THREADS
    last = ctx.first + (vectors.thread() + 1) * per_thread - 1
    rotated = vectors.any_in_warp(jnp.where(last >= ctx.c.dim - 2 * ctx.c.inv_freq.shape[0], 1, 0))
    return lax.cond(
        rotated, lambda: exact_math.cos_sin(target.angle, vector_product), lambda: (target.angle, target.angle)
    )


@jax.named_scope("store_entry")
def store_entry(
    ctx: FlushContext, target: EntryTarget, rotation: tuple[jax.Array, jax.Array], x: jax.Array, across: Callable
) -> None:
    """Normalizes, rotates, quantizes and stores a pooled entry. If `target.norm` is None, x is already normalized.

    Args:
      ctx: operands and buffers of the warpgroup.
      target: result of `find_target`.
      rotation: result of the function `rotation`.
      x: [channels] float32, the warpgroup's channels of the pooled entry.
      across: function (combine, values) that reduces over all slices of 64 channels of the entry, including the slices
        of other warpgroups. `combine` is an elementwise function, such as `jnp.maximum`. `values` is [channels] float32
        with one value for each slice, repeated in all channels of the slice. The result is [channels] equal values.
    """
    channel = vectors.channels(x.shape[0]) + ctx.first
    if target.norm is not None:
        x = rms_norm(ctx, target.norm, x, across)
    x = _rotate(ctx, rotation, x, channel)
    layout = ctx.c.layout
    if isinstance(layout, RowLayout):
        largest = functools.partial(_over_channels, ctx, across, jnp.maximum)
        encode_row(x, target.row_gmem, layout, largest, ctx.first, target.keep, ctx.scratch_smem)
    else:
        pl.when(target.keep)(functools.partial(encode_key, x, target.row_gmem, layout, ctx.scratch_smem))


def max_logit(logits: list[jax.Array]) -> jax.Array:
    """Returns the largest logit of each channel, or `LOWEST` if all logits are -inf because no row exists."""
    return jnp.maximum(functools.reduce(jnp.maximum, logits), exact_math.LOWEST)


def softmax_weights(logits: list[jax.Array], peak: jax.Array) -> list[jax.Array]:
    """Returns exp(logit - peak) for each of the logits; no logit may be above `peak`."""
    return [exact_math.exp_negative(logit - peak, vector_product) for logit in logits]


def weighted_sum(weights: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """Returns the sum of weight * value over the rows, for each channel."""
    return exact_math.tree_sum([vector_product(w, x) for w, x in zip(weights, values, strict=True)])


def normalize(weight: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the pooled entry: `total`, the weighted sum of values, divided by `weight`, the sum of weights."""
    return total * exact_math.reciprocal(weight, vector_product)


def rms_norm(ctx: FlushContext, norm: jax.Array, x: jax.Array, across: Callable) -> jax.Array:
    """Applies the RMS norm to the warpgroup's channels of an entry. Rounds to bfloat16 before and after the norm.

    Args:
      ctx: operands and buffers of the warpgroup.
      norm: [channels] float32, weights of the norm.
      x: [channels] float32, the warpgroup's channels of the entry.
      across: as in `store_entry`.

    Returns:
      [channels] float32.
    """
    product = vector_product
    x = round_bfloat16(x)
    mean_square = product(_over_channels(ctx, across, jnp.add, product(x, x)), 1 / ctx.c.dim)
    return round_bfloat16(norm * (x * exact_math.inverse_sqrt(mean_square + ctx.c.eps, product)))


def _over_channels(ctx, across, combine, x):
    """Reduces x over all channels of the entry: within each slice, then by `across` over slices, see `store_entry`."""
    return across(combine, vectors.butterfly(combine, x, exact_math.SLICE // 2, 1, ctx.scratch_smem))


def _rotate(ctx, rotation, x, channel):
    """Applies RoPE to x, and rounds the rotated channels to bfloat16."""
    c = ctx.c
    product = vector_product
    partner = vectors.exchange(x, 1, ctx.scratch_smem)
    cos, sin = rotation
    turned = product(x, cos) + product(partner, jnp.where((channel & 1) == 0, -sin, sin))
    return jnp.where(channel < c.dim - 2 * c.inv_freq.shape[0], x, round_bfloat16(turned))
