"""The rows of a call of many tokens, dequantised beforehand: which of them a token attends to, and copies of them."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.kv_rows import GROUP, ROW_DIM
from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.kv_tiles import PER_ROW, UNIT, take
from pallas_kernels.sparse_attention.row_addresses import TILE, UNITS


HALF = ROW_DIM // 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseRows:
    """What the tokens of a call attend to: arrays, and within the kernel references to them.

    Attributes:
      window_rows: [N, 512] bfloat16: the rows of the call's T tokens, in their order, and those before each request's
        first token.
      entries: [E, 512] bfloat16, or None; each request's entries in their order.
      indices: [T, K] int32, places of a token's entries among those of its request, -1 = none; None: the first ones.
      places: [T, 4] int32: a token's position; its request's first token; one more than the number of the window row
        before that token; the number of its request's first entry.
      counts: [T] int32 entries that a token attends to, or places of its list to look at; -1 = padding.
      window: rows before and with the token itself that it sees.
    """

    window_rows: Any
    entries: Any
    indices: Any
    places: Any
    counts: Any
    window: int = dataclasses.field(metadata=dict(static=True))

    def tiles(self, token: jax.Array) -> jax.Array:
        """How many tiles of 64 rows a token has: of its window, then of its entries; one, without rows, of padding."""
        count = self.counts[token]
        tiles = self.window // TILE + lax.div(jnp.maximum(count, 0) + TILE - 1, jnp.int32(TILE))
        return jnp.where(count >= 0, tiles, 1)


class TokenRows:
    """Where the rows of a token's tiles are."""

    def __init__(self, rows: DenseRows, token: jax.Array):
        self.rows, self.token = rows, token
        first = kv_tiles.splat(4 * token)
        self.position, self.begin, self.past, self.base = (take(rows.places, first + i) for i in range(4))
        self.count = take(rows.counts, kv_tiles.splat(token))

    def of(self, tile: jax.Array) -> list[jax.Array]:
        """The numbers of a tile's rows, in `window_rows` or `entries`, [16] int32 for each unit; -1 = none."""
        return [self._unit(tile * TILE + unit * UNIT + kv_tiles.iota()) for unit in range(UNITS)]

    def _unit(self, item):
        rows = self.rows
        back = (rows.window - 1) - item
        index = self.token - back
        mine = jnp.where(index >= self.begin, index, self.past - (self.begin - index))
        mine = jnp.where(back <= self.position, mine, -1)
        if rows.entries is None:
            return mine
        entry = item - rows.window
        exists = entry < self.count
        if rows.indices is not None:
            most = rows.indices.shape[1]
            entry = take(rows.indices, self.token * most + jnp.clip(entry, 0, most - 1))
        other = jnp.where(exists & (entry >= 0), self.base + entry, -1)
        return jnp.where(item < rows.window, mine, other)


@dataclasses.dataclass(frozen=True)
class Items:
    """The items of a block: so many heads of a token each, one of its `groups` of heads."""

    rows: DenseRows
    block: jax.Array
    blocks: int
    items: int
    groups: int
    heads: int

    @property
    def count(self) -> jax.Array:
        return lax.div(self.items - self.block + (self.blocks - 1), jnp.int32(self.blocks))

    def place(self, i: jax.Array) -> tuple[jax.Array, Any]:
        """(token, heads) of item i; of items after the last, those of the last token."""
        item = jnp.minimum(self.block + i * self.blocks, self.items - 1)
        token, group = lax.div(item, jnp.int32(self.groups)), lax.rem(item, jnp.int32(self.groups))
        return token, pl.ds(group * self.heads, self.heads)

    def tiles(self, i: jax.Array) -> jax.Array:
        return self.rows.tiles(self.place(i)[0])

    def loop(self, body) -> jax.Array:
        """Calls `body(i, n, tiles)` for each item: its number of tiles, and of those before it. Returns that of all.

        What the next item's number is read from is loaded an item ahead.
        """

        def step(i, carry):
            n, tiles = carry
            coming = self.tiles(i + 1)
            body(i, n, tiles)
            return n + tiles, coming

        return lax.fori_loop(0, self.count, step, (jnp.int32(0), self.tiles(jnp.int32(0))))[0]


@primitive
def start_unit(tile, bias, first: int, rows: DenseRows, in_window: jax.Array, row: jax.Array, part: int) -> None:
    """Starts to copy columns part * n .. of rows to rows first .. first + 15 of a tile [rows, n], zeros for none.

    `bias` and `first` are as for `kv_tiles.store_unit`; the bias is written with the first part. The rows are window
    rows where `in_window`, an int32 scalar, is not 0, else entries.
    """
    values = rows.window_rows[...][jnp.maximum(row, 0) % rows.window_rows.shape[0]]
    if rows.entries is not None:
        others = rows.entries[...][jnp.maximum(row, 0) % rows.entries.shape[0]]
        values = jnp.where(in_window != 0, values, others)
    values = jnp.where((row >= 0)[:, None], values, jnp.zeros((), jnp.bfloat16))
    columns = tile.shape[1]
    tile[pl.ds(first, UNIT)] = values[:, part * columns : (part + 1) * columns]
    if part == 0:
        bias[pl.ds(first, UNIT)] = jnp.where(row >= 0, 0.0, -jnp.inf).astype(jnp.float32)


