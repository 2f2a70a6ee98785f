"""The prefill attention kernel, which reads rows that another kernel has dequantized to bfloat16.

    out[t, h] = sum_n p[n] kv[n], p = softmax over n of (q[t, h] . kv[n] / sqrt(512)) and the sink

The grid is one persistent block per SM. A work item is a pair of a token and a group of up to 64 heads. A block walks
over items, and for each item over the token's tiles of 64 rows. A tile is copied as four chunks of 128 columns. Shared
memory has nine stages, which hold a chunk each.

    warpgroup   does                              waits for                             signals
    0 score     loads queries, q @ kv.T, weights  queries_full, keys_full, scale_empty  scored, weights_full, scale_full
    1 add_low   sums of columns 0 .. 255          weights_full, scale_full              keys_empty, scale_empty
    2 add_high  sums of columns 256 .. 511        weights_full, scale_full, scored      keys_empty, scale_empty
    3 copy      copies chunks of rows             keys_empty                            keys_full

Before `add_high` adds a tile, it also waits until `score` has multiplied the queries by the next tile (`scored`). The
products of `add_high` then run while `score` computes the weights of that next tile. The order in which a token's rows
are added never depends on another token.
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
from pallas_kernels.mgpu import barriers, copies, wgmma
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.runtime.pytrees import pytree_dataclass
from pallas_kernels.runtime.roles import dispatch_warpgroups
from pallas_kernels.sparse_attention import online_softmax
from pallas_kernels.sparse_attention.dense_rows import CHUNK, DenseRows, TokenRows, WorkItems, start_unit
from pallas_kernels.sparse_attention.inverse_rope import check_frequencies, inverse_rope, rope_angles
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from pallas_kernels.sparse_attention.online_softmax import HALF, HEADS, LAYOUT, check_heads, load_per_head, per_row
from pallas_kernels.sparse_attention.row_addresses import TILE


STAGES = 2  # number of tiles of weights in shared memory
CHUNKS = ROW_DIM // CHUNK
CHUNK_STAGES = 9  # number of chunks of rows in shared memory
# Maximum number of pairs of columns to rotate back. With more, they would not all be in the last chunk.
MAX_PAIRS = CHUNK // 2
SCORE, ADD_LOW, ADD_HIGH, COPY = range(4)
# Number of registers of a thread of each role; both add roles have the same number. All threads start with 128
# registers, and may not have more than 128 on average.
SCORE_REGISTERS = 112
ADD_REGISTERS = 176
COPY_REGISTERS = 48


@cached_trace()
def prefill_attention(
    q: jax.Array,
    sinks: jax.Array,
    rows: DenseRows,
    inv_freq: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention of many tokens on dequantized rows, see `sparse_attention`.

    Args:
      q: [T, H, 512] bfloat16. H is a multiple of 64, or below 64 a multiple of 8. Scores are scaled by `512 ** -0.5`.
      sinks: [H] float32 sink logits.
      rows: the rows that the tokens attend to; the window is a multiple of 64 rows.
      inv_freq: [P] float32 RoPE frequencies or None, as in `sparse_attention`; P is at most `MAX_PAIRS`.
      layer: [] int32, index of this layer if `sinks` is a stack [layers, H]; None if it is not.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      [T, H, 512] bfloat16; zeros for padding.

    Raises:
      NotImplementedError: a shape or a dtype is not supported.
    """
    _check(q, sinks, layer, rows, inv_freq)
    tokens, heads, _ = q.shape
    if tokens == 0:
        return q
    blocks = min(tokens * pl.cdiv(heads, HEADS), 2 if interpret else MULTIPROCESSORS)
    launch = kernel(
        functools.partial(_prefill_kernel, blocks),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        kernel_name="sparse_attention_prefill",
        grid={"block": blocks},
        num_threads=4,
        scratch_types={"buffers": PrefillBuffers()},
        interpret=interpret,
        # Mosaic would reserve shared memory for reductions. Reductions over rows in the layout of `wgmma` need none.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    angles = None if inv_freq is None else rope_angles(rows.metadata[:, 0], inv_freq)
    rows = dataclasses.replace(rows, metadata=rows.metadata.reshape(-1))
    return launch(q, online_softmax.pad_sinks(sinks), layer_operand(layer), rows, angles)


def _check(q, sinks, layer, rows, inv_freq):
    tokens, heads, _ = q.shape
    check_array("q", q, jnp.bfloat16, tokens, None, ROW_DIM)
    check_weight("sinks", sinks, layer, jnp.float32, heads)
    check_array("window_rows", rows.window_rows, jnp.bfloat16, None, ROW_DIM)
    check_array("metadata", rows.metadata, jnp.int32, tokens, 4)
    check_array("counts", rows.counts, jnp.int32, tokens)
    check_heads(heads)
    check_rules({f"windows of a multiple of {TILE} rows, got {rows.window}": rows.window % TILE == 0})
    if rows.entries is not None:
        check_array("entries", rows.entries, jnp.bfloat16, None, ROW_DIM)
    if rows.indices is not None:
        check_array("indices", rows.indices, jnp.int32, tokens, None)
    check_frequencies(inv_freq, MAX_PAIRS)


@pytree_dataclass
class PrefillBuffers:
    """Shared memory and barriers of a block: types to allocate outside the kernel, references inside it.

    Each role is a warpgroup, see the module. A barrier `x_full` says that x was written, `x_empty` that it was read.
    """

    # Queries of an item. The axis of size 1 exists so that `_multiply_keys` can index it.
    queries_smem: Any = wgmma.operand(1, HEADS, ROW_DIM)
    # Chunks of tiles. The warpgroup that adds a chunk's columns signals `keys_empty`. The result of an item overwrites
    # the chunks of the item's last tile, and is copied from there to global memory.
    keys_smem: Any = wgmma.operand(CHUNK_STAGES, TILE, CHUNK)
    # Terms added to the scores: 0 for a row that exists, otherwise -inf. `keys_full` of a tile's chunk 0 says that the
    # terms were written.
    biases_smem: Any = plgpu.SMEM((STAGES + 1, TILE), jnp.float32)
    # Softmax weights before the division by their sum. They need no barrier `weights_empty`: an add role reads a tile's
    # weights before it signals `keys_empty` for its chunks of the tile.
    weights_smem: Any = wgmma.operand(STAGES, HEADS, TILE)
    # Rows 0 .. STAGES - 1: factors for the sums of earlier tiles, written and read together with the weights. Row
    # STAGES: factors of the final sums, guarded by `scale_full` and `scale_empty`. All factors share an array, because
    # an array takes at least 1024 bytes.
    factors_smem: Any = plgpu.SMEM((STAGES + 1, HEADS), jnp.float32)
    queries_full: Any = plgpu.Barrier()
    keys_full: Any = plgpu.Barrier(num_barriers=CHUNK_STAGES)
    keys_empty: Any = plgpu.Barrier(num_barriers=CHUNK_STAGES)
    # `score` signals that it has read a tile's keys, except for an item's first tile.
    scored: Any = plgpu.Barrier(num_barriers=STAGES)
    weights_full: Any = plgpu.Barrier(num_barriers=STAGES)
    scale_full: Any = plgpu.Barrier()
    scale_empty: Any = plgpu.Barrier(num_arrivals=2)


def _prefill_kernel(blocks, q_gmem, sinks_gmem, layer_gmem, rows, angles_gmem, out_gmem, *, buffers):
    warpgroup = lax.axis_index("warpgroup")
    tokens, heads, _ = q_gmem.shape
    items = WorkItems(rows, lax.axis_index("block"), blocks, tokens, heads)

    def score():
        plgpu.set_max_registers(SCORE_REGISTERS, action="decrease")
        _score_items(items, q_gmem, weights_of_layer(sinks_gmem, layer_gmem), buffers)

    def add_low():
        plgpu.set_max_registers(ADD_REGISTERS, action="increase")
        _add_items(items, range(CHUNKS // 2), angles_gmem, out_gmem, buffers)

    def add_high():
        plgpu.set_max_registers(ADD_REGISTERS, action="increase")
        _add_items(items, range(CHUNKS // 2, CHUNKS), angles_gmem, out_gmem, buffers)

    def copy():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy_items(items, rows, buffers)

    dispatch_warpgroups(warpgroup, {SCORE: score, ADD_LOW: add_low, ADD_HIGH: add_high, COPY: copy})


def _stage(tile):
    return lax.rem(tile, STAGES)


def _chunk_stage(tile, chunk):
    return lax.rem(CHUNKS * tile + chunk, CHUNK_STAGES)


def _bias_smem(buffers, tile):
    return buffers.biases_smem.at[lax.rem(tile, STAGES + 1)]


def _copy_items(items, rows, buffers):
    """Copies the chunks of all items' tiles to shared memory.

    Copies are asynchronous. The copies of the next chunks are started before this warpgroup waits for a chunk and
    signals it as full.
    """

    def start_chunk(tile, chunk, tile_rows, in_window):
        stage = _chunk_stage(tile, chunk)
        barriers.wait_empty(buffers.keys_empty, CHUNKS * tile + chunk)
        chunk_smem = buffers.keys_smem.at[stage]
        bias_smem = _bias_smem(buffers, tile)
        for unit, row in enumerate(tile_rows):
            start_unit(chunk_smem, bias_smem, in_window, row, rows.sources, first=unit * UNIT, chunk=chunk)
        copies.commit_copies()

    def finish_chunk(tile, chunk, pending):
        copies.wait_copies(pending)
        barriers.fence()
        plgpu.barrier_arrive(buffers.keys_full.at[_chunk_stage(tile, chunk)])

    def copy_item(i, first_tile, tiles):
        token, _ = items.locate(i)
        token_rows = TokenRows(rows, token)

        def copy_tile(t, tile_rows):
            in_window = (t < rows.window // TILE).astype(jnp.int32)
            start_chunk(first_tile + t, 0, tile_rows, in_window)
            # The last chunk of the previous tile is finished here, because the chunks below may wait for stages that
            # become empty only after that chunk was used.
            pl.when(t > 0)(lambda: finish_chunk(first_tile + t - 1, CHUNKS - 1, 1))
            for chunk in range(1, CHUNKS):
                start_chunk(first_tile + t, chunk, tile_rows, in_window)
            next_rows = token_rows.tile_rows(t + 1)
            for chunk in range(CHUNKS - 1):
                finish_chunk(first_tile + t, chunk, CHUNKS - 1 - chunk)
            return next_rows

        lax.fori_loop(0, tiles, copy_tile, token_rows.tile_rows(jnp.int32(0)))
        finish_chunk(first_tile + tiles - 1, CHUNKS - 1, 0)

    barriers.wait_for_last(buffers.keys_empty, CHUNKS * items.loop(copy_item))


def _score_items(items, q_gmem, sinks_gmem, buffers):
    """Computes the softmax weights of each item's tiles, and the factors of the item's final sums."""

    def fetch_queries(i):
        @pl.when(i < items.count)
        def _():
            token, heads = items.locate(i)
            # With fewer than 64 heads, the other rows of `queries_smem` are never written. They only enter results that
            # are not stored.
            queries_smem = buffers.queries_smem.at[0, pl.ds(0, heads.size)]
            plgpu.copy_gmem_to_smem(q_gmem.at[token, heads], queries_smem, buffers.queries_full)

    def score_item(i, first_tile, tiles):
        _, heads = items.locate(i)
        sink = online_softmax.load_sink(sinks_gmem.at[pl.ds(heads.start, HEADS)])
        # Prefetches the next item's queries to the L2 cache, which halves the time to copy them to shared memory.
        next_token, next_heads = items.locate(i + 1)
        for half in range(2):
            plgpu.async_prefetch(q_gmem.at[next_token, next_heads, pl.ds(half * HALF, HALF)])
        plgpu.barrier_wait(buffers.queries_full)

        def score_tile(t, stats):
            stage = _stage(first_tile + t)
            products = _multiply_keys(buffers, first_tile + t)
            pl.when(t > 0)(lambda: plgpu.barrier_arrive(buffers.scored.at[stage]))
            pl.when(t == tiles - 1)(lambda: fetch_queries(i + 1))
            weights, rescale, *stats = online_softmax.weigh(products, _bias_smem(buffers, first_tile + t), *stats)
            # The weights of this tile overwrite those of tile `first_tile + t - 2`, which both add roles have read: a
            # role reads a tile's weights before it releases its keys of the tile. The keys of this tile arrive only
            # after both roles have released keys of that earlier tile.
            wgmma.put_shared(buffers.weights_smem.at[stage], weights.astype(jnp.bfloat16))
            wgmma.put_shared(buffers.factors_smem.at[stage], rescale)
            barriers.fence()
            plgpu.barrier_arrive(buffers.weights_full.at[stage])
            return tuple(stats)

        stats = lax.fori_loop(0, tiles, score_tile, online_softmax.initial_stats())
        scale = online_softmax.final_scale(sink, *stats)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(buffers.scale_empty))
        buffers.factors_smem[STAGES] = scale
        plgpu.barrier_arrive(buffers.scale_full)

    fetch_queries(jnp.int32(0))
    items.loop(score_item)
    plgpu.barrier_wait(buffers.scale_empty)


def _multiply_keys(buffers, tile):
    """Returns the [64 heads, 64 rows] float32 products of the queries and a tile."""
    # The index `zero` is always 0, but the compiler does not know that. So it computes the addresses of the queries for
    # each tile again instead of keeping 64 registers of addresses.
    zero = lax.shift_right_logical(tile, jnp.int32(30))

    def multiply(products_reg):
        for chunk in range(CHUNKS):
            stage = _chunk_stage(tile, chunk)
            plgpu.barrier_wait(buffers.keys_full.at[stage])
            queries_smem = buffers.queries_smem.at[zero, :, pl.ds(chunk * CHUNK, CHUNK)]
            plgpu.wgmma(products_reg, queries_smem, buffers.keys_smem.at[stage].transpose((1, 0)))
        return products_reg[...]

    return pl.run_scoped(multiply, plgpu.ACC((HEADS, TILE), jnp.float32))


def _add_items(items, chunks, angles_gmem, out_gmem, buffers):
    """Adds up each item's rows times their weights, for the columns of `chunks`, and stores the attention."""
    has_last = CHUNKS - 1 in chunks

    def release_keys(tile):
        for chunk in chunks:
            plgpu.barrier_arrive(buffers.keys_empty.at[_chunk_stage(tile, chunk)])

    def add_item(i, first_tile, tiles):
        def add_tile(t, sums):
            stage = _stage(first_tile + t)
            plgpu.barrier_wait(buffers.weights_full.at[stage])
            rescale = load_per_head(buffers.factors_smem.at[stage])
            sums = tuple(per_row(rescale, acc) for acc in sums)
            if has_last:
                pl.when(t < tiles - 1)(lambda: plgpu.barrier_wait(buffers.scored.at[_stage(first_tile + t + 1)]))
            values_smem = tuple(buffers.keys_smem.at[_chunk_stage(first_tile + t, chunk)] for chunk in chunks)
            # Reading the rows already takes all of shared memory's bandwidth. So the weights, which the products of all
            # chunks need, are read to registers once.
            weights = plgpu.load(buffers.weights_smem.at[stage], layout=LAYOUT)
            sums = wgmma.multiply_add_all(sums, weights, values_smem)
            pl.when(t < tiles - 1)(lambda: release_keys(first_tile + t))
            return sums

        sums = lax.fori_loop(0, tiles, add_tile, (wgmma.zeros((HEADS, CHUNK)),) * len(chunks))
        plgpu.barrier_wait(buffers.scale_full)
        scale = load_per_head(buffers.factors_smem.at[STAGES])
        plgpu.barrier_arrive(buffers.scale_empty)
        token, heads = items.locate(i)
        last = first_tile + tiles - 1
        for chunk, acc in zip(chunks, sums, strict=True):
            acc = per_row(scale, acc)
            if angles_gmem is not None and chunk == CHUNKS - 1:
                acc = inverse_rope(acc, angles_gmem, token)
            buffers.keys_smem[_chunk_stage(last, chunk)] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for chunk in chunks:
            result_smem = buffers.keys_smem.at[_chunk_stage(last, chunk), pl.ds(0, heads.size)]
            columns = pl.ds(chunk * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(result_smem, out_gmem.at[token, heads, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        release_keys(last)

    items.loop(add_item)
