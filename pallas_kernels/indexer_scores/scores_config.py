"""Tuning choices of the indexer's scores."""

import dataclasses

from pallas_kernels.runtime.hardware import MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning choices of `indexer_scores`.

    Attributes:
      blocks: number of blocks, which share the work equally.
      warpgroups: number of warpgroups in a block; they hide each other's waits.
      stages: number of tiles of a warpgroup that are being copied or read.
      chunk_tokens: maximum number of tokens in a chunk, whose queries fit into shared memory.
      plan_in_xla: whether XLA computes the blocks' shares; otherwise each block searches for its own.
    """

    blocks: int = MULTIPROCESSORS
    warpgroups: int = 4
    stages: int = 4
    chunk_tokens: int = 8
    plan_in_xla: bool = False

    @classmethod
    def for_tokens(cls, tokens: int, interpret: bool = False) -> "Config":
        """Chooses the configuration for a number of tokens."""
        # Four warpgroups leave 128 registers to a thread. Interpreted, warpgroups that wait for each other would
        # block the CPU's few threads.
        blocks, warpgroups = (3, 1) if interpret else (MULTIPROCESSORS, 4)
        # The search of a block takes 0.2 ms for 8,192 tokens.
        return cls(blocks, warpgroups, chunk_tokens=min(8, tokens), plan_in_xla=tokens > 256)
