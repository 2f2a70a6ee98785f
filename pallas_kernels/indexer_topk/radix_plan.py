"""The division of a row among the blocks of a cluster, and the layout of their shared memory."""

import dataclasses
import functools
import itertools
import types
from typing import Any, NamedTuple

from pallas_kernels.runtime.hardware import SHARED_BYTES


MAX_K = 2048
BINS = 2048
SHIFTS = (21, 10, 0)  # positions of the three digits in a key
FIRST_KEY = 0x00800000  # key of the smallest finite score
VECTOR = 4  # scores in a 16-byte load
STEP = 32 * VECTOR  # scores that a warp loads at a time
RESULT = 4  # words that hold the result of one pass
MAX_BLOCKS = 8
# {blocks of a cluster: rows that run at once}; a block fills a multiprocessor. Fewer clusters fit than 132 / blocks,
# since a cluster lies in one group of up to 18 multiprocessors: 16 clusters of 8 blocks or 32 of 4 did not fit.
_ROWS_AT_ONCE = {8: 14, 4: 30, 3: 40, 2: 66}


@dataclasses.dataclass(frozen=True)
class RadixPlan:
    """The division of a row, and the tuning choices of the kernel.

    A warp owns a contiguous stretch of `steps` loads of 128 entries. The row's length determines `steps`, which is at
    most `chunks * values / 4`.
    """

    k: int  # number of entries to select
    blocks: int  # number of blocks in the cluster that shares a row
    warpgroups: int  # number of warpgroups in a block
    values: int  # number of scores that a thread holds at a time; a multiple of 4, at most 32
    chunks: int = 1  # number of times that a thread loads `values` scores to see all of the longest row

    @classmethod
    def for_rows(cls, rows: int, entries: int, k: int) -> "RadixPlan":
        """Chooses the plan for `rows` rows of `entries` scores; measured on an H100 and an H200."""
        # The clusters run at once if possible: one row more would wait for all others. Beyond that, blocks that share
        # a row only wait for each other.
        max_blocks = next((blocks for blocks, at_once in _ROWS_AT_ONCE.items() if rows <= at_once), 1)
        if entries <= 32768:
            # A cluster costs more to start and to wait for than it saves.
            blocks = 1
            warpgroups = 8
        elif max_blocks == 8 and entries <= 8 * 16384:
            blocks = 8
            warpgroups = 4
        else:
            blocks = min(max_blocks, -(-entries // 32768))
            warpgroups = 8
        while True:
            share = -(-entries // (blocks * warpgroups * 128))
            plan = cls(k, blocks, warpgroups, -(-share // 4) * 4)
            if share > 32:
                plan = cls(k, blocks, warpgroups, 24, -(-share // 24))
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
        """The number of words of a block's marks, which have one bit for each entry."""
        return self.warps * self.chunks * self.values

    @property
    def slots(self) -> int:
        """The number of candidates that a thread can list; several chunks need half of the memory for numbers."""
        return self.values if self.chunks == 1 else self.values // 2

    @property
    def max_shared(self) -> int:
        """The number of candidates that a block can send to the others."""
        return self.threads

    @functools.cached_property
    def offsets(self) -> types.SimpleNamespace:
        """The first word of each area of shared memory."""
        cluster = self.blocks > 1
        sizes = {
            "counts": len(SHIFTS) * BINS,  # this block's histogram of each pass
            "cluster_counts": len(SHIFTS) * BINS if cluster else 0,  # the whole cluster's
            "results": len(SHIFTS) * RESULT,  # what each pass found
            "above": self.marks,  # marks of entries above the threshold
            "ties": self.marks,  # marks of entries at the threshold
            "overflow": 4,  # 1 if some thread has more candidates than slots
            "totals": MAX_BLOCKS,  # the number of marks in each block: above in the upper half-word, ties in the lower
            "zeroed": 0,  # the areas before this one start as zero
            "candidate_counts": MAX_BLOCKS,  # the number of candidates in each block
            "scratch": 32,  # one word for each warp
            "shared_candidates": self.blocks * self.max_shared if cluster else 0,  # the candidates of each block
        }
        starts = itertools.accumulate(sizes.values(), initial=0)
        return types.SimpleNamespace(**dict(zip((*sizes, "end"), starts, strict=True)))

    def counts(self, number: int) -> int:
        """The first word of this block's histogram of pass `number`."""
        return self.offsets.counts + number * BINS

    def cluster_counts(self, number: int) -> int:
        """The first word of the cluster's histogram of pass `number`, which a single block shares with its own."""
        return self.offsets.cluster_counts + number * BINS if self.blocks > 1 else self.counts(number)

    def results(self, number: int) -> int:
        """The first word of the result of pass `number`."""
        return self.offsets.results + number * RESULT

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block: the areas and the threads' lists of candidates."""
        return 4 * (self.offsets.end + self.values * self.threads)


class CandidateList(NamedTuple):
    """Scores that each thread has listed as candidates, from one chunk or from all."""

    mask_or_count: Any  # [128] int32, a bit for each score of one chunk, or the number from all chunks
    chunk: Any  # int32 scalar, number of the chunk, or None for all chunks
