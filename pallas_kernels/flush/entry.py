"""One entry: what pooling needs, and norming, rotating, quantising and storing what was pooled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.formats.exact_math import (
    LOWEST,
    SLICE,
    cos_sin,
    exp_negative,
    inverse_sqrt,
    reciprocal,
    round_bfloat16,
    tree_sum,
)
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.formats.products import vector_product
from pallas_kernels.formats.row_encoder import encode_key, encode_row
from pallas_kernels.mgpu import vectors


@dataclasses.dataclass(frozen=True)
class FlushContext:
    """What a warpgroup works on, and with.

    Attributes:
      c: the compressor, for shapes and static options.
      refs: references to its operands, see `CompressorOperands.in_place`.
      slots, positions: references, [T] int32.
      most_in_call: rows of a window that can be in the call; the others are in the ring.
      first: this warpgroup's first channel.
      scratch: shared memory for exchanges, a value for each of this warpgroup's channels.
      stage: short windows: [2 * rows * D], this warpgroup's rows of a window: values, then logits.
      biases: short windows: [rows that can be in the call * D], this warpgroup's.
    """

    c: CompressorOperands
    refs: CompressorOperands
    slots: Any
    positions: Any
    most_in_call: int
    first: Any = 0
    scratch: Any = None
    stage: Any = None
    biases: Any = None

    def state_row(self, slot, position):
        """Row of the states."""
        _, num_slots, ring, _ = self.c.state_kv.shape
        return (self.refs.state_layer[0] * num_slots + slot) * ring + lax.rem(position, jnp.int32(ring))


def in_call(ctx: FlushContext, token) -> Any:
    """How many rows of the window that closes at `token` are in the call."""
    most = min(ctx.most_in_call, ctx.c.rows)
    if most == 1:
        return jnp.int32(1)
    back = vectors.thread()
    slots = vectors.take(ctx.slots, token - back)
    # Tokens of one slot stand together.
    is_row = (slots == ctx.slots[token]) & (back <= token) & (back < most)
    return vectors.count(jnp.where(is_row, 1, 0))


@dataclasses.dataclass(frozen=True)
class EntryTarget:
    """Where an entry goes, and what it takes to finish it.

    Attributes:
      row: references to the bytes of the entry in each pool.
      keep: whether to store it.
      norm, angle: of this warpgroup's channels; arbitrary angles of channels that are not rotated.
    """

    row: Any
    keep: Any
    norm: jax.Array
    angle: jax.Array


def find_target(ctx: FlushContext, token) -> EntryTarget:
    """Reads what the entry of the window that closes at `token` needs beside its rows."""
    c = ctx.c
    slot, position = ctx.slots[token], ctx.positions[token]
    per_block = jnp.int32(c.pools[0].shape[2])
    entry = lax.div(position, jnp.int32(c.rate))
    logical = lax.div(entry, per_block)
    block = ctx.refs.block_table[slot, jnp.minimum(logical, ctx.refs.block_table.shape[1] - 1)]
    keep = (logical < ctx.refs.block_table.shape[1]) & (block >= 0)
    row = [pool.at[ctx.refs.pool_layer[0], jnp.maximum(block, 0), lax.rem(entry, per_block)] for pool in ctx.refs.pools]
    channel = vectors.channels(ctx.scratch.shape[0]) + ctx.first
    norm = vectors.take(ctx.refs.norm_weight, channel)
    rotated = channel - (c.dim - 2 * c.inv_freq.shape[0])
    frequency = vectors.take(ctx.refs.inv_freq, rotated >> 1)
    first = position - (c.rate - 1)
    return EntryTarget(row, keep, norm, frequency * first.astype(jnp.float32))


def rotation(ctx: FlushContext, target: EntryTarget) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles; arbitrary numbers of channels that are not rotated."""
    held = ctx.scratch.shape[0] // vectors.THREADS
    last = ctx.first + (vectors.thread() + 1) * held - 1
    rotated = vectors.any_in_warp(jnp.where(last >= ctx.c.dim - 2 * ctx.c.inv_freq.shape[0], 1, 0))
    return lax.cond(rotated, lambda: cos_sin(target.angle, vector_product), lambda: (target.angle, target.angle))


def store_entry(
    ctx: FlushContext, target: EntryTarget, cos: jax.Array, sin: jax.Array, x: jax.Array, across: Callable
) -> None:
    """Norms, rotates, quantises and stores the pooled entry, of which x has this warpgroup's channels.

    `across`: (combine, x) -> x combined over all slices of 64 channels, where it is the same throughout each slice.
    """

    def over_channels(combine, x):
        return across(combine, vectors.butterfly(combine, x, SLICE // 2, 1, ctx.scratch))

    x = _norm_and_rotate(ctx, target, cos, sin, x, over_channels)
    layout = ctx.c.layout
    if isinstance(layout, RowLayout):
        largest = functools.partial(over_channels, jnp.maximum)
        encode_row(x, target.row, layout, largest, ctx.first, target.keep, ctx.scratch)
    else:
        pl.when(target.keep)(functools.partial(encode_key, x, target.row, layout, ctx.scratch))


def peak_of(logits: list[jax.Array]) -> jax.Array:
    """The largest."""
    # Where no row exists all are -inf: infinity minus infinity must not happen.
    return jnp.maximum(functools.reduce(jnp.maximum, logits), LOWEST)


def factors(logits: list[jax.Array], peak: jax.Array) -> list[jax.Array]:
    """e**(logit - peak) of each."""
    return [exp_negative(logit - peak, vector_product) for logit in logits]


def weighted(factors: list[jax.Array], values: list[jax.Array]) -> jax.Array:
    """The sum of factor * value."""
    return tree_sum([vector_product(f, x) for f, x in zip(factors, values, strict=True)])


def share_of(weight: jax.Array, total: jax.Array) -> jax.Array:
    """The pooled entry: total / weight."""
    return total * reciprocal(weight, vector_product)


def _norm_and_rotate(ctx, target, cos, sin, x, over_channels):
    """Rounding, RMS norm and RoPE."""
    c, product = ctx.c, vector_product
    channel = vectors.channels(x.shape[0]) + ctx.first
    x = round_bfloat16(x)
    mean_square = product(over_channels(jnp.add, product(x, x)), 1 / c.dim)
    x = round_bfloat16(target.norm * (x * inverse_sqrt(mean_square + c.eps, product)))
    other = vectors.exchange(x, 1, ctx.scratch)
    turned = product(x, cos) + product(other, jnp.where((channel & 1) == 0, -sin, sin))
    return jnp.where(channel < c.dim - 2 * c.inv_freq.shape[0], x, round_bfloat16(turned))
