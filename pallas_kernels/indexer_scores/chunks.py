"""Chunks: adjacent tokens of one request whose queries share the tiles of its keys, and equal shares of their work."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores.key_tiles import KEYS, load_words
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.runtime.launch import primitive
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


# Layout of [32], one value per lane, the same in every warp.
_TILING = plgpu.Tiling(((32,), (1,)))
_ALL_WARPS = plgpu.Replicated(4)
LANES = plgpu.Layout.TILED(_TILING, warp_dims=(_ALL_WARPS,), lane_dims=(-2,), vector_dim=-1)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def run_bounds(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first and one-past-last token of each token's run, the consecutive tokens of one request."""
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    changes = slots[1:] != slots[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.where(jnp.concatenate([edge, changes]), tokens, 0)
    ends = jnp.where(jnp.concatenate([changes, edge]), tokens + 1, slots.shape[0])
    return lax.cummax(starts), lax.cummin(ends, reverse=True)


@pytree_dataclass
class Chunks:
    """The division of a call's tokens into chunks.

    A chunk has consecutive tokens of one request, in groups of `size` from the request's first token on. Its cost is
    the number of tiles that it sees times the number of its tokens.
    """

    slots: Any  # [T] int32 array, or within a kernel a reference to it
    positions: Any  # [T] int32 array, or within a kernel a reference to it
    size: int = static_field()  # maximum number of tokens in a chunk
    compress_rate: int = static_field()  # number of tokens per key
    max_keys: int = static_field()  # maximum number of keys of a request

    def num_tiles(self, position: jax.Array) -> jax.Array:
        """Returns the number of tiles that hold the keys visible at a position."""
        keys = jnp.clip(lax.div(position + 1, self.compress_rate), 0, self.max_keys)
        return lax.div(keys + (KEYS - 1), KEYS)

    def costs(self) -> jax.Array:
        """Returns [T] int32, the cost of the chunk that starts at each token, or 0. For arrays, outside of kernels."""
        token = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        start, end = run_bounds(self.slots)
        count = jnp.where((token - start) % self.size == 0, jnp.minimum(end - token, self.size), 0)
        last = self.positions[jnp.maximum(token + count - 1, 0)]
        return jnp.where(self.slots >= 0, count * self.num_tiles(last), 0)

    def costs_of_lanes(self, first: jax.Array, run: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `costs` of the tokens first .. first + 31, one for each lane, [32] int32 in layout LANES.

        A run is the adjacent tokens of a request. `run` is the first token of the run that token `first - 1` is in;
        the second result is that of the run that token `first + 31` is in, for the next call.
        """
        tokens = self.slots.shape[0]

        def load(ref, token):
            return load_words(ref, jnp.clip(token, 0, tokens - 1), LANES)

        token = first + plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        slot = load(self.slots, token)
        is_first = (token == 0) | (slot != load(self.slots, token - 1))
        start, run = latest_start(jnp.where(is_first, token, -1), run)
        starts = (token < tokens) & (slot >= 0) & (lax.rem(token - start, self.size) == 0)
        count = jnp.ones_like(token)
        same = starts
        for i in range(1, self.size):
            same = same & (token + i < tokens) & (load(self.slots, token + i) == slot)
            count = jnp.where(same, i + 1, count)
        return jnp.where(starts, count * self.num_tiles(load(self.positions, token + count - 1)), 0), run

    def at(self, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the slot, the number of tokens and the number of tiles of the chunk that starts at a token."""
        tokens = self.slots.shape[0]
        slot = self.slots[token]
        count = jnp.int32(1)
        same = True
        for i in range(1, self.size):
            same &= (token + i < tokens) & (self.slots[jnp.minimum(token + i, tokens - 1)] == slot)
            count = jnp.where(same, i + 1, count)
        return slot, count, jnp.where(slot >= 0, self.num_tiles(self.positions[token + count - 1]), 0)

    def share(self, number: jax.Array, num_shares: int) -> tuple[jax.Array, ...]:
        """Finds, within a kernel, one of several equal shares of the work, whose units are numbered by `costs`.

        Returns:
          int32 scalars: the first unit of the share, the end of its units, the first token of the chunk that the first
          unit belongs to, and the sum of the costs before that chunk.
        """
        tokens = self.slots.shape[0]
        zero = jnp.int32(0)

        def add_up(i, carry):
            total, run = carry
            costs, run = self.costs_of_lanes(i * 32, run)
            return total + sum_lanes(costs), run

        total, _ = lax.fori_loop(0, -(-tokens // 32), add_up, (zero, zero))
        units = lax.div(total, num_shares)
        extra = lax.rem(total, num_shares)
        begin = number * units + jnp.minimum(number, extra)

        def search(carry):
            token, _, before, run = carry
            costs, run = self.costs_of_lanes(token, run)
            lane, before = find_share(costs, begin - before, before)
            return token + 32, token + lane, before, run

        def is_unfinished(carry):
            # The lane is 32 if the token was not among the last ones.
            return (carry[0] < tokens) & (carry[0] == carry[1])

        _, token, before, _ = lax.while_loop(is_unfinished, search, (zero, zero, zero, zero))
        return begin, begin + units + (number < extra).astype(jnp.int32), token, before


def planned_shares(costs: jax.Array, num_shares: int) -> jax.Array:
    """Returns [4 * num_shares] int32, the results of `Chunks.share` for each share, from `Chunks.costs`, by XLA."""
    ends = jnp.cumsum(costs)
    units = ends[-1] // num_shares
    extra = ends[-1] % num_shares
    share = jnp.arange(num_shares + 1, dtype=jnp.int32)
    begin = share * units + jnp.minimum(share, extra)
    token = jnp.sum(ends[None, :] <= begin[:-1, None], axis=1, dtype=jnp.int32)
    before = jnp.where(token > 0, ends[jnp.maximum(token - 1, 0)], 0)
    return jnp.stack([begin[:-1], begin[1:], token, before], axis=1).reshape(-1)


@primitive
def sum_lanes(x: jax.Array) -> jax.Array:
    """Returns the sum of [32] int32 in layout LANES."""
    return jnp.sum(x)


@mlir.emits(sum_lanes, LANES, returns=_SCALAR)
def _(x):
    return thread_ops.ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", mlir.scalar(x))


@primitive
def latest_start(starts: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the start of each lane's run; returns [32] int32 in layout LANES, and the value of lane 31.

    `starts` has the start of a run in the lane in which it starts, and -1 in the others; `earlier` is the start of the
    run that reaches into lane 0.
    """
    lane = lax.iota(jnp.int32, 32)
    start = jnp.max(jnp.where(lane[None, :] <= lane[:, None], starts[None, :], -1), axis=1)
    start = jnp.where(start >= 0, start, earlier)
    return start, start[31]


@mlir.emits(latest_start, LANES, returns=(plgpu.ShapeDtypeStruct((32,), jnp.int32, LANES), _SCALAR))
def _emit_latest_start(starts, earlier):
    lines = [
        "{ .reg .pred p; .reg .b32 m, v; setp.ge.s32 p, $2, 0; vote.sync.ballot.b32 m, p, 0xffffffff;",
        "mov.u32 v, %lanemask_le; and.b32 m, m, v; bfind.u32 v, m;",
        "shfl.sync.idx.b32 v, $2, v, 31, 0xffffffff; setp.ne.s32 p, m, 0; selp.s32 $0, v, $3, p;",
        "shfl.sync.idx.b32 $1, $0, 31, 31, 0xffffffff; }",
    ]

    start, last = thread_ops.ptx_words(2, "\n".join(lines), mlir.scalar(starts), earlier)
    return [start], last


@primitive
def find_share(x: jax.Array, begin: jax.Array, base: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the lane of the item that has unit `begin`, or 32 if none has; also returns `base` + the costs before it.

    The items' costs x are [32] int32 >= 0 in layout LANES, the others int32 scalars.
    """
    lane = lax.iota(jnp.int32, 32)
    # In cumsum the interpreter's threads can block each other.
    ends = jnp.sum(jnp.where(lane[None, :] <= lane[:, None], x[None, :], 0), axis=1)
    before = ends <= begin
    return jnp.sum(before.astype(jnp.int32)), base + jnp.max(jnp.where(before, ends, 0))


@mlir.emits(find_share, LANES, returns=(_SCALAR, _SCALAR))
def _emit_find_share(x, begin, base):
    lines = ["{ .reg .pred p; .reg .s32 n, other; .reg .b32 votes; mov.s32 n, $2;"]
    for distance in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 other|p, n, {distance}, 0, 0xffffffff; @p add.s32 n, n, other;")
    lines.append("setp.le.s32 p, n, $3; vote.sync.ballot.b32 votes, p, 0xffffffff; popc.b32 $0, votes;")
    lines.append("selp.s32 n, n, 0, p; redux.sync.max.s32 n, n, 0xffffffff; add.s32 $1, n, $4; }")
    return thread_ops.ptx_words(2, "\n".join(lines), mlir.scalar(x), begin, base)
