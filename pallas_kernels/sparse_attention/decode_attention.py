"""The decode attention kernel, which dequantizes KV rows while it loads them to shared memory.

    out[t, h] = sum_n p[n] kv[n], p = softmax over n of (q[t, h] . kv[n] / sqrt(512)) and the sink

The grid is (token, group of 64 heads, KV split). A block walks over its split's tiles, each of 64 rows. If the number
of groups is even, two blocks with the same rows form a cluster, and each dequantizes half of every tile for both.

    warpgroup   does                                          waits for                  signals
    0 score     q @ kv.T, weights, sums of columns 0 .. 255   keys_full, weights_empty   weights_full, keys_empty
    1 add       sums of columns 256 .. 511                    keys_full, weights_full    weights_empty, keys_empty
    2 load      dequantizes rows to shared memory             keys_empty                 keys_full

`score` can compute the weights of a tile while `add` still adds the preceding tile. After the last tile, `score` passes
the factors of the final sums to `add` (barrier `scale_full`). With KV splits, both roles store their sums for `combine`
instead. The order in which a token's rows are added depends on the shapes of the arguments and on the token's position,
never on another token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.mgpu import barriers, transaction_barriers, wgmma
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import layer_operand, weights_of_layer
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field
from pallas_kernels.runtime.roles import dispatch_warpgroups
from pallas_kernels.sparse_attention import kv_tiles, online_softmax
from pallas_kernels.sparse_attention.inverse_rope import inverse_rope
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from pallas_kernels.sparse_attention.online_softmax import HALF, HEADS, load_per_head, per_row
from pallas_kernels.sparse_attention.row_addresses import TILE, UNITS, AttentionProblem, RowAddresses


STAGES = 2  # number of tiles of rows in shared memory
SCORE, ADD, LOAD = range(3)
# Number of registers of a thread of `load`, and of a thread of `score` or `add`. All threads start with 168 registers,
# and may not have more than 168 on average.
LOAD_REGISTERS = 120
MULTIPLY_REGISTERS = 192


def choose_splits(problem: AttentionProblem, tokens: int, heads: int) -> int:
    """Chooses the number of KV splits of a token for an H100.

    The first candidate is the largest number of splits, up to 66, with which all blocks run at once. The result is the
    smallest number of splits whose longest split has no more tiles than with the candidate. So a token with the maximum
    number of tiles has no empty split.
    """
    tiles = problem.max_tiles
    # Combining more than 66 splits takes more time than the additional blocks save.
    max_splits = max(1, min(tiles, MULTIPROCESSORS // (tokens * pl.cdiv(heads, HEADS)), 66))
    return pl.cdiv(tiles, pl.cdiv(tiles, max_splits))


def decode_attention(
    problem: AttentionProblem,
    q: jax.Array,
    *,
    sinks: jax.Array | None = None,
    layer: jax.Array | None = None,
    angles: tuple[jax.Array, jax.Array] | None = None,
    splits: int | None,
    interpret: bool,
) -> Any:
    """Launches the kernel on checked arguments.

    Args:
      problem: the rows that each token attends to.
      q: [T, H, 512] bfloat16 queries.
      sinks: [H'] float32 sink logits, or a stack [layers, H'], where H' is H rounded up to a multiple of 64. None if
        `splits` is given.
      layer: [] int32, index of this layer if `sinks` is a stack; None if it is not.
      angles: (cos, sin), each [T, P] float32, to rotate the result back. None for no rotation, or if `splits` is given.
      splits: number of KV splits whose sums are returned; None to return the finished attention.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      The result of `sparse_attention` if `splits` is None, otherwise the result of `attention_sums`.
    """
    tokens, heads, _ = q.shape
    groups = pl.cdiv(heads, HEADS)
    out_type: Any = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if splits is not None:
        shapes = (tokens, splits, groups * HEADS, ROW_DIM), (tokens, splits, 2, groups * HEADS)
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    # The interpreter has no clusters: its blocks cannot write to each other's shared memory.
    blocks = 2 if groups % 2 == 0 and not interpret else 1
    launch = kernel(
        functools.partial(_decode_kernel, splits or 1, blocks),
        out_type=out_type,
        kernel_name="sparse_attention",
        grid={"token": tokens, "heads": groups // blocks, "split": splits or 1},
        cluster={"block": blocks},
        num_threads=3,
        scratch_types={"buffers": DecodeBuffers.for_cluster() if blocks > 1 else DecodeBuffers()},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return launch(q, sinks, layer_operand(layer), problem, angles)


@pytree_dataclass
class DecodeBuffers:
    """Shared memory and barriers of a block: types to allocate outside the kernel, references inside it.

    Each role is a warpgroup, see the module. A barrier `x_full` says that x was written, `x_empty` that it was read.
    """

    blocks: int = static_field(default=1)  # number of blocks in the cluster, 1 or 2
    # The queries. At the end, the result overwrites them. The axis of size 1 exists so that `_score_tile` can index it.
    queries_smem: Any = wgmma.operand(1, HEADS, ROW_DIM)
    keys_smem: Any = wgmma.operand(STAGES, TILE, ROW_DIM)
    # Terms added to the scores: 0 for a row that exists, otherwise -inf. `keys_full` also says that they were written.
    biases_smem: Any = plgpu.SMEM((STAGES, TILE), jnp.float32)
    # Softmax weights before the division by their sum.
    weights_smem: Any = wgmma.operand(STAGES, HEADS, TILE)
    # Factors that rescale the sums of earlier tiles. `weights_full` also says that they were written.
    rescale_smem: Any = plgpu.SMEM((STAGES, HEADS), jnp.float32)
    scale_smem: Any = plgpu.SMEM((HEADS,), jnp.float32)  # factors of the final sums
    queries_full: Any = plgpu.Barrier()
    keys_full: Any = plgpu.Barrier(num_barriers=STAGES)
    # `score` and `add` arrive here; in a cluster, `score` and `add` of both blocks.
    keys_empty: Any = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    weights_full: Any = plgpu.Barrier(num_barriers=STAGES)
    weights_empty: Any = plgpu.Barrier(num_barriers=STAGES)
    scale_full: Any = plgpu.Barrier()
    result_full: Any = plgpu.Barrier(num_arrivals=2)  # `score` and `add` arrive, each when its half is written

    @classmethod
    def for_cluster(cls) -> "DecodeBuffers":
        """Returns the types to allocate in each block of a cluster of two, with barriers that both blocks signal."""
        empty = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=2, num_barriers=STAGES)
        return cls(2, keys_full=transaction_barriers.scratch_type(STAGES), keys_empty=empty)

    def init_barriers(self):
        """Initializes `keys_full` if the cluster has two blocks. Every warpgroup calls it first."""
        if self.blocks > 1:
            transaction_barriers.start(self.keys_full)

    def wait_for_init(self):
        """Waits until both blocks have called `init_barriers`; every warpgroup calls it before it uses `keys_full`.

        Does nothing if the cluster has one block.
        """
        if self.blocks > 1:
            barriers.wait_cluster(None)

    def signal_keys_full(self, stage, units):
        """Signals that this block has stored its `units` units (of 16 rows) of a stage.

        In a cluster, the call also makes the barrier expect `units` units from the other block. The stage is full when
        these units have arrived as well.
        """
        barriers.fence()
        if self.blocks == 1:
            plgpu.barrier_arrive(self.keys_full.at[stage])
        else:
            transaction_barriers.arrive(self.keys_full.at[stage], units * kv_tiles.UNIT_BYTES // THREADS)

    def wait_keys_full(self, tiles, tile):
        stage = tiles.stage(tile)
        if self.blocks == 1:
            plgpu.barrier_wait(self.keys_full.at[stage])
            return
        transaction_barriers.wait(self.keys_full.at[stage], lax.div(tile - tiles.first, STAGES) & 1)
        # `wgmma` reads through the async proxy. Only a fence in this block makes the other block's writes visible to
        # this proxy.
        barriers.fence()

    def signal_keys_empty(self, stage):
        if self.blocks > 1:
            barriers.sync_warpgroup()
        plgpu.barrier_arrive(self.keys_empty.at[stage])


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles first .. last - 1 of a block. Tile `first + i` is in stage `i % STAGES` of shared memory."""

    first: jax.Array
    last: jax.Array

    def stage(self, tile):
        return lax.rem(tile - self.first, STAGES)

    def wait_empty(self, empty, tile):
        """Waits until the stage of a tile is empty. The first `STAGES` tiles do not wait.

        `empty` has a barrier for each stage, which is signalled when the tile in this stage was read.
        """
        barriers.wait_empty(empty, tile - self.first)

    def wait_all_empty(self, empty):
        """Waits until the final `STAGES` tiles have been read; `wait_empty` has waited for all preceding tiles."""

        @pl.loop(jnp.maximum(self.last - STAGES, self.first), self.last)
        def _(tile):
            plgpu.barrier_wait(empty.at[self.stage(tile)])


