"""Division of work items of different cost into equal shares, by a warp or by XLA."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.runtime.launch import primitive


# Layout of [32], one value per lane, the same in every warp.
_TILING = plgpu.Tiling(((32,), (1,)))
_ALL_WARPS = plgpu.Replicated(4)
LANES = plgpu.Layout.TILED(_TILING, warp_dims=(_ALL_WARPS,), lane_dims=(-2,), vector_dim=-1)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def my_share(cost: Callable, items: int, share: jax.Array, num_shares: int) -> tuple[jax.Array, ...]:
    """Finds one of several equal shares of the work, whose units are numbered through the costs of all items.

    `cost(first, state)` returns the costs of items first .. first + 31, [32] int32 in layout LANES, 0 past the last
    item, and the next state. The state starts as 0.

    Returns:
      int32 scalars: the first unit of the share, the end of its units, the item that the first unit belongs to, and
      the sum of the costs before that item.
    """
    zero = jnp.int32(0)

    def add_up(i, carry):
        total, state = carry
        costs, state = cost(i * 32, state)
        return total + sum_lanes(costs), state

    total, _ = lax.fori_loop(0, -(-items // 32), add_up, (zero, zero))
    units = lax.div(total, num_shares)
    extra = lax.rem(total, num_shares)
    begin = share * units + jnp.minimum(share, extra)

    def search(carry):
        first, _, before, state = carry
        costs, state = cost(first, state)
        lane, before = find_share(costs, begin - before, before)
        return first + 32, first + lane, before, state

    def is_unfinished(carry):
        # The lane is 32 if the item was not among the last ones.
        return (carry[0] < items) & (carry[0] == carry[1])

    _, item, before, _ = lax.while_loop(is_unfinished, search, (zero, zero, zero, zero))
    return begin, begin + units + (share < extra).astype(jnp.int32), item, before


def planned_shares(costs: jax.Array, num_shares: int) -> jax.Array:
    """Returns [4 * num_shares] int32, the results of `my_share` for each share; costs are [items] int32."""
    ends = jnp.cumsum(costs)
    units = ends[-1] // num_shares
    extra = ends[-1] % num_shares
    share = jnp.arange(num_shares + 1, dtype=jnp.int32)
    begin = share * units + jnp.minimum(share, extra)
    item = jnp.sum(ends[None, :] <= begin[:-1, None], axis=1, dtype=jnp.int32)
    before = jnp.where(item > 0, ends[jnp.maximum(item - 1, 0)], 0)
    return jnp.stack([begin[:-1], begin[1:], item, before], axis=1).reshape(-1)


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
