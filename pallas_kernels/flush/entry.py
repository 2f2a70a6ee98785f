"""One entry: the context of pooling it, and its norm, rotation, quantization and store."""

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
    """A warpgroup's view of a compressor; the buffers in shared memory are its own."""

    c: CompressorOperands  # references to the compressor's operands and its static options
    slots_gmem: Any  # [T] int32
    positions_gmem: Any  # [T] int32
    max_in_call: int  # maximum number of a window's rows that are in the call; the others are in the ring
    first: Any = 0  # first channel of the warpgroup
    scratch_smem: Any = None  # buffer for exchanges, one value for each channel of the warpgroup
    stage_smem: Any = None  # [2 * rows * D] values and logits of a short window
    biases_smem: Any = None  # [rows that can be in the call * D] position biases of a short window

    @property
    def first_in_call(self) -> int:
        """The first row of a window that can be in the call; those before it are always in the ring."""
        return max(self.c.rows - self.max_in_call, 0)

    def state_row(self, slot, position):
        """Returns the row of the states."""
        c = self.c
        return (c.state_layer[0] * c.num_slots + slot) * c.ring + lax.rem(position, c.ring)


def rows_in_call(ctx: FlushContext, token) -> Any:
    """Counts the rows in the call of the window that closes at `token`."""
    limit = min(ctx.max_in_call, ctx.c.rows)
    if limit == 1:
        return jnp.int32(1)
    back = vectors.thread()
    slots = vectors.take(ctx.slots_gmem, token - back)
    # The tokens of a slot are adjacent.
    is_row = (slots == ctx.slots_gmem[token]) & (back <= token) & (back < limit)
    return vectors.count(jnp.where(is_row, 1, 0))


@dataclasses.dataclass(frozen=True)
class EntryTarget:
    """The place where an entry is stored, and what the warpgroup needs to finish its channels of the pooled vector."""

    row_gmem: Any  # references to the entry's bytes in each pool
    keep: Any  # bool scalar, False if the request has no block for the entry; then nothing is stored
    norm: jax.Array  # weights of the norm, one for each channel
    angle: jax.Array  # angles by which the channels are rotated, arbitrary for channels without RoPE


def find_target(ctx: FlushContext, token) -> EntryTarget:
    """Returns the target of the window that closes at `token`."""
    c = ctx.c
    slot = ctx.slots_gmem[token]
    position = ctx.positions_gmem[token]
    per_block = jnp.int32(c.pools[0].shape[2])
    entry = lax.div(position, c.rate)
    logical = lax.div(entry, per_block)
    block = c.block_table[slot, jnp.minimum(logical, c.block_table.shape[1] - 1)]
    keep = (logical < c.block_table.shape[1]) & (block >= 0)
    row_gmem = [pool.at[c.pool_layer[0], jnp.maximum(block, 0), lax.rem(entry, per_block)] for pool in c.pools]
    channel = vectors.channels(ctx.scratch_smem.shape[0]) + ctx.first
    norm = vectors.take(c.norm_weight, channel)
    rotated = channel - (c.dim - 2 * c.inv_freq.shape[0])
    frequency = vectors.take(c.inv_freq, rotated >> 1)
    window_start = position - (c.rate - 1)
    return EntryTarget(row_gmem, keep, norm, frequency * window_start.astype(jnp.float32))


def rotation(ctx: FlushContext, target: EntryTarget) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine of the angles, arbitrary for channels that are not rotated."""
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
    """Norms, rotates, quantizes and stores the pooled entry, of which x are the warpgroup's channels.

    `across(combine, x)` combines x, equal within each slice of 64 channels, over all slices.
    """

    def over_channels(combine, x):
        return across(combine, vectors.butterfly(combine, x, exact_math.SLICE // 2, 1, ctx.scratch_smem))

    x = _norm_and_rotate(ctx, target, rotation, x, over_channels)
    layout = ctx.c.layout
    if isinstance(layout, RowLayout):
        largest = functools.partial(over_channels, jnp.maximum)
        encode_row(x, target.row_gmem, layout, largest, ctx.first, target.keep, ctx.scratch_smem)
    else:
        pl.when(target.keep)(functools.partial(encode_key, x, target.row_gmem, layout, ctx.scratch_smem))


def max_logit(logits: list[jax.Array]) -> jax.Array:
    """Returns the largest logit, finite even if no row exists and all are -inf."""
    return jnp.maximum(functools.reduce(jnp.maximum, logits), exact_math.LOWEST)


def softmax_weights(logits: list[jax.Array], peak: jax.Array) -> list[jax.Array]:
    """Returns exp(logit - peak) of each logit."""
    return [exact_math.exp_negative(logit - peak, vector_product) for logit in logits]


def weighted_sum(weights: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """Returns the sum of weight * value."""
    return exact_math.tree_sum([vector_product(w, x) for w, x in zip(weights, values, strict=True)])


def normalize(weight: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the pooled entry, total / weight."""
    return total * exact_math.reciprocal(weight, vector_product)


def _norm_and_rotate(ctx, target, rotation, x, over_channels):
    """Rounds x and applies the RMS norm and RoPE."""
    c = ctx.c
    product = vector_product
    channel = vectors.channels(x.shape[0]) + ctx.first
    x = round_bfloat16(x)
    mean_square = product(over_channels(jnp.add, product(x, x)), 1 / c.dim)
    x = round_bfloat16(target.norm * (x * exact_math.inverse_sqrt(mean_square + c.eps, product)))
    partner = vectors.exchange(x, 1, ctx.scratch_smem)
    cos, sin = rotation
    turned = product(x, cos) + product(partner, jnp.where((channel & 1) == 0, -sin, sin))
    return jnp.where(channel < c.dim - 2 * c.inv_freq.shape[0], x, round_bfloat16(turned))
