"""The division of tokens into chunks, and of the chunks' work into equal shares for the blocks of a kernel.

A chunk is adjacent tokens of one request. A tile, 64 keys of the request, is loaded once for all tokens of the chunk.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores.key_tiles import KEYS, load_words
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.runtime.launch import primitive
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


# Layout of arrays [32]: each lane of a warp holds one value, and all four warps hold the same values.
_TILING = plgpu.Tiling(((32,), (1,)))
_ALL_WARPS = plgpu.Replicated(4)
LANES = plgpu.Layout.TILED(_TILING, warp_dims=(_ALL_WARPS,), lane_dims=(-2,), vector_dim=-1)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def run_bounds(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (start, end), [T] int32 each: the tokens start[t] .. end[t] - 1 are the run that contains token t.

    A run is a maximal sequence of adjacent tokens with the same slot. `slots` is [T] int32.
    """
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    changes = slots[1:] != slots[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.where(jnp.concatenate([edge, changes]), tokens, 0)
    ends = jnp.where(jnp.concatenate([changes, edge]), tokens + 1, slots.shape[0])
    return lax.cummax(starts), lax.cummin(ends, reverse=True)


@pytree_dataclass
class Chunks:
    """The division of a call's tokens into chunks.

    Each request's tokens are divided into chunks of `size` tokens; the last chunk of a request may have fewer. The cost
    of a chunk is its number of tokens times the number of tiles of 64 keys that are visible to its last token.
    """

    slots: Any  # [T] int32 request slots, an array, or within a kernel a reference to it; -1 = padding
    positions: Any  # [T] int32 positions of the tokens, an array, or within a kernel a reference to it
    size: int = static_field()  # maximum number of tokens in a chunk
    compress_rate: int = static_field()  # number of tokens per key
    max_keys: int = static_field()  # maximum number of keys of a request

    def num_tiles(self, position: jax.Array) -> jax.Array:
        """Returns the number of tiles that hold the keys visible at a position."""
        keys = jnp.clip(lax.div(position + 1, self.compress_rate), 0, self.max_keys)
        return lax.div(keys + (KEYS - 1), KEYS)

    def costs(self) -> jax.Array:
        """Returns the cost of the chunk that starts at each token, [T] int32; 0 for tokens at which no chunk starts.

        This method is called outside of kernels, where the fields are arrays.
        """
        token = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        start, end = run_bounds(self.slots)
        count = jnp.where((token - start) % self.size == 0, jnp.minimum(end - token, self.size), 0)
        last = self.positions[jnp.maximum(token + count - 1, 0)]
        return jnp.where(self.slots >= 0, count * self.num_tiles(last), 0)

    def costs_of_lanes(self, first: jax.Array, run: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes `costs` of 32 tokens within a kernel.

        Args:
          first: int32 scalar, index of the first of the 32 tokens.
          run: int32 scalar, start of the run of token `first - 1`, see `run_bounds`; ignored if `first` is 0.

        Returns:
          (costs, run). `costs` [32] int32 in layout LANES are the costs of the tokens first .. first + 31. `run` is the
          start of the run of token `first + 31`, the argument for the next 32 tokens.
        """
        tokens = self.slots.shape[0]

        def load(ref, token):
            return load_words(ref, jnp.clip(token, 0, tokens - 1), LANES)

        token = first + plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        slot = load(self.slots, token)
        is_first = (token == 0) | (slot != load(self.slots, token - 1))
        start, run = latest_start(jnp.where(is_first, token, -1), run)
        starts_chunk = (token < tokens) & (slot >= 0) & (lax.rem(token - start, self.size) == 0)
        count = jnp.ones_like(token)
        same_slot = starts_chunk
        for i in range(1, self.size):
            same_slot = same_slot & (token + i < tokens) & (load(self.slots, token + i) == slot)
            count = jnp.where(same_slot, i + 1, count)
        return jnp.where(starts_chunk, count * self.num_tiles(load(self.positions, token + count - 1)), 0), run

    def at(self, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (slot, number of tokens, number of tiles) of the chunk that starts at a token, as int32 scalars."""
        tokens = self.slots.shape[0]
        slot = self.slots[token]
        count = jnp.int32(1)
        same_slot = True
        for i in range(1, self.size):
            same_slot &= (token + i < tokens) & (self.slots[jnp.minimum(token + i, tokens - 1)] == slot)
            count = jnp.where(same_slot, i + 1, count)
        return slot, count, jnp.where(slot >= 0, self.num_tiles(self.positions[token + count - 1]), 0)

    def share(self, number: jax.Array, num_shares: int) -> tuple[jax.Array, ...]:
        """Finds a share of the work within a kernel.

        The cost of a chunk is its number of units of work. Units are indexed in the order of the chunks. A share is a
        range of units. The sizes of the shares differ by at most 1.

        Args:
          number: int32 scalar, index of the share.
          num_shares: number of shares.

        Returns:
          (begin, end, token, before), int32 scalars. The share consists of the units begin .. end - 1. `token` is the
          index of the first token of the chunk that contains unit `begin`, and `before` is the sum of the costs of all
          chunks that precede this chunk.
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
            next_token, _, before, run = carry
            costs, run = self.costs_of_lanes(next_token, run)
            lane, before = find_share(costs, begin - before, before)
            return next_token + 32, next_token + lane, before, run

        def is_unfinished(carry):
            # `find_share` returns lane 32 if unit `begin` is in no chunk of the 32 tokens that it searched.
            next_token, token, _, _ = carry
            return (next_token < tokens) & (next_token == token)

        _, token, before, _ = lax.while_loop(is_unfinished, search, (zero, zero, zero, zero))
        return begin, begin + units + (number < extra).astype(jnp.int32), token, before


def planned_shares(costs: jax.Array, num_shares: int) -> jax.Array:
    """Computes the four results of `Chunks.share` for every share, outside of a kernel.

    Args:
      costs: [T] int32 from `Chunks.costs`.
      num_shares: number of shares.

    Returns:
      [4 * num_shares] int32, the results for share i from element `4 * i` on.
    """
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
    """Returns the sum of x, [32] int32 in layout LANES, as an int32 scalar."""
    return jnp.sum(x)


@mlir.emits(sum_lanes, LANES, returns=_SCALAR)
def _(x):
    return thread_ops.ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", mlir.scalar(x))


@primitive
def latest_start(starts: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds the start of the run of each lane's token.

    Args:
      starts: [32] int32 in layout LANES, the index of a lane's token if a run starts at this token, otherwise -1.
      earlier: int32 scalar, start of the run of the token that precedes the token of lane 0.

    Returns:
      (start, last). `start` [32] int32 in layout LANES is the start of the run of each lane's token. `last`, an int32
      scalar, is the start in lane 31.
    """
    lane = lax.iota(jnp.int32, 32)
    start = jnp.max(jnp.where(lane[None, :] <= lane[:, None], starts[None, :], -1), axis=1)
    start = jnp.where(start >= 0, start, earlier)
    return start, start[31]


@mlir.emits(latest_start, LANES, returns=(plgpu.ShapeDtypeStruct((32,), jnp.int32, LANES), _SCALAR))
def _emit_latest_start(starts, earlier):
    # The mask m has a bit for each lane at which a run starts. The run of this lane's token starts at the highest of
    # these lanes that is not above this lane. If there is no such lane, the run starts at `earlier`.
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
    """Finds the lane whose units of work include the unit with index `begin`.

    Args:
      x: [32] int32 in layout LANES, at least 0, the number of units of each lane.
      begin: int32 scalar, index of a unit; the first unit of lane 0 has index 0.
      base: int32 scalar, number of units that precede the units of lane 0.

    Returns:
      (lane, before), int32 scalars. `lane` is 32 if `begin` is past the units of all lanes. `before` is `base` plus the
      number of units of all lanes below `lane`.
    """
    lane = lax.iota(jnp.int32, 32)
    # The sum is not written as a `cumsum`, because the interpreter's threads can block each other in `cumsum`.
    ends = jnp.sum(jnp.where(lane[None, :] <= lane[:, None], x[None, :], 0), axis=1)
    before = ends <= begin
    return jnp.sum(before.astype(jnp.int32)), base + jnp.max(jnp.where(before, ends, 0))


@mlir.emits(find_share, LANES, returns=(_SCALAR, _SCALAR))
def _emit_find_share(x, begin, base):
    # A prefix sum gives the end of each lane's units. The lanes whose end is at most `begin` are counted.
    lines = ["{ .reg .pred p; .reg .s32 n, other; .reg .b32 votes; mov.s32 n, $2;"]
    for distance in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 other|p, n, {distance}, 0, 0xffffffff; @p add.s32 n, n, other;")
    lines.append("setp.le.s32 p, n, $3; vote.sync.ballot.b32 votes, p, 0xffffffff; popc.b32 $0, votes;")
    lines.append("selp.s32 n, n, 0, p; redux.sync.max.s32 n, n, 0xffffffff; add.s32 $1, n, $4; }")
    return thread_ops.ptx_words(2, "\n".join(lines), mlir.scalar(x), begin, base)
