"""The lightning indexer's scores of all keys that are visible to each token.

    score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])

A tile is 64 keys. Up to 8 adjacent tokens of a request form a chunk. A unit of work is a tile and a token, so that a
chunk's number of units is its number of visible tiles times its number of tokens. The grid is one persistent block per
SM, and each block gets an equal share of the units, rounded to whole tiles.

    warpgroup  step           does                                                     waits for      signals
    0          _load_queries  copies a chunk's queries and head weights (TMA)          queries_empty  queries_full
    all        _start_copy    starts to copy a tile of packed keys 3 tiles ahead of                   (cp.async groups)
                              its use; each thread copies the bytes that it reads
    all        _score_tile    unpacks a tile, multiplies it with each token's queries  queries_full   queries_empty
                              (wgmma) and adds up the heads                            and copies

The steps are methods of `ChunkScorer`. Warpgroups take a chunk's tiles in turn. If only the keys of candidate blocks
are scored, a chunk is one token, and a tile is 8 candidate blocks of 8 keys each. The module `key_tiles` explains the
formats of keys, and when a tile is scored a second time.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores.chunk_scorer import ChunkScorer, Scratch
from pallas_kernels.indexer_scores.chunks import Chunks, planned_shares
from pallas_kernels.indexer_scores.key_tiles import CANDIDATE_KEYS, DIM, IndexerKeys
from pallas_kernels.runtime.checks import check_array, check_rules, check_tokens
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


# For more tokens than this, XLA computes the shares of all blocks. For fewer, each block finds its own share, which
# would take 0.2 ms for 8,192 tokens.
MAX_UNPLANNED_TOKENS = 256


@cached_trace("blocks", "plan_in_xla")
def indexer_scores(
    q: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    keys: IndexerKeys,
    candidates: jax.Array | None = None,
    *,
    blocks: int | None = None,
    plan_in_xla: bool | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes score[t, s] = sum over h of weights[t, h] * relu(q[t, h] . key[s]) for every key s visible to token t.

    Args:
      q: [T, H, 128] queries of 32 or 64 heads from `round_index_query`, in the dtype `keys.dtype`.
      weights: [T, H] float32 head weights from `round_index_query`.
      slots: [T] int32, each token's request slot, the index of a row of the block table; -1 = padding. The tokens of a
        slot are adjacent.
      positions: [T] int32, each token's position in its request, ascending in a slot; -1 = padding.
      keys: the layer's keys.
      candidates: [T, C] int32, indices of each token's candidate blocks, C even; -1 = none. Block b consists of the
        request's keys 8 * b .. 8 * b + 7. Only the keys of candidate blocks are scored, and the keys must have no
        Hadamard rotation. If None, all keys are scored.
      blocks: number of thread blocks, which share the work equally; None for one per SM.
      plan_in_xla: whether XLA computes the blocks' shares; otherwise each block finds its own. None to choose.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      [T, E] float32 scores. E is `keys.max_keys`, the number of keys that a row of the block table can hold. The score
      of a visible key is -inf if the block table lacks the key's block. Scores of keys that are not visible, and rows
      of padding, are unspecified.

      With candidates, E = 8 * C, and columns 8 * c .. 8 * c + 7 are for the keys of block `candidates[t, c]`. If token
      t sees n keys, its columns from n on are unspecified. The blocks from `dsv4_jax.ops.candidate_blocks` are in
      ascending order, so that the columns of visible keys come first.

    Raises:
      NotImplementedError: the layout, a shape or a dtype is not supported.
    """
    keys.check()
    check_array("q", q, keys.dtype, None, None, DIM)
    tokens, heads, _ = q.shape
    check_rules({f"queries of 32 or 64 heads, got {heads}": heads in (32, 64)})
    check_array("weights", weights, jnp.float32, tokens, heads)
    check_tokens(tokens, slots=slots, positions=positions)
    max_keys = keys.max_keys
    gathers = candidates is not None
    if gathers:
        check_array("candidates", candidates, jnp.int32, tokens, None)
        rule = "an even number of candidate blocks, and keys without a Hadamard rotation"
        check_rules({rule: candidates.shape[1] % 2 == 0 and keys.dtype == jnp.bfloat16})
        max_keys = CANDIDATE_KEYS * candidates.shape[1]
    if 0 in (tokens, max_keys, keys.max_keys):
        return jnp.full((tokens, max_keys), -jnp.inf, jnp.float32)
    blocks = blocks or (3 if interpret else MULTIPROCESSORS)
    chunk_tokens = 1 if gathers else min(8, tokens)  # shared memory has to hold a chunk's queries
    # Number of warpgroups in a block; while one waits, the others compute. Keys in bfloat16 with 32 heads need few
    # registers: a thread has 128 if there are four warpgroups, 96 if there are five, and 80 if there are six.
    warpgroups = 4
    if heads == 32 and keys.dtype == jnp.bfloat16 and chunk_tokens == 1:
        warpgroups = 5 if gathers else 6
    if interpret:
        warpgroups = 1  # warpgroups that wait for each other would block the CPU's few threads
    chunks = Chunks(slots, positions, chunk_tokens, keys.compress_rate, max_keys)
    plan_in_xla = tokens > MAX_UNPLANNED_TOKENS if plan_in_xla is None else plan_in_xla
    shares = planned_shares(chunks.costs(), blocks) if plan_in_xla else None

    def body(layer_gmem, chunks, q_gmem, weights_gmem, keys_gmem, candidates_gmem, shares_gmem, out_gmem, scratch):
        warpgroup, block = axis_indices("warpgroup", "block")
        keys = dataclasses.replace(keys_gmem, layer=layer_gmem[0])
        if shares_gmem is None:
            begin, end, token, base = chunks.share(block, blocks)
        else:
            begin, end, token, base = (shares_gmem[4 * block + i] for i in range(4))  # as `chunks.share` returns them

        def is_left(state):
            token, base = state
            return (token < tokens) & (base < end)

        def score_next_chunk(state):
            """Scores this block's share of a chunk, and returns the state for the next chunk.

            The state is (first token of the chunk, number of units of work of all preceding chunks).
            """
            token, base = state
            slot, count, tiles = chunks.at(token)

            def first_tile_from(unit):
                """Returns the index of the chunk's first tile that has no unit of work before `unit`."""
                return jnp.minimum(lax.div(jnp.maximum(unit - base, 0) + (count - 1), count), tiles)

            first_tile = first_tile_from(begin)
            end_tile = first_tile_from(end)

            @pl.when(end_tile > first_tile)
            def _():
                last_slot = keys.block_table.shape[0] - 1
                chunk = token, count, jnp.minimum(slot, last_slot), first_tile, end_tile
                arrays = q_gmem, weights_gmem, keys, candidates_gmem, out_gmem
                ChunkScorer(*chunk, warpgroup, *arrays, scratch).run()

            return token + count, base + count * tiles

        lax.while_loop(is_left, score_next_chunk, (token, base))

    launch = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, max_keys), jnp.float32),
        kernel_name="indexer_scores",
        grid={"block": blocks},
        num_threads=warpgroups,
        scratch_types=[Scratch.types(warpgroups, chunk_tokens, heads, q.dtype, keys.scales.shape[-1])],
        interpret=interpret,
    )
    pools = dataclasses.replace(keys, layer=None)
    return launch(keys.layer.reshape(1), chunks, q, weights, pools, candidates, shares)