def _decode_kernel(
    splits, blocks, q_gmem, sinks_gmem, layer_gmem, problem, angles_gmem, out_gmem, stats_gmem=None, *, buffers
):
    token, split, warpgroup = axis_indices("token", "split", "warpgroup")
    block = lax.axis_index("block") if blocks > 1 else 0
    first_head = (lax.axis_index("heads") * blocks + block) * HEADS
    heads = pl.ds(first_head, HEADS)
    # With tensor parallelism a device may have fewer than 64 heads.
    own_heads = pl.ds(first_head, min(q_gmem.shape[1], HEADS))
    own_queries_smem = buffers.queries_smem.at[0, pl.ds(0, own_heads.size)]
    buffers.init_barriers()
    tiles = Tiles(*problem.tile_range(token, split, splits))

    def load():
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        units = UNITS // blocks
        addresses = RowAddresses(problem, token, tiles.last, block * units, units)
        _load_tiles(problem, addresses, tiles, buffers, 1 - block)

    def score():
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        plgpu.copy_gmem_to_smem(q_gmem.at[token, own_heads], own_queries_smem, buffers.queries_full)
        layer_sinks_gmem = weights_of_layer(sinks_gmem, layer_gmem)
        plgpu.barrier_wait(buffers.queries_full)
        buffers.wait_for_init()
        initial = wgmma.zeros((HEADS, HALF)), *online_softmax.initial_stats()
        score_tile = functools.partial(_score_tile, buffers, tiles)
        acc, running_max, running_sum = lax.fori_loop(tiles.first, tiles.last, score_tile, initial)
        tiles.wait_all_empty(buffers.weights_empty)
        if stats_gmem is not None:
            stats_gmem[token, split, 0, heads] = running_max
            stats_gmem[token, split, 1, heads] = running_sum
            wgmma.store(out_gmem.at[token, split, heads, _columns(SCORE)], acc)
            return
        sink = online_softmax.load_sink(layer_sinks_gmem.at[heads])
        scale = online_softmax.final_scale(sink, running_max, running_sum)
        buffers.scale_smem[...] = scale
        plgpu.barrier_arrive(buffers.scale_full)
        _put_result(SCORE, per_row(scale, acc), buffers)
        plgpu.copy_smem_to_gmem(own_queries_smem, out_gmem.at[token, own_heads])
        plgpu.wait_smem_to_gmem(0)

    def add():
        plgpu.set_max_registers(MULTIPLY_REGISTERS, action="increase")
        buffers.wait_for_init()
        add_tile = functools.partial(_add_tile, buffers, tiles)
        acc = lax.fori_loop(tiles.first, tiles.last, add_tile, wgmma.zeros((HEADS, HALF)))
        if stats_gmem is not None:
            wgmma.store(out_gmem.at[token, split, heads, _columns(ADD)], acc)
            return
        plgpu.barrier_wait(buffers.scale_full)
        acc = per_row(load_per_head(buffers.scale_smem), acc)
        _put_result(ADD, acc if angles_gmem is None else inverse_rope(acc, angles_gmem, token), buffers)

    dispatch_warpgroups(warpgroup, {LOAD: load, SCORE: score, ADD: add})


