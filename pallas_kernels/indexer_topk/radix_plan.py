"""The division of a row of scores among the blocks of a cluster, and the layout of a block's shared memory."""

import dataclasses
import functools
import itertools
import types
from typing import Any, NamedTuple

from pallas_kernels.runtime.hardware import CLUSTERS_AT_ONCE, SHARED_BYTES


MAX_K = 2048  # maximum k
BINS = 2048  # number of bins of a histogram, one for each value of a digit of up to 11 bits
SHIFTS = (21, 10, 0)  # index of the lowest bit of each of the three digits in a key
FIRST_KEY = 0x00800000  # key of the smallest finite score
VECTOR = 4  # number of scores in a load of 16 bytes
STEP = 32 * VECTOR  # number of scores that a warp loads at a time
RESULT = 4  # number of words that hold the result of one pass
MAX_BLOCKS = 8  # maximum number of blocks in a cluster


@dataclasses.dataclass(frozen=True)
class RadixPlan:
    """The division of a row, and the tuning choices of the kernel.

    Each warp of the cluster reads a contiguous part of the row, 128 scores with each load. `RadixSelect.steps` is the
    number of loads of a warp. The number depends on the row's length, and is at most `chunks * values / 4`.
    """

    k: int  # number of entries to select
    blocks: int  # number of blocks in the cluster that shares a row
    warpgroups: int  # number of warpgroups in a block
    values: int  # number of scores that a thread holds at a time; a multiple of 4, at most 32
    chunks: int = 1  # number of chunks of `values` scores that a thread loads if the row has the maximum length

    @classmethod
    def for_rows(cls, rows: int, entries: int, k: int) -> "RadixPlan":
        """Chooses the plan for `rows` rows of `entries` scores. The limits were measured on an H100 and an H200."""
        # Finds the largest clusters with which all rows run at once. With larger clusters, some rows could start only
        # when others have ended. If not all rows run at once even with clusters of two blocks, each row gets one block,
        # because blocks that share a row lose time by waiting for each other.
        max_blocks = max((blocks for blocks, at_once in CLUSTERS_AT_ONCE.items() if rows <= at_once), default=1)
        if entries <= 32768:
            # For short rows, starting and synchronizing a cluster takes more time than it saves.
            blocks = 1
            warpgroups = 8
        elif max_blocks == 8 and entries <= 8 * 16384:
            blocks = 8
            warpgroups = 4
        else:
            blocks = min(max_blocks, -(-entries // 32768))
            warpgroups = 8
        while True:
            per_thread = -(-entries // (blocks * warpgroups * 128))
            plan = cls(k, blocks, warpgroups, -(-per_thread // 4) * 4)
            if per_thread > 32:  # too many scores for a thread's registers: it loads them in chunks of 24
                plan = cls(k, blocks, warpgroups, 24, -(-per_thread // 24))
            if plan.shared_bytes <= SHARED_BYTES or blocks == 8:
                return plan
            blocks += 1

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups

    @property
    def marks(self) -> int:
        """The number of words of a bitmap that has one bit for each entry of a block."""
        return self.warps * self.chunks * self.values

    @property
    def slots(self) -> int:
        """The number of candidates that a thread can list.

        With several chunks, half of the memory holds the indices of the candidates, see `RadixSelect.append`.
        """
        return self.values if self.chunks == 1 else self.values // 2

    @property
    def max_shared(self) -> int:
        """The maximum number of candidates that a block can send to the other blocks."""
        return self.threads

    @functools.cached_property
    def offsets(self) -> types.SimpleNamespace:
        """The index of each area's first word in a block's shared memory, by name. `end` is the number of all words."""
        cluster = self.blocks > 1
        sizes = {
            "counts": len(SHIFTS) * BINS,  # this block's histogram of each pass
            "cluster_counts": len(SHIFTS) * BINS if cluster else 0,  # the cluster's histogram of each pass
            "results": len(SHIFTS) * RESULT,  # result of each pass
            "above": self.marks,  # bitmap of the entries whose keys are above the search's last interval
            "ties": self.marks,  # bitmap of the entries whose keys are in the search's last interval
            "overflow": 4,  # the first word is 1 if the candidates of some thread did not fit into its slots
            "totals": MAX_BLOCKS,  # number of each block's marks in `above` (upper 16 bits) and `ties` (lower 16 bits)
            "zeroed": 0,  # end of the areas that `RadixSelect.zero` clears
            "candidate_counts": MAX_BLOCKS,  # number of candidates in each block
            "scratch": 32,  # memory of `ops.block_prefix_sum`, a word for each warp
            "shared_candidates": self.blocks * self.max_shared if cluster else 0,  # keys of each block's candidates
        }
        first_words = itertools.accumulate(sizes.values(), initial=0)
        return types.SimpleNamespace(**dict(zip((*sizes, "end"), first_words, strict=True)))

    def counts(self, number: int) -> int:
        """Returns the index of the word at which this block's histogram for pass `number` begins."""
        return self.offsets.counts + number * BINS

    def cluster_counts(self, number: int) -> int:
        """Returns the index of the word at which the cluster's histogram for pass `number` begins.

        In a cluster of one block, this is the block's histogram.
        """
        return self.offsets.cluster_counts + number * BINS if self.blocks > 1 else self.counts(number)

    def results(self, number: int) -> int:
        """Returns the index of the word at which the result of pass `number` begins."""
        return self.offsets.results + number * RESULT

    @property
    def shared_bytes(self) -> int:
        """The number of bytes of a block's shared memory: the areas, and the threads' lists of candidates."""
        return 4 * (self.offsets.end + self.values * self.threads)


class CandidateList(NamedTuple):
    """Says which scores of one chunk, or of all chunks, each thread of a warpgroup has listed as candidates.

    The scores themselves are in shared memory, see `RadixSelect.collect` and `RadixSelect.append`.
    """

    # [128] int32, a word for each thread. In a list of one chunk, bit i says whether the thread's score i is listed. In
    # a list of all chunks, the word is the number of the thread's candidates.
    mask_or_count: Any
    chunk: Any  # int32 scalar, index of the chunk; None for a list of all chunks
