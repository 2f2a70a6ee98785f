"""The lightning indexer's scores of every visible key.

Up to 8 tokens of a request form a chunk. A chunk's work is the number of 64-key tiles that it sees, times its tokens. A
block on each multiprocessor takes an equal share of all work, which it finds itself from slots and positions, and keeps
a chunk's queries in shared memory. Its warpgroups take tiles in turn. A tile's packed keys are copied to shared memory
three tiles ahead, unpacked in registers once, and multiplied with each token's queries on the tensor cores.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.layouts import KeyLayout, check_pools
from pallas_kernels.indexer_scores import key_tiles
from pallas_kernels.indexer_scores.key_tiles import DIM, HEADS, KEYS, PER_THREAD, PER_WARP, WARP_KEYS, load_words
from pallas_kernels.indexer_scores.tile_scores import score, score_far
from pallas_kernels.indexer_scores.work_partition import LANES, latest_start, my_share, planned_shares
from pallas_kernels.mgpu.copies import commit_copies, wait_copies
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


WARPGROUPS = 4  # hide each other's waits; 128 registers a thread
STAGES = 4  # tiles of a warpgroup that are on their way or read
# Tiles of a warpgroup, a bit of a word each. After them it scores those again that have keys with scales far apart.
RUN = 32
CHUNK = 8  # tokens whose queries fit into shared memory
# Of more tokens than this XLA works out the shares: to find them itself took a block 0.2 ms of 8,192 tokens.
MAX_SEARCHED = 256


@cached_trace("compress_rate", "layout")
def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    block_table: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    compress_rate: int,
    layout: KeyLayout,
    interpret: bool = False,
) -> jax.Array:
    """score[t, s] = sum over h of weights[t, h] * relu(q[t, h] . key[s]), for every key s visible to token t.

    Args:
      q, weights: [T, 64, 128], float8_e4m3fn for MXFP4 keys and bfloat16 for NVFP4's, and [T, 64] float32, both as
        `round_index_query` leaves them.
      slots: [T] int32, each token's row of the block table; -1 = padding. Tokens of one slot are adjacent.
      positions: [T] int32, ascending in a slot; -1 = padding.
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      codes: [layers, blocks, keys a block, 64] uint8, E2M1 pairs; a multiple of 16 keys a block.
      scales: [layers, blocks, keys a block, 4 or 8] uint8, as `layout` says.
      compress_rate: tokens a key stands for: token t sees the first `(positions[t] + 1) // compress_rate` keys.
      layout: of the keys: MXFP4, with E8M0 scales of 32 dims, or NVFP4, with E4M3 scales of 16 dims.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, E] float32, E = max_blocks * keys a block; -inf for a visible key without a block. Values past the visible
      keys, and in rows of padding, are unspecified.

    Raises:
      NotImplementedError: the layout, a shape or a dtype is not one of these.
    """
    tokens = q.shape[0]
    key_tiles.check_layout(layout)
    mxfp4 = layout.scale == "e8m0"
    check_array("q", q, jnp.float8_e4m3fn if mxfp4 else jnp.bfloat16, tokens, HEADS, DIM)
    check_array("weights", weights, jnp.float32, tokens, HEADS)
    check_array("slots", slots, jnp.int32, tokens)
    check_array("positions", positions, jnp.int32, tokens)
    check_array("block_table", block_table, jnp.int32, None, None)
    check_pools(layout, (codes, scales))
    (num_slots, max_blocks), (_, num_blocks, per_block, _), scale_width = (
        block_table.shape,
        codes.shape,
        scales.shape[-1],
    )
    check_rules({f"blocks of a multiple of {WARP_KEYS} keys, got {per_block}": per_block % WARP_KEYS == 0})
    entries = max_blocks * per_block
    if tokens == 0 or entries == 0:
        return jnp.full((tokens, entries), -jnp.inf, jnp.float32)
    factor = 2.0 ** (-2 * key_tiles.TOP) if mxfp4 else layout.global_scale * 2.0**key_tiles.SHIFT
    chunk = min(CHUNK, tokens)
    # Interpreted, one warpgroup: several that wait for each other would block the CPU's few threads.
    multiprocessors, warpgroups = (3, 1) if interpret else (MULTIPROCESSORS, WARPGROUPS)

    shares = None
    if tokens > MAX_SEARCHED:
        count = _chunk_sizes(slots, chunk)
        last = jnp.maximum(jnp.arange(tokens, dtype=jnp.int32) + count - 1, 0)
        keys = jnp.clip((positions[last] + 1) // compress_rate, 0, entries)
        costs = jnp.where(slots >= 0, count * -(-keys // KEYS), 0)
        shares = planned_shares(costs, multiprocessors)

    def body(
        layer, slots, positions, q, weights, block_table, codes, scales, shares, out,
        *, queries, query_weights, staged, filled, freed
    ):  # fmt: skip
        warpgroup, block, pool = lax.axis_index("warpgroup"), lax.axis_index("block"), layer[0]

        def at(ref, token):
            """Values of tokens. Past the last token its value is repeated."""
            return load_words(ref, jnp.clip(token, 0, tokens - 1), LANES)

        def cost(first, run):
            """(Work of the chunks that start at tokens first .. first + 31; where the run of the last token starts).

            A run is a request's tokens; `run` is the start of the one that reaches into the first token.
            """
            token = first + plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
            slot = at(slots, token)
            new = (token == 0) | (slot != at(slots, token - 1))
            start, run = latest_start(jnp.where(new, token, -1), run)
            starts = (token < tokens) & (slot >= 0) & (lax.rem(token - start, jnp.int32(chunk)) == 0)
            count, same = jnp.ones_like(token), starts
            for i in range(1, chunk):
                same = same & (token + i < tokens) & (at(slots, token + i) == slot)
                count = jnp.where(same, i + 1, count)
            return jnp.where(starts, count * tiles(at(positions, token + count - 1)), 0), run

        def tiles(position):
            keys = jnp.clip(lax.div(position + 1, jnp.int32(compress_rate)), 0, entries)
            return lax.div(keys + (KEYS - 1), jnp.int32(KEYS))

        if shares is None:
            begin, end, token, base = my_share(cost, tokens, block, multiprocessors)
        else:
            begin, end, token, base = (shares[4 * block + i] for i in range(4))

        def next_chunk(state):
            """Scores this block's share of the chunk that starts at a token; `base` is the work before the chunk."""
            token, base = state
            slot = slots[token]
            count, same = jnp.int32(1), True
            for i in range(1, chunk):
                same &= (token + i < tokens) & (slots[jnp.minimum(token + i, tokens - 1)] == slot)
                count = jnp.where(same, i + 1, count)
            length = jnp.where(slot >= 0, tiles(positions[token + count - 1]), 0)

            def up_to(share):
                return jnp.minimum(lax.div(jnp.maximum(share - base, 0) + (count - 1), count), length)

            first, last = up_to(begin), up_to(end)

            @pl.when(last > first)
            def _():
                score_chunk(token, count, jnp.minimum(slot, num_slots - 1), first, last)

            return token + count, base + count * length

        def copy_queries(token, count):
            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(freed)
                for i in range(chunk):

                    @pl.when(i < count)
                    def _(i=i):
                        plgpu.copy_gmem_to_smem(q.at[token + i], queries.at[pl.ds(i * HEADS, HEADS)], filled.at[i])
                        plgpu.copy_gmem_to_smem(weights.at[token + i], query_weights.at[i], filled.at[i])

        def score_chunk(token, count, slot, first, last):
            """Scores tiles first .. last - 1 for the tokens of a chunk."""
            # Shared memory was read; bulk copies write it next.
            plgpu.commit_smem()
            plgpu.barrier_arrive(freed)
            copy_queries(token, count)

            def in_blocks(operation, i):
                """The first of each warp's keys in tile i, div or rem the keys of a block. Unsigned takes less."""
                key = (tile(i) * KEYS + warp_key()).astype(jnp.uint32)
                return operation(key, jnp.uint32(per_block)).astype(jnp.int32)

            def blocks(i):
                """The block of each warp's keys."""
                column = jnp.minimum(in_blocks(lax.div, i), max_blocks - 1)
                return load_words(block_table, slot * max_blocks + column, PER_WARP)

            def rows(i, block):
                """The row of the first of each warp's keys."""
                return (pool * num_blocks + jnp.maximum(block, 0)) * per_block + in_blocks(lax.rem, i)

            def start(i, block):
                """Starts to copy tile i. Past the last one there is nothing to copy, and nobody waits for it."""
                key_tiles.start_tile(staged, stage(i), (codes, scales), rows(i, block), tile(i) < last)
                commit_copies()

            def stage(i):
                return warpgroup * STAGES + lax.rem(i, jnp.int32(STAGES))

            def tile(i):
                return first + warpgroup + i * warpgroups

            def to(i, block):
                return dict(
                    queries=queries, weights=query_weights, out=out, first=tile(i) * KEYS, block=block, factor=factor
                )

            def with_sign(words, block):
                """One more bit: whether a block is missing."""
                return words << 1 | lax.shift_right_logical(block, jnp.int32(31))

            def score_tile(i, carry):
                block, missing, far = carry
                after = blocks(i + STAGES)
                start(i + STAGES - 1, block)
                missing = with_sign(missing, block)
                wait_copies(STAGES - 1)
                copied = key_tiles.read_tile(staged, stage(i))
                if mxfp4:
                    values, largest, far = key_tiles.unpack_mxfp4(copied, far)
                    keys = values, largest
                else:
                    keys = key_tiles.unpack_nvfp4(copied)

                def score_token(j, _):
                    score(keys, token=j, row=token + j, **to(i, missing << (32 - STAGES)))

                lax.fori_loop(0, count, score_token, None)
                return after, missing, far

            def score_again(i):
                block = blocks(i)
                again = key_tiles.load_tile((codes, scales), rows(i, block))
                score_far(again, tokens=count, row=token, **to(i, block))

            def score_run(number, carry):
                begin, end = number * RUN, jnp.minimum((number + 1) * RUN, own)
                far = plgpu.layout_cast(jnp.zeros(PER_THREAD.shape, jnp.int32), PER_THREAD.layout) if mxfp4 else None
                *carry, far = lax.fori_loop(begin, end, score_tile, (*carry, far))

                def look_for(i, _):
                    pl.when(key_tiles.any_set(far, jnp.int32(1) << (end - 1 - i)))(lambda: score_again(i))

                if mxfp4:
                    some = key_tiles.any_set(far, jnp.int32(-1))
                    pl.when(some)(lambda: lax.fori_loop(begin, end, look_for, None))
                return tuple(carry)

            *started, block = (blocks(jnp.int32(i)) for i in range(STAGES))
            missing = plgpu.layout_cast(jnp.zeros((4,), jnp.int32), PER_WARP)
            for i, its_block in enumerate(started):
                start(jnp.int32(i), its_block)
                missing = with_sign(missing, its_block)
            for i in range(chunk):

                @pl.when(i < count)
                def _(i=i):
                    plgpu.barrier_wait(filled.at[i])

            own = lax.div(jnp.maximum(last - first - warpgroup, 0) + (warpgroups - 1), jnp.int32(warpgroups))
            lax.fori_loop(0, lax.div(own + (RUN - 1), jnp.int32(RUN)), score_run, (block, missing))
            wait_copies(0)

        def warp_key():
            return plgpu.broadcasted_iota(jnp.int32, (4,), 0, layout=PER_WARP) * WARP_KEYS

        lax.while_loop(lambda state: (state[0] < tokens) & (state[1] < end), next_chunk, (token, base))

    run = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, entries), jnp.float32),
        kernel_name="indexer_scores",
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            queries=plgpu.SMEM((chunk * HEADS, DIM), q.dtype, transforms=key_tiles.transforms(q.dtype)),
            query_weights=plgpu.SMEM((chunk, HEADS), jnp.float32),
            staged=tuple(
                plgpu.SMEM((warpgroups * STAGES, KEYS, width), jnp.uint8) for width in (DIM // 2, scale_width)
            ),
            filled=plgpu.Barrier(num_arrivals=2, num_barriers=chunk),
            freed=plgpu.Barrier(num_arrivals=warpgroups),
        ),
        interpret=interpret,
    )
    return run(layer.reshape(1), slots, positions, q, weights, block_table, codes, scales, shares)


def _chunk_sizes(slots, chunk):
    """[T] int32: how many tokens, up to `chunk`, the chunk has that starts at each token; 0 where none does."""
    tokens = slots.shape[0]
    token = jnp.arange(tokens, dtype=jnp.int32)
    changes, edge = slots[1:] != slots[:-1], jnp.ones((1,), bool)
    start = lax.cummax(jnp.where(jnp.concatenate([edge, changes]), token, 0))
    end = lax.cummin(jnp.where(jnp.concatenate([changes, edge]), token + 1, tokens), reverse=True)
    return jnp.where((token - start) % chunk == 0, jnp.minimum(end - token, chunk), 0)
