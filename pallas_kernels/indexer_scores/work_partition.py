"""Equal shares of a row of work items of different cost: sums over a warp's lanes, the same in all warps."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.launch import primitive


# [32] with one value a lane; every warp holds them all.
LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (1,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-2,), vector_dim=-1
)
_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def my_share(
    cost: Callable, items: int, part: jax.Array, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Share `part` of `parts` equal shares of the work. The costs of all items, one after the other, make up its units.

    `cost`: (first, state) -> (costs, state): [32] int32 >= 0 in layout LANES, those of items first .. first + 31, 0
    past the last; the state starts as int32 0. Returns int32 scalars (begin, end, item, before): the share is units
    begin .. end - 1; `item` is the one that unit `begin` belongs to, and `before` the sum of the costs before it.
    """
    zero = jnp.int32(0)

    def add_up(i, carry):
        total, state = carry
        costs, state = cost(i * 32, state)
        return total + sum_lanes(costs), state

    total, _ = lax.fori_loop(0, -(-items // 32), add_up, (zero, zero))
    share, extra = lax.div(total, jnp.int32(parts)), lax.rem(total, jnp.int32(parts))
    begin = part * share + jnp.minimum(part, extra)

    def search(carry):
        first, _, before, state = carry
        costs, state = cost(first, state)
        lane, before = find_share(costs, begin - before, before)
        return first + 32, first + lane, before, state

    # Not found among 32, the item is the next 32's first.
    _, item, before, _ = lax.while_loop(
        lambda carry: (carry[0] < items) & (carry[0] == carry[1]), search, (zero, zero, zero, zero)
    )
    return begin, begin + share + (part < extra).astype(jnp.int32), item, before


def planned_shares(costs: jax.Array, parts: int) -> jax.Array:
    """[4 * parts] int32: what `my_share` returns for each part, of the costs [items] int32 >= 0 of all items."""
    ends = jnp.cumsum(costs)
    share, extra = ends[-1] // parts, ends[-1] % parts
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    begin = part * share + jnp.minimum(part, extra)
    item = jnp.sum(ends[None, :] <= begin[:parts, None], axis=1, dtype=jnp.int32)
    before = jnp.where(item > 0, ends[jnp.maximum(item - 1, 0)], 0)
    return jnp.stack([begin[:parts], begin[1:], item, before], axis=1).reshape(-1)


@primitive
def sum_lanes(x: jax.Array) -> jax.Array:
    """The sum of [32] int32 in layout LANES."""
    return jnp.sum(x)


@sum_lanes.mosaic
def _(x):
    def emit(x):
        return mlir.ptx("redux.sync.add.s32 $0, $1, 0xffffffff;", mlir.scalar(x), results=mlir.int_type())

    return mlir.inline(emit, (x, LANES), returns=_SCALAR)


@primitive
def latest_start(starts: jax.Array, earlier: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the run that each lane belongs to starts: [32] int32 in layout LANES, and that of lane 31.

    `starts`: [32] int32 in layout LANES, ascending: the start of a run that starts in the lane, or -1 if none does.
    `earlier`: int32 scalar, where the run starts that reaches into lane 0.
    """
    lane = lax.iota(jnp.int32, 32)
    found = jnp.max(jnp.where(lane[None, :] <= lane[:, None], starts[None, :], -1), axis=1)
    found = jnp.where(found >= 0, found, earlier)
    return found, found[31]


@latest_start.mosaic
def _(starts, earlier):
    lines = [
        "{ .reg .pred p; .reg .b32 m, v; setp.ge.s32 p, $2, 0; vote.sync.ballot.b32 m, p, 0xffffffff;",
        "mov.u32 v, %lanemask_le; and.b32 m, m, v; bfind.u32 v, m;",
        "shfl.sync.idx.b32 v, $2, v, 31, 0xffffffff; setp.ne.s32 p, m, 0; selp.s32 $0, v, $3, p;",
        "shfl.sync.idx.b32 $1, $0, 31, 31, 0xffffffff; }",
    ]

    def emit(starts, earlier):
        found, last = _ptx_pair(lines, starts, earlier)
        return [found], last

    returns = plgpu.ShapeDtypeStruct((32,), jnp.int32, LANES), _SCALAR
    return mlir.inline(emit, (starts, LANES), earlier, returns=returns)


@primitive
def find_share(x: jax.Array, begin: jax.Array, base: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(lane, base + sum of the costs before it): the lane of the item that holds unit `begin` >= 0; 32 if none does.

    x: [32] int32 >= 0 in layout LANES, the items' costs.
    """
    lane = lax.iota(jnp.int32, 32)
    # Not cumsum: the interpreter's threads can block each other in it.
    ends = jnp.sum(jnp.where(lane[None, :] <= lane[:, None], x[None, :], 0), axis=1)
    before = ends <= begin
    return jnp.sum(before.astype(jnp.int32)), base + jnp.max(jnp.where(before, ends, 0))


@find_share.mosaic
def _(x, begin, base):
    lines = ["{ .reg .pred p; .reg .s32 n, other; .reg .b32 votes; mov.s32 n, $2;"]
    for distance in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 other|p, n, {distance}, 0, 0xffffffff; @p add.s32 n, n, other;")
    lines.append("setp.le.s32 p, n, $3; vote.sync.ballot.b32 votes, p, 0xffffffff; popc.b32 $0, votes;")
    lines.append("selp.s32 n, n, 0, p; redux.sync.max.s32 n, n, 0xffffffff; add.s32 $1, n, $4; }")
    operands = (x, LANES), begin, base
    return mlir.inline(lambda *args: _ptx_pair(lines, *args), *operands, returns=(_SCALAR, _SCALAR))


def _ptx_pair(lines, *args):
    return mlir.ptx("\n".join(lines), *map(mlir.scalar, args), results=[mlir.int_type()] * 2)
