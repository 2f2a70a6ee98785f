"""The storage of weights: FP8 with a scale for a block of values, FP4 with a scale for 32 columns, and bfloat16.

Kernels unpack FP8 and FP4 weights to bfloat16 numbers that are 2**-32 times the weights. These numbers are exact for
E8M0 scales from 2**-85 to 2**33. The epilogues multiply sums by 2**32. bfloat16 weights are not unpacked. The GEMMs
multiply the sums of bfloat16 weights by 2**-32, so that the epilogues need not know how weights are stored.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.formats.exact_math import power_of_two
from pallas_kernels.mgpu.bfloat16_words import decode_e2m1, decode_e4m3
from pallas_kernels.mgpu.mlir import Scalar


ROWS = 64  # number of rows of a tile
HALF = ROWS // 2  # number of rows of each half of a tile; the halves may lie apart in the matrix
SEGMENT = 64  # number of bytes of a row that four threads share
SHIFT = 32  # unpacked FP8 and FP4 weights are 2**-SHIFT times the weights
SCALED = 128  # number of columns and number of rows of an FP8 block with one scale in V4
# The minimum size of a bulk copy, in bytes. A scale is a byte, so a copy brings 16 FP4 scales of each row if rows have
# a multiple of 16 scales. If rows have 8 scales, a copy brings the 16 scales of two rows at a time. For other numbers
# of scales, one copy brings all scales of at least 32 rows.
SCALE_BYTES = 16


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """The storage of a matrix [out, in]."""

    bits: int  # number of bits of a weight: 4 (FP4, with even columns in the low nibbles), 8 (FP8) or 16 (bfloat16)
    block: int = SCALED  # FP8: number of columns and number of rows of a block with one scale, 128 or 32

    @property
    def has_small_blocks(self) -> bool:
        """Whether the weights are FP8 with a scale for 32 x 32 values.

        The two halves of a tile, 32 rows each, then have different scales.
        """
        return self.bits == 8 and self.block == HALF

    def copies_all_scales(self, columns: int) -> bool:
        """Whether one copy brings all FP4 scales of a tile, if the rows have this number of columns."""
        scales = columns // 32
        return self.bits == 4 and scales != SCALE_BYTES // 2 and scales % SCALE_BYTES > 0

    def scale_line(self, columns: int) -> int:
        """Returns the length of a line of the array [lines, scales of a line] from which copies read FP4's scales.

        Usually a line has the scales of one weight row, or of two rows with 8 scales each. If one copy brings all
        scales of a tile (`copies_all_scales`), a line has 64 or 128 scales, and need not begin with a weight row. With
        fewer scales in a line, a tile could exceed the 256 lines that a copy can bring.
        """
        if self.copies_all_scales(columns):
            return 128 if columns % 128 == 0 else 64
        return max(columns // 32, SCALE_BYTES)

    @property
    def segment(self) -> int:
        """The number of columns of a segment."""
        return self.columns(SEGMENT)

    @property
    def min_segments(self) -> int:
        """The number of segments that are multiplied at a time: 2 for bfloat16, otherwise 1.

        Two segments of bfloat16 have as many columns as one segment of FP8.
        """
        return 2 if self.bits == 16 else 1

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array of weights or codes."""
        return jnp.dtype(jnp.bfloat16 if self.bits == 16 else jnp.uint8)

    def columns(self, num_bytes: int) -> int:
        """Returns the number of columns in `num_bytes` bytes of a row."""
        return 8 * num_bytes // self.bits

    def elements(self, columns):
        """Returns the number of elements of `dtype` in `columns` columns. Takes and returns an int or int32 scalar."""
        return columns // 2 if self.bits == 4 else columns


FP8 = WeightLayout(8)
FP8_32 = WeightLayout(8, HALF)
FP4 = WeightLayout(4)
BF16 = WeightLayout(16)


def decode(codes: jax.Array, layout: WeightLayout) -> jax.Array:
    """Returns the float32 values of codes [R, elements], without scales; for interpreted kernels."""
    if layout.bits == 16:
        return codes.astype(jnp.float32)
    if layout.bits == 8:
        return decode_e4m3(codes)
    return decode_e2m1(codes)


def decode_scales(exponents: jax.Array) -> jax.Array:
    """Returns 2**-32 times the values of E8M0 scales as float32; for interpreted kernels.

    `exponents` are the int32 codes of the scales.
    """
    return power_of_two(exponents - SHIFT)


def interleave_halves(sums: jax.Array) -> jax.Array:
    """Moves rows i and 32 + i of sums [64, N] to two rows of the result that one thread holds.

    In the `wgmma` layout these are rows r = 16 * (i // 8) + i % 8 and r + 8.
    """
    return sums.reshape(2, 4, 8, -1).transpose(1, 0, 2, 3).reshape(ROWS, -1)


def power_pair(exponent: Scalar) -> Scalar:
    """Returns a word of two equal bfloat16: the power of two whose biased exponent is min(exponent, 254)."""
    return exponent.signed_minimum(254) * 0x00800080
