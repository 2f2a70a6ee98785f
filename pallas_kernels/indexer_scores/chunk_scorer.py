"""Scores of one chunk, up to 8 tokens of a request: a pipeline of key tiles from global memory to the tensor cores."""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores import key_tiles
from pallas_kernels.indexer_scores.key_tiles import CANDIDATE_KEYS, DIM, KEYS, PER_HALF, PER_THREAD, PER_WARP, WARP_KEYS
from pallas_kernels.indexer_scores.tile_scores import score, score_far
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.mgpu.copies import commit_copies, wait_copies
from pallas_kernels.runtime.pytrees import pytree_dataclass


MAX_HEADS = 64  # maximum number of heads in a product
STAGES = 4  # number of tiles of a warpgroup in shared memory: one is read while the others are copied
# Number of tiles in a run. An int32 of flags has one bit for each tile: whether a key of the tile has scales that are
# far apart.
FLAGS = 32


@pytree_dataclass
class Scratch:
    """The shared memory and barriers of a block."""

    queries_full: Any  # barriers, one for each token of a chunk: the token's queries and head weights have been copied
    queries_empty: Any  # a barrier: every warpgroup has read the queries of the preceding chunk
    queries_smem: Any  # [chunk_tokens * heads, 128] queries of the chunk
    weights_smem: Any  # [chunk_tokens, heads] float32 head weights of the chunk
    # (codes [tiles, 64 keys, 64 bytes], scales [tiles, 64 keys, 4 or 8 bytes]), uint8, with `STAGES` tiles for each
    # warpgroup.
    tiles_smem: Any

    @classmethod
    def types(cls, warpgroups: int, chunk_tokens: int, heads: int, q_dtype: Any, scale_width: int) -> "Scratch":
        """Returns the types of shared memory and barriers to allocate."""
        tiles = warpgroups * STAGES
        return cls(
            queries_full=plgpu.Barrier(num_arrivals=2, num_barriers=chunk_tokens),
            queries_empty=plgpu.Barrier(num_arrivals=warpgroups),
            queries_smem=wgmma.operand(chunk_tokens * heads, DIM, dtype=q_dtype),
            weights_smem=plgpu.SMEM((chunk_tokens, heads), jnp.float32),
            tiles_smem=tuple(plgpu.SMEM((tiles, KEYS, width), jnp.uint8) for width in (DIM // 2, scale_width)),
        )


@dataclasses.dataclass(frozen=True)
class ChunkScorer:
    """Scores, in one warpgroup, the tiles of a chunk that belong to the block's share of the work.

    In methods on a tile, `i` is the index of the tile among this warpgroup's tiles of the share. `candidates` is the
    tile's result of `_load_candidates`, and `block_ids` its result of `_load_block_ids`.
    """

    token: Any  # int32 scalar, index of the chunk's first token
    count: Any  # int32 scalar, number of tokens in the chunk
    slot: Any  # int32 scalar, index of the request's row of the block table
    # int32 scalar, index of the first tile of the block's share. Tile n consists of the request's keys 64 * n ..
    # 64 * n + 63, or with candidates, of the keys of the token's candidate blocks 8 * n .. 8 * n + 7.
    first_tile: Any
    end_tile: Any  # int32 scalar, end of the tiles of the block's share
    warpgroup: Any  # int32 scalar, index of the warpgroup in the block
    q_gmem: Any  # [T, heads, 128] rounded queries
    weights_gmem: Any  # [T, heads] float32 head weights
    keys: key_tiles.IndexerKeys  # references to the operands; only `layer` is an int32 scalar
    candidates_gmem: Any  # [T, C] int32 indices of candidate blocks of 8 keys; None = all keys are scored
    out_gmem: Any  # [T, E] float32 scores
    scratch: Scratch

    def run(self) -> None:
        """Scores the chunk's tiles for its tokens."""
        barriers.release(self.scratch.queries_empty)  # the preceding chunk's
        pl.when(self.warpgroup == 0)(jax.named_scope("load_queries")(self._load_queries))
        candidates = [self._load_candidates(jnp.int32(i)) for i in range(STAGES + 1)]
        *copied_ids, next_ids = (self._load_block_ids(jnp.int32(i), candidates[i]) for i in range(STAGES))
        missing = plgpu.layout_cast(jnp.zeros(next_ids.shape, jnp.int32), self._layout)
        for i, block_ids in enumerate(copied_ids):
            self._start_copy(jnp.int32(i), candidates[i], block_ids)
            missing = _push_sign(missing, block_ids)
        for i in range(self._chunk_tokens):
            pl.when(i < self.count)(lambda i=i: plgpu.barrier_wait(self.scratch.queries_full.at[i]))
        tiles = self.end_tile - self.first_tile
        warpgroups = lax.axis_size("warpgroup")
        own_tiles = lax.div(jnp.maximum(tiles - self.warpgroup, 0) + (warpgroups - 1), warpgroups)
        with jax.named_scope("score_tiles"):
            runs = lax.div(own_tiles + (FLAGS - 1), FLAGS)
            lax.fori_loop(0, runs, functools.partial(self._score_run, own_tiles), (candidates[-2:], next_ids, missing))
        wait_copies(0)

    @property
    def _chunk_tokens(self):
        """The maximum number of tokens in a chunk."""
        return self.scratch.weights_smem.shape[0]

    def _load_queries(self):
        plgpu.barrier_wait(self.scratch.queries_empty)
        for i in range(self._chunk_tokens):
            pl.when(i < self.count)(functools.partial(self._load_query, i))

    def _load_query(self, i):
        token = self.token + i
        heads = self.q_gmem.shape[1]
        full = self.scratch.queries_full.at[i]
        plgpu.copy_gmem_to_smem(self.q_gmem.at[token], self.scratch.queries_smem.at[pl.ds(i * heads, heads)], full)
        plgpu.copy_gmem_to_smem(self.weights_gmem.at[token], self.scratch.weights_smem.at[i], full)

    # --- addresses ---

    def _tile(self, i):
        """Returns the index of this warpgroup's i-th tile among all tiles of the chunk's keys, see `first_tile`."""
        return self.first_tile + self.warpgroup + i * lax.axis_size("warpgroup")

    def _stage(self, i):
        return self.warpgroup * STAGES + lax.rem(i, STAGES)

    @property
    def _layout(self):
        """The layout of arrays with a value for each range of consecutive keys of a tile.

        A range is the 16 keys of a warp, or with candidates, the 8 keys of a candidate block.
        """
        return PER_WARP if self.candidates_gmem is None else PER_HALF

    def _load_candidates(self, i):
        """Loads the indices of a tile's candidate blocks, [4, 2] int32 in layout PER_HALF; None without candidates."""
        if self.candidates_gmem is None:
            return None
        count = self.candidates_gmem.shape[1]
        warp, half = (plgpu.broadcasted_iota(jnp.int32, (4, 2), axis, layout=PER_HALF) for axis in range(2))
        number = jnp.minimum(self._tile(i) * (KEYS // CANDIDATE_KEYS) + 2 * warp + half, count - 1)
        return key_tiles.load_words(self.candidates_gmem, self.token * count + number, PER_HALF)

    def _in_blocks(self, operation, i, candidates):
        """Returns `operation(key, keys per block)` for the index of each range's first key in the request.

        With `lax.div`, the result is the column of the key's block in the block table. With `lax.rem`, it is the index
        of the key in this block. The result is int32 in the layout `_layout`. The operands are unsigned, because
        unsigned division is faster.
        """
        if candidates is None:
            warp_key = plgpu.broadcasted_iota(jnp.int32, (4,), 0, layout=PER_WARP) * WARP_KEYS
            key = self._tile(i) * KEYS + warp_key
        else:
            key = jnp.maximum(candidates, 0) * CANDIDATE_KEYS
        return operation(key.astype(jnp.uint32), jnp.uint32(self.keys.per_block)).astype(jnp.int32)

    def _load_block_ids(self, i, candidates):
        """Loads the id of the block that holds each range of keys, int32 in the layout `_layout`; -1 = no block.

        A range lies in one block, because blocks have a multiple of 16 keys.
        """
        max_blocks = self.keys.block_table.shape[1]
        column = jnp.minimum(self._in_blocks(lax.div, i, candidates), max_blocks - 1)
        ids = key_tiles.load_words(self.keys.block_table, self.slot * max_blocks + column, self._layout)
        return ids if candidates is None else jnp.where(candidates < 0, -1, ids)

    def _first_rows(self, i, candidates, block_ids):
        """Returns the row of each range's first key in the pools, counted over all layers and blocks, as int32."""
        block = self.keys.layer * self.keys.codes.shape[1] + jnp.maximum(block_ids, 0)
        return block * self.keys.per_block + self._in_blocks(lax.rem, i, candidates)

    def _start_copy(self, i, candidates, block_ids):
        """Starts to copy a tile to its stage, as one group of copies. The group is empty if no such tile exists."""
        stage = self._stage(i)
        rows = self._first_rows(i, candidates, block_ids)
        is_wanted = self._tile(i) < self.end_tile
        key_tiles.start_tile(self.scratch.tiles_smem, stage, (self.keys.codes, self.keys.scales), rows, is_wanted)
        commit_copies()

    # --- scores ---

    @property
    def _fp8(self):
        return self.keys.dtype == jnp.float8_e4m3fn

    def _score_run(self, own_tiles, run, carry):
        """Scores a run of up to 32 tiles. Afterwards, tiles with a key whose scales are far apart are scored again.

        Args:
          own_tiles: int32 scalar, number of tiles of this warpgroup.
          run: int32 scalar, index of the run.
          carry: (candidates, block_ids, missing). `candidates` is a list of the candidate blocks of the next two tiles
            to copy. `block_ids` are the block ids of the next tile to copy. `missing` has a word for each range of keys
            in a tile. The bits of the word say in which of the 32 most recently copied tiles the range's block is
            missing, see `_push_sign`.

        Returns:
          The new carry.
        """
        begin = run * FLAGS
        end = jnp.minimum((run + 1) * FLAGS, own_tiles)
        far = None
        if self._fp8:
            far = plgpu.layout_cast(jnp.zeros(PER_THREAD.shape, jnp.int32), PER_THREAD.layout)
        *carry, far = lax.fori_loop(begin, end, self._score_tile, (*carry, far))

        def rescore_if_far(i, _):
            is_far = key_tiles.any_set(far, jnp.int32(1) << (end - 1 - i))
            pl.when(is_far)(functools.partial(self._rescore_tile, i))

        if self._fp8:
            any_far = key_tiles.any_set(far, jnp.int32(-1))
            pl.when(any_far)(lambda: lax.fori_loop(begin, end, rescore_if_far, None))
        return tuple(carry)

    def _score_tile(self, i, carry):
        (candidates, next_candidates), block_ids, missing, far = carry
        next_block_ids = self._load_block_ids(i + STAGES, next_candidates)
        later_candidates = self._load_candidates(i + STAGES + 1)
        self._start_copy(i + STAGES - 1, candidates, block_ids)
        missing = _push_sign(missing, block_ids)
        wait_copies(STAGES - 1)
        tile = key_tiles.read_tile(self.scratch.tiles_smem, self._stage(i))
        if self._fp8:
            values, largest, far = key_tiles.unpack_e4m3(tile, far)
            keys = values, largest
        else:
            keys = key_tiles.unpack_bfloat16(tile, scale=self.keys.layout.scale)

        def score_tokens(j, tokens):
            row = self.token + j
            # The lowest bit of `missing` belongs to tile `i + STAGES - 1`. The shift makes the bit of tile i the sign
            # bit.
            score(keys, token=j, tokens=tokens, row=row, **self._operands(i, missing << (32 - STAGES)))

        if self._chunk_tokens == 1 or self.q_gmem.shape[1] == MAX_HEADS:
            lax.fori_loop(0, self.count, lambda j, _: score_tokens(j, 1), None)
        else:
            # One product with the heads of two tokens takes fewer instructions than two products.
            lax.fori_loop(0, lax.div(self.count, 2), lambda j, _: score_tokens(2 * j, 2), None)
            pl.when(lax.rem(self.count, 2) == 1)(lambda: score_tokens(self.count - 1, 1))
        return [next_candidates, later_candidates], next_block_ids, missing, far

    def _rescore_tile(self, i):
        block_ids = self._load_block_ids(i, None)
        tile = key_tiles.load_tile((self.keys.codes, self.keys.scales), self._first_rows(i, None, block_ids))
        score_far(tile, tokens=self.count, row=self.token, **self._operands(i, block_ids))

    def _operands(self, i, block_ids):
        """Returns the keyword arguments of `score` and `score_far` that do not depend on the token."""
        layout = self.keys.layout
        bfloat16_factor = layout.global_scale * 2.0 ** key_tiles.SHIFTS[layout.scale]
        return {
            "queries": self.scratch.queries_smem,
            "weights": self.scratch.weights_smem,
            "out": self.out_gmem,
            "first": self._tile(i) * KEYS,
            "block": block_ids,
            "factor": 2.0 ** (-2 * key_tiles.TOP) if self._fp8 else bfloat16_factor,
        }


def _push_sign(words, block_ids):
    """Shifts words left by one bit. The new lowest bit is the sign of a block id: 1 if the block is missing (id -1)."""
    return (words << 1) | lax.shift_right_logical(block_ids, jnp.int32(31))