@start_unit.mosaic
def _(tile, bias, first, rows, in_window, row, part):
    columns = tile.shape[1]

    def emit(tile, bias, in_window, row, window_rows, entries=None):
        row = mlir.scalar(row)
        chunk, start, at = kv_tiles.unit_places(tile, columns)
        base = mlir.global_pointer(window_rows)
        if entries is not None:
            here = arith.cmpi(arith.CmpIPredicate.ne, mlir.scalar(in_window), mlir.i32(0))
            base = arith.select(here, base, mlir.global_pointer(entries))
        exists = arith.cmpi(arith.CmpIPredicate.sge, row, mlir.i32(0))
        offset = arith.muli(mlir.to_i64(arith.maxsi(row, mlir.i32(0))), mlir.i64(2 * ROW_DIM))
        source = mlir.at(base, arith.addi(offset, arith.extui(mlir.int_type(64), (chunk * 16).value)))
        size = arith.select(exists, mlir.i32(16), mlir.i32(0))
        for group in range(columns // GROUP):
            place, offset = 2 * (first * columns + 8 * GROUP * group), 2 * (part * columns + GROUP * group)
            copy = f"cp.async.cg.shared.global [$0 + {place}], [$1 + {offset}], 16, $2;"
            mlir.ptx(copy, start, source, size)
        if part == 0:
            bias = mlir.at(mlir.at(mlir.shared_pointer(bias), (at * 4).value), 4 * first)
            kv_tiles.store_bias(bias, chunk, exists)

    others = [] if rows.entries is None else [rows.entries]
    window_rows = rows.window_rows
    mlir.inline(emit, (tile, plgpu.RefType(TRANSFORMS)), bias, in_window, (row, PER_ROW), window_rows, *others)


@primitive
def turn_back(values: jax.Array, angles, token: jax.Array) -> jax.Array:
    """Values [64, columns] float32, a product of `wgmma`, of which the last columns are rotated back.

    `angles` are (cos, sin) [T, P] float32 in global memory: those of the token, for the last 2 * P columns in
    interleaved pairs. What is rotated is rounded to bfloat16 first.
    """
    cos, sin = (x[token][None] for x in angles)
    head, tail = jnp.split(values, [values.shape[1] - 2 * cos.shape[1]], axis=1)
    even, odd = (tail[:, i::2].astype(jnp.bfloat16).astype(jnp.float32) for i in range(2))
    turned = jnp.stack([even * cos + odd * sin, odd * cos - even * sin], axis=2).reshape(tail.shape)
    return jnp.concatenate([head, turned], axis=1)


@turn_back.mosaic
def _(values, angles, token):
    def emit(values, cos, sin, token):
        layout, width, pairs = values.layout, values.shape[1], cos.type.shape[1]
        _, column = next(layout.thread_idxs(values.shape))
        at = arith.muli(mlir.to_i64(mlir.scalar(token)), mlir.i64(4 * pairs))
        at = arith.addi(at, mlir.to_i64(arith.muli(column, mlir.index(2))))
        own = [mlir.at(mlir.global_pointer(x), at) for x in (cos, sin)]
        steps = layout.tiling.tile_strides((width, 1))
        factors: dict[int, list[Any]] = {}
        for index in np.ndindex(values.registers.shape):
            # A register lies as far from the first in every thread.
            right = sum(i * step for i, step in zip(index, steps, strict=False)) % width - (width - 2 * pairs)
            pair = values.registers[index]
            if right < 0:
                yield pair
                continue
            if right not in factors:
                factors[right] = [llvm.load(mlir.f32_type(), mlir.at(x, 2 * right), alignment=4) for x in own]
            (c, s), (even, odd) = factors[right], mlir.values(pair)
            word = mlir.ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", odd, even, results=mlir.int_type(), pure=True)
            even = arith.bitcast(mlir.f32_type(), arith.shli(word, mlir.i32(16)))
            odd = arith.bitcast(mlir.f32_type(), arith.andi(word, mlir.i32(0xFFFF0000)))
            turned_even = arith.addf(arith.mulf(even, c), arith.mulf(odd, s))
            turned_odd = arith.subf(arith.mulf(odd, c), arith.mulf(even, s))
            yield mlir.pack([turned_even, turned_odd])

    operands = values, *angles, token
    return mlir.inline(emit, *operands, layout=lambda _: plgpu.Layout.WGMMA, returns=values)
