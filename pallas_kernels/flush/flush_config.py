"""Tuning choices of the flush kernels, and the division of the work on long windows."""

import dataclasses

import jax

from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.formats.exact_math import CHUNKS
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, SHARED_BYTES


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning choices of the flush kernels."""

    # Pairs of a number of long windows that may close, and the blocks that share each if no more do.
    cluster_sizes: tuple[tuple[int, int], ...] = ((14, 8), (30, 4), (130, 2))
    long_blocks: int = MULTIPROCESSORS  # number of blocks for long windows. All of them run at once, one per SM
    # Number of warpgroups per block for long windows if few close; more take longer to start.
    decode_warpgroups: int = 2
    prefill_warpgroups: int = 4  # number of warpgroups per block for long windows if requests bring whole ones
    stages: int = 2  # number of chunks of a long window that a block copies at once, if it has room
    # Number of warpgroups for short windows; nearly as many as run at once, and odd, see `_workers`.
    short_workers: int = 513
    state_workers: int = 8 * MULTIPROCESSORS  # number of warpgroups for state rows; as many as run at once


@dataclasses.dataclass(frozen=True)
class FlushCall:
    """The arguments of `flush` that its launches share.

    `max_tokens` is the maximum number of tokens of a slot, and `layer` the operand [1] int32 of `layer_operand`.
    """

    slots: jax.Array
    positions: jax.Array
    layer: jax.Array | None
    max_tokens: int
    config: Config
    interpret: bool


@dataclasses.dataclass(frozen=True)
class LongWindowPlan:
    """The division of a call's work on long windows."""

    c: CompressorOperands  # compressor, for shapes
    max_in_call: int  # maximum number of a window's rows that are in the call
    blocks: int  # number of blocks in a cluster, which share each window
    warpgroups: int  # number of warpgroups in a block, which share the channels
    workers: int  # number of clusters
    share: int  # number of consecutive tokens of a cluster
    stages: int  # number of chunks that a block copies at once, a divisor of `chunks`

    @classmethod
    def for_call(cls, config: Config, c: CompressorOperands, tokens: int, max_in_call: int) -> "LongWindowPlan":
        """Returns the plan for a call of `tokens` tokens."""
        windows = -(-tokens // min(max_in_call, c.rate))
        blocks = next((blocks for at_most, blocks in config.cluster_sizes if windows <= at_most), 1)
        share = -(-tokens // min(windows, config.long_blocks // blocks))
        warpgroups = config.prefill_warpgroups if max_in_call >= c.rate else config.decode_warpgroups
        warpgroups = min(warpgroups, c.dim // vectors.THREADS)
        single = cls(c, max_in_call, blocks, warpgroups, -(-tokens // share), share, 1)
        # If any row may be in the call, the biases take the room of a second stage.
        staged = dataclasses.replace(single, stages=min(config.stages, single.chunks))
        return staged if 4 * sum(staged.shared.values()) <= SHARED_BYTES else single

    @property
    def channels(self) -> int:
        """The number of channels of a warpgroup."""
        return self.c.dim // self.warpgroups

    @property
    def chunks(self) -> int:
        """The number of a window's chunks that a block pools."""
        return CHUNKS // self.blocks

    @property
    def chunk_rows(self) -> int:
        return self.c.rows // CHUNKS

    @property
    def bias_rows(self) -> int:
        """The number of last rows of a chunk that can be in the call, a multiple of the 4 that a thread copies."""
        return min(self.chunk_rows, -(-self.max_in_call // 4) * 4)

    @property
    def stage_size(self) -> int:
        """The number of values in a stage of a warpgroup: logits, biases, values."""
        return (2 * self.chunk_rows + self.bias_rows) * self.channels

    @property
    def shared(self) -> dict[str, int]:
        """The number of float32 values in each buffer of shared memory.

        Each warpgroup has its own share of the stages and of the scratch. The partials are the largest logits, the sums
        of weights and the weighted sums of every chunk.
        """
        stages = self.stages * self.stage_size * self.warpgroups
        dim = self.c.dim
        return {"stages_smem": stages, "scratch_smem": dim, "sums_smem": 4 * dim, "partials_smem": 3 * CHUNKS * dim}