def _columns(warpgroup):
    """Returns the slice of the 512 columns that a warpgroup adds up: SCORE the first half, ADD the second half."""
    return pl.ds(warpgroup * HALF, HALF)


def _put_result(warpgroup, result, buffers):
    """Writes a warpgroup's half of the result to shared memory, and waits until the other half is written as well."""
    buffers.queries_smem[0, :, _columns(warpgroup)] = result.astype(jnp.bfloat16)
    plgpu.commit_smem()
    barriers.meet(buffers.result_full)


def _load_tiles(problem, addresses, tiles, buffers, other_block):
    """Dequantizes this block's units of each tile to shared memory, while loads for the next tiles are in flight.

    If the cluster has two blocks, the units are also sent to the other block, whose index is `other_block`.
    """
    rings = problem.rings
    compressed = problem.compressed or rings
    layouts = rings.layout, compressed.layout

    def load_unit(tile, row):
        from_pools = (tile >= problem.window_tiles).astype(jnp.int32)
        return kv_tiles.load_unit(rings.pools, compressed.pools, from_pools, row, layouts)

    def load_entries(tile, row):
        pools = compressed.pools
        return kv_tiles.load_unit(pools, pools, jnp.int32(0), row, (compressed.layout, compressed.layout))

    def find_entries(tile, entries, blocks):
        return list(addresses.pool_rows(entries, blocks))

    def load_tile(layout, find_rows, load_unit, tile, carry):
        # A row is found by a chain of loads: the entry's index, the block's id, then the row itself. An iteration
        # starts the loads of rows of the next tile, of block ids two tiles ahead and of entry indices three tiles
        # ahead. The addresses of these loads come from loads of earlier iterations.
        units, rows, next_entries, next_blocks, later_entries = carry
        stage = tiles.stage(tile)
        next_units = []
        tiles.wait_empty(buffers.keys_empty, tile)
        next_rows = find_rows(tile + 1, next_entries, next_blocks)
        keys_smem = buffers.keys_smem.at[stage]
        biases_smem = buffers.biases_smem.at[stage]
        peer = (other_block, buffers.keys_full.at[stage]) if buffers.blocks > 1 else None
        # `zero` is always 0, but the compiler does not know that. `store_unit` needs it if there are two layouts.
        zero = None if layouts[0] == layouts[1] else lax.shift_right_logical(tile, jnp.int32(30))
        for i in range(addresses.units):
            first_row = jnp.int32((addresses.first_unit + i) * UNIT)
            kv_tiles.store_unit(keys_smem, biases_smem, first_row, units[i], rows[i], layout, peer, zero)
            next_units.append(load_unit(tile + 1, next_rows[i]))
        buffers.signal_keys_full(stage, addresses.units)
        return next_units, next_rows, later_entries, addresses.blocks(later_entries), addresses.entries(tile + 3)

    entries = [addresses.entries(tiles.first + i) for i in range(3)]
    buffers.wait_for_init()

    @pl.when(tiles.first < tiles.last)
    def _():
        blocks = [addresses.blocks(e) for e in entries[:2]]
        rows = addresses.rows(tiles.first, entries[0], blocks[0])
        units = [load_unit(tiles.first, row) for row in rows]
        carry = units, rows, entries[1], blocks[1], entries[2]
        load_rows = functools.partial(load_tile, rings.layout, addresses.rows, load_unit)
        if layouts[0] == layouts[1]:
            lax.fori_loop(tiles.first, tiles.last, load_rows, carry)
        else:
            # Tiles of compressed entries get a separate loop, because their rows take fewer instructions and registers.
            first_entries = jnp.minimum(jnp.maximum(tiles.first, problem.window_tiles), tiles.last)
            units, *carry = lax.fori_loop(tiles.first, first_entries, load_rows, carry)
            load_rows = functools.partial(load_tile, compressed.layout, find_entries, load_entries)
            carry = [unit[:2] for unit in units], *carry  # E2M1 rows fill the first two arrays of a unit
            lax.fori_loop(first_entries, tiles.last, load_rows, carry)
        # The interpreter requires a wait for every arrival. On a GPU, a block must not end while the other block of its
        # cluster still signals its barriers.
        tiles.wait_all_empty(buffers.keys_empty)


