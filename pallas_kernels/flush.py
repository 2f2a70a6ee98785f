"""Compression in one launch: state rows in, and for every window that closes one quantised entry out.

A warpgroup takes the tokens of one request (a run) one after the other: it stores the token's state row and, where the
token closes a window, pools the rows of the ring. A thread reads back only what it wrote itself, so a run needs no
fences. Windows of more than 16 rows are split over a cluster of blocks, 16 rows each. Sums have the order that the jnp
reference states, so the bytes do not depend on who adds.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lanes
from pallas_kernels.encode import encode_index, encode_row
from pallas_kernels.exact import (
    GROUP,
    GROUPS,
    LOWEST,
    cos_sin,
    exp_negative,
    fence,
    inverse_sqrt,
    reciprocal,
    round_bfloat16,
    tree_sum,
)
from pallas_kernels.support import interpret_params


@dataclasses.dataclass(frozen=True)
class Compressor:
    """One compressor's operands; D = 128, 256 or 512.

    Attributes:
      kv: [T, width] float32 projections of this call's tokens, width = D, or 2 * D with overlap.
      gate: [T, width] float32 pooling logits, without position bias.
      position_bias: [rate, width] float32; a window is `rate` tokens.
      norm_weight: [D] float32.
      inv_freq: [P] float32, radians per token; the last 2 * P channels are rotated.
      block_table: [slots, blocks of a request] int32, -1 = none.
      state_layer, pool_layer: int32 scalars, indices on axis 0 of states and of pools.
      state_kv, state_gate: [layers, slots, ring, width] float32; ring >= rate, or 2 * rate with overlap.
      pools: of entries, (nope [layers, blocks, entries, D - 2P] uint8, rope [.., 2P] bfloat16, scale [.., D / 64] uint8
        or [.., 1] float32); of indexer keys, (codes [.., D / 2] uint8, scale [.., D / 32 (MXFP4) or D / 16 (NVFP4)]
        uint8).
      eps: of the RMS norm.
      overlap: an entry pools its own window and the one before it.
      index_scale: NVFP4's second-level scale.
    """

    kv: jax.Array
    gate: jax.Array
    position_bias: jax.Array
    norm_weight: jax.Array
    inv_freq: jax.Array
    block_table: jax.Array
    state_layer: jax.Array
    pool_layer: jax.Array
    state_kv: jax.Array
    state_gate: jax.Array
    pools: tuple[jax.Array, ...]
    eps: float
    overlap: bool
    index_scale: float = 1.0

    @property
    def dim(self) -> int:
        return self.norm_weight.shape[0]

    @property
    def rate(self) -> int:
        return self.position_bias.shape[0]

    @property
    def rows(self) -> int:
        """That an entry pools."""
        return self.rate * (2 if self.overlap else 1)

    @property
    def parts(self) -> int:
        """Blocks of a cluster."""
        return -(-self.rows // (GROUP * GROUPS))

    def check(self) -> None:
        """Raises NotImplementedError naming the rule that a shape or dtype breaks."""
        width, (ring, state_width) = self.dim * (2 if self.overlap else 1), self.state_kv.shape[2:]
        rules = {
            f"quantised pools, got {[str(pool.dtype) for pool in self.pools]}": self.pools[0].dtype == jnp.uint8,
            f"entries of 128, 256 or 512 channels, got {self.dim}": self.dim in (128, 256, 512),
            f"windows of 4, 8, ... or 128 rows, got {self.rows}": self.rows in (4, 8, 16, 32, 64, 128),
            f"overlapping windows of {GROUP} or {2 * GROUP} tokens, got {self.rate}": not self.overlap
            or self.rate in (GROUP, 2 * GROUP),
            f"kv float32[T, {width}], got {self.kv.dtype}{list(self.kv.shape)}": self.kv.dtype == jnp.float32
            and self.kv.shape[1] == width,
            f"states of at least {self.rows} rows of {width}, got {ring} of {state_width}": ring >= self.rows
            and state_width == width,
            f"a block table with columns, got {list(self.block_table.shape)}": self.block_table.shape[1] > 0,
        }
        widths = [pool.shape[-1] for pool in self.pools]
        if len(self.pools) == 3:
            nope, rope, scale = widths
            scales = self.dim // 64 if self.pools[2].dtype == jnp.uint8 else 1
            rules[f"entries of {self.dim} channels, got {nope} + {rope}"] = nope + rope == self.dim
            rules[f"a multiple of 64 channels without RoPE, got {nope}"] = nope % 64 == 0
            rules[f"{scales} scales an entry of {self.dim} channels, got {scale}"] = scale == scales
        else:
            rules[f"keys of {self.dim} channels, got {2 * widths[0]}"] = 2 * widths[0] == self.dim
            rules[f"a scale for 16 or 32 channels of {self.dim}, got {widths[-1]}"] = self.dim in (
                16 * widths[-1],
                32 * widths[-1],
            )
        for rule, holds in rules.items():
            if not holds:
                raise NotImplementedError(f"the flush kernel takes {rule}")


def flush(
    compressors: tuple[Compressor, ...], slots: jax.Array, positions: jax.Array, *, interpret: bool = False
) -> list[tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]]:
    """Feeds tokens to compressors and stores the entries of the windows they close, states and pools in place.

    For decode: the tokens of one request are taken one after the other.

    Args:
      compressors: one, or several whose windows have at most 16 rows, in one launch.
      slots: [T] int32, -1 = padding. Tokens of one slot stand together and in order.
      positions: [T] int32, -1 = padding; those of one slot are consecutive.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (state_kv, state_gate, pools), updated, of each compressor.

    Raises:
      NotImplementedError: a shape or dtype is not one that `Compressor` describes.
    """
    for c in compressors:
        c.check()
    parts, tokens = max(c.parts for c in compressors), slots.shape[0]
    if parts > 1 and len(compressors) > 1:
        raise NotImplementedError(
            f"the flush kernel takes windows of more than {GROUP * GROUPS} rows of one compressor only"
        )
    if tokens == 0:
        return [(c.state_kv, c.state_gate, c.pools) for c in compressors]
    operands = [array for c in compressors for array in _inputs(c)]
    scratch: list[Any] = [plgpu.SMEM((c.dim,), jnp.float32) for c in compressors]
    split = parts > 1
    if split:
        scratch.append(plgpu.ClusterBarrier(collective_axes=("part",)))

    def body(slots, positions, *refs):
        refs = list(refs)
        inputs = [[refs.pop(0) for _ in range(len(operands) // len(compressors))] for _ in compressors]
        written = [[refs.pop(0) for _ in _written(c)] for c in compressors]
        sums, cluster = (refs.pop(0), refs.pop()) if split else (None, None)
        for j, (c, scratch) in enumerate(zip(compressors, refs, strict=True)):
            feed = functools.partial(
                _feed, c, slots, positions, *inputs[j], *written[j], scratch=scratch, sums=sums, cluster=cluster,
                interpret=interpret,
            )  # fmt: skip
            pl.when(lax.axis_index("compressor") == j)(feed)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, parts, 3, compressors[0].dim), jnp.float32) if split else (),
        # The last axis runs fastest: the first compressor's blocks, which should be the longest, start first.
        grid=(len(compressors), tokens),
        grid_names=("compressor", "token"),
        cluster=(parts,),
        cluster_names=("part",),
        scratch_types=scratch,
        interpret=interpret_params(interpret),
    )
    refs = [[jax.new_ref(array) for array in _written(c)] for c in compressors]
    run(slots, positions, *operands, *(ref for group in refs for ref in group))
    results = ([jax.freeze(ref) for ref in group] for group in refs)
    return [(kv, gate, tuple(pools)) for kv, gate, *pools in results]


def _inputs(c):
    layers = c.state_layer.reshape(1), c.pool_layer.reshape(1)
    return [c.kv, c.gate, c.position_bias, c.norm_weight, c.inv_freq, c.block_table, *layers]


def _written(c):
    return [c.state_kv, c.state_gate, *c.pools]


def _feed(
    c, slots, positions, kv, gate, bias, norm, inv_freq, table, state_layer, pool_layer, state_kv, state_gate, *pools,
    scratch, sums, cluster, interpret,
):  # fmt: skip
    """One compressor's work for the run that starts at this block's token, if one does."""
    tokens, (_, num_slots, ring, _) = slots.shape[0], state_kv.shape
    rate, per_block = jnp.int32(c.rate), jnp.int32(pools[0].shape[2])
    token, part = lax.axis_index("token"), lax.axis_index("part")
    state_layer, pool_layer, slot, start = state_layer[0], pool_layer[0], slots[token], positions[token]
    halves = [pl.ds(half * c.dim, c.dim) for half in range(1 + c.overlap)]
    follows = (token > 0) & (slots[jnp.maximum(token - 1, 0)] == slot)

    def take(i, _):
        """Token `token + i`, the i-th of the run."""
        at, position = token + i, start + i
        phase = lax.rem(position, rate)
        closes, is_own = phase == rate - 1, lax.div(phase, jnp.int32(GROUP * GROUPS)) == part

        @pl.when(closes | is_own)
        def _():
            own = [
                (lanes.load(kv.at[at, half]), lanes.load(gate.at[at, half]) + lanes.load(bias.at[phase, half]))
                for half in halves
            ]

            @pl.when(closes)
            def _():
                # Issued before the own row is stored: these reads wait for nothing.
                state = [array.at[state_layer, slot] for array in (state_kv, state_gate)]
                pooled = _pool_part(c, state, position, ring, part, own[-1])
                entry = lax.div(position, rate)
                logical = lax.div(entry, per_block)
                block = table[slot, jnp.minimum(logical, table.shape[1] - 1)]

                @pl.when((logical < table.shape[1]) & (block >= 0))
                def _():
                    def finish(x):
                        x = _finish_entry(x, norm, inv_freq, position - (rate - 1), c.eps, scratch, interpret)
                        row = [pool.at[pool_layer, block, lax.rem(entry, per_block)] for pool in pools]
                        if len(pools) == 3:
                            encode_row(x, row, scratch, interpret=interpret)
                        else:
                            encode_index(x, row, c.index_scale, scratch, interpret=interpret)

                    _merge_parts(c, pooled, part, None if sums is None else sums.at[at], cluster, finish)

            @pl.when(is_own)
            def _():
                row = lax.rem(position, jnp.int32(ring))
                for half, (value, logit) in zip(halves, own, strict=True):
                    state_kv[state_layer, slot, row, half] = value
                    state_gate[state_layer, slot, row, half] = logit

    @pl.when((slot >= 0) & (slot < num_slots) & (start >= 0) & ~follows)
    def _():
        def in_run(n):
            return (token + n < tokens) & (slots[jnp.minimum(token + n, tokens - 1)] == slot)

        lax.fori_loop(0, lax.while_loop(in_run, lambda n: n + 1, jnp.int32(1)), take, None)


def _pool_part(c, state, position, ring, part, own):
    """Softmax sums over this block's rows of the window: (largest logit, sum of weights, weighted sum)."""
    oldest = position - (c.rows - 1) + part * (GROUP * GROUPS)

    def add(g, so_far):
        return _merge(so_far, _pool_group(_load_group(c, state, position, ring, oldest + g * GROUP, own)))

    nothing = jnp.full_like(own[0], LOWEST), jnp.zeros_like(own[0]), jnp.zeros_like(own[0])
    # Not unrolled: few registers, so that many blocks share a multiprocessor.
    return lax.fori_loop(0, min(c.rows // GROUP, GROUPS), add, nothing)


def _load_group(c, state, position, ring, oldest, own):
    """[(value, logit)] of the GROUP tokens from `oldest` on; the last of the window is the token's own."""
    first = lax.rem(oldest + ring, jnp.int32(ring))
    start = 0
    if c.overlap:
        in_own_window = oldest > position - c.rate
        start = jnp.where(in_own_window, jnp.int32(c.dim), 0)
    rows = []
    for j in range(GROUP):
        row = first + j
        row = jnp.where(row >= ring, row - ring, row)
        value, logit = (lanes.load(array.at[row, pl.ds(start, c.dim)]) for array in state)
        if c.overlap:
            # The first window has none before it.
            exists = jnp.broadcast_to(oldest >= 0, value.shape)
            value, logit = jnp.where(exists, value, 0.0), jnp.where(exists, logit, -jnp.inf)
        if j == GROUP - 1:
            is_own = jnp.broadcast_to(oldest + j == position, value.shape)
            value, logit = jnp.where(is_own, own[0], value), jnp.where(is_own, own[1], logit)
        rows.append((value, logit))
    return rows


def _pool_group(rows):
    values, logits = zip(*rows, strict=True)
    peak, weights = _factors(logits)
    return peak, tree_sum(weights), _weighted(weights, values)


def _merge(*groups):
    """Softmax sums from sums over subsets of the rows."""
    peaks, weights, totals = zip(*groups, strict=True)
    peak, factors = _factors(peaks)
    return peak, _weighted(factors, weights), _weighted(factors, totals)


def _factors(peaks):
    # Where no row exists all are -inf: infinity minus infinity must not happen.
    peak = functools.reduce(jnp.maximum, peaks, LOWEST)
    return peak, [exp_negative(p - peak) for p in peaks]


def _weighted(factors, sums):
    return tree_sum([fence(f * s) for f, s in zip(factors, sums, strict=True)])


def _merge_parts(c, pooled, part, sums, cluster, finish):
    """Calls `finish` with the entry pooled over all parts, in the first of them."""
    if c.parts == 1:
        _, weight, total = pooled
        finish(total * reciprocal(weight))
        return
    for i, value in enumerate(pooled):
        sums[part, i] = value
    plgpu.barrier_arrive(cluster)
    plgpu.barrier_wait(cluster)

    @pl.when(part == 0)
    def _():
        peaks = [lanes.load(sums.at[g, 0]) for g in range(c.parts)]
        factors = _factors(peaks)[1]

        def add_up(i, found):
            return found[1], _weighted(factors, [lanes.load(sums.at[g, i]) for g in range(c.parts)])

        # A loop, so that not all sums lie in registers at once.
        weight, total = lax.fori_loop(1, 3, add_up, (peaks[0], peaks[0]))
        finish(total * reciprocal(weight))


def _finish_entry(x, norm, inv_freq, position, eps, scratch, interpret):
    """Rounding, RMS norm and RoPE at `position`."""
    dim = x.shape[0]
    x = round_bfloat16(x)
    square = lanes.butterfly(jnp.add, fence(x * x), dim // 2, 1, scratch, interpret=interpret)
    x = round_bfloat16(lanes.load(norm) * (x * inverse_sqrt(fence(square * (1 / dim)) + eps)))
    frequency = lanes.load_tail(inv_freq, dim, 2, interpret=interpret)
    cos, sin = cos_sin(frequency * position.astype(jnp.float32))
    channel = lanes.channels(dim)
    other = lanes.exchange(x, 1, scratch, interpret=interpret)
    turned = fence(x * cos) + fence(other * jnp.where((channel & 1) == 0, -sin, sin))
    return jnp.where(channel < dim - 2 * inv_freq.shape[0], x, round_bfloat16(turned))
