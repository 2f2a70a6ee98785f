"""How the work on windows of more than 16 rows is shared out, and the shared memory that it takes."""

import dataclasses

from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.formats.exact_math import PARTS
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, SHARED_BYTES


# (windows that may close, blocks of a cluster that share one): more blocks finish a window sooner.
BLOCKS = ((14, 8), (30, 4), (130, 2))
# Blocks that a device holds at once: one a multiprocessor. A cluster of 2 finds room on any two neighbours.
AT_ONCE = MULTIPROCESSORS
# Of a block; each has its share of the channels. In a decode step, where hardly a window closes, more of them take
# longer to start than they save; where requests bring whole windows, more loads are under way.
WARPGROUPS_OF_A_STEP, WARPGROUPS = 2, 4
DEPTH = 2  # parts that are copied at once, in a block that pools so many of a window and has room for them


@dataclasses.dataclass(frozen=True)
class LongWindowPlan:
    """How the work on a call, where a request brings at most `most` tokens, is shared out.

    Each of `workers` clusters has `share` consecutive tokens, `blocks` blocks and `warpgroups` warpgroups a block, and
    copies `depth` parts at once, a divisor of `parts`.
    """

    c: CompressorOperands
    most: int
    blocks: int
    warpgroups: int
    workers: int
    share: int
    depth: int

    @property
    def vector(self) -> int:
        """Channels of a warpgroup."""
        return self.c.dim // self.warpgroups

    @property
    def parts(self) -> int:
        """Parts of a window that a block pools."""
        return PARTS // self.blocks

    @property
    def part_rows(self) -> int:
        return self.c.rows // PARTS

    @property
    def bias_rows(self) -> int:
        """Last rows of a part that can be in the call, rounded up to what a thread copies at once."""
        return min(self.part_rows, -(-self.most // 4) * 4)

    @property
    def stage(self) -> int:
        """Values that a warpgroup stages of a part: logits, biases, values."""
        return (2 * self.part_rows + self.bias_rows) * self.vector

    @property
    def shared(self) -> dict[str, int]:
        """Float32 values in shared memory, by buffer; a warpgroup has its own share of `stage` and `scratch`.

        `inbox` holds the largest logits, the sums of weights and the weighted sums of every part.
        """
        stage = self.depth * self.stage * self.warpgroups
        return dict(stage=stage, scratch=self.c.dim, sums=4 * self.c.dim, inbox=3 * PARTS * self.c.dim)


def plan(c: CompressorOperands, tokens: int, most: int) -> LongWindowPlan:
    """The plan for a call."""
    windows = -(-tokens // min(most, c.rate))
    blocks = next((blocks for at_most, blocks in BLOCKS if windows <= at_most), 1)
    share = -(-tokens // min(windows, AT_ONCE // blocks))
    warpgroups = min(WARPGROUPS if most >= c.rate else WARPGROUPS_OF_A_STEP, c.dim // vectors.THREADS)
    shallow = LongWindowPlan(c, most, blocks, warpgroups, -(-tokens // share), share, 1)
    # Where any row may be new, the biases take the room of a second part.
    deep = dataclasses.replace(shallow, depth=min(DEPTH, shallow.parts))
    return deep if 4 * sum(deep.shared.values()) <= SHARED_BYTES else shallow