def _score_tile(buffers, tiles, tile, carry):
    """Computes the softmax weights of a tile, stores them for `add`, and adds columns 0 .. 255 of the weighted rows.

    The carry and the result are (sums [64 heads, 256 columns], running maximum [64], running sum of weights [64]), all
    float32.
    """
    acc, running_max, running_sum = carry
    stage = tiles.stage(tile)
    buffers.wait_keys_full(tiles, tile)
    # The index `zero` is always 0, but the compiler does not know that. So it computes the addresses of the queries for
    # each tile again instead of keeping 64 registers of addresses.
    zero = lax.shift_right_logical(tile, jnp.int32(30))

    def multiply(products_reg):
        keys_smem = buffers.keys_smem.at[stage].transpose((1, 0))
        plgpu.wgmma(products_reg, buffers.queries_smem.at[zero], keys_smem)
        return products_reg[...]

    products = pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), jnp.float32))
    bias_smem = buffers.biases_smem.at[stage]
    weights, rescale, running_max, running_sum = online_softmax.weigh(products, bias_smem, running_max, running_sum)
    weights = weights.astype(jnp.bfloat16)
    tiles.wait_empty(buffers.weights_empty, tile)
    buffers.weights_smem[stage] = weights
    buffers.rescale_smem[stage] = rescale
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.weights_full.at[stage])
    return _add_values(buffers, SCORE, acc, rescale, weights, stage), running_max, running_sum


def _add_tile(buffers, tiles, tile, acc):
    """Adds columns 256 .. 511 of a tile's rows, times the weights from `score`, to `acc` [64 heads, 256 columns]."""
    stage = tiles.stage(tile)
    buffers.wait_keys_full(tiles, tile)
    plgpu.barrier_wait(buffers.weights_full.at[stage])
    rescale = load_per_head(buffers.rescale_smem.at[stage])
    acc = _add_values(buffers, ADD, acc, rescale, buffers.weights_smem.at[stage], stage)
    plgpu.barrier_arrive(buffers.weights_empty.at[stage])
    return acc


def _add_values(buffers, warpgroup, acc, rescale, weights, stage):
    """Returns `acc * rescale + weights @ values` for a warpgroup's columns, and signals that the stage was read."""
    acc = wgmma.multiply_add(per_row(rescale, acc), weights, buffers.keys_smem.at[stage, :, _columns(warpgroup)])
    buffers.signal_keys_empty(stage)
    return acc
