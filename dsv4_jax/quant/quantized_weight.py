"""Weights that stay quantized in memory, in the storage format of DeepSeek's releases."""

import math
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.quant.fp4 import MXFP4_BLOCK, decode_mxfp4, encode_e2m1
from dsv4_jax.quant.fp8 import decode_e4m3
from dsv4_jax.quant.numerics import e8m0_value, round_to
from pallas_kernels.formats.row_encoder import E2M1_MAX, E4M3_MAX
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


type QuantizedKind = Literal["FP8", "FP8_32", "FP8_ROWS", "FP4"]

WEIGHT_BLOCK = 128  # rows and columns of the largest block, a multiple of those of all other blocks
# `BLOCKS` maps each kind to (rows, columns) of its blocks of values that share a scale.
BLOCKS: dict[QuantizedKind, tuple[int, int]] = {
    "FP8": (WEIGHT_BLOCK, WEIGHT_BLOCK), "FP8_32": (32, 32), "FP8_ROWS": (1, 32), "FP4": (1, MXFP4_BLOCK),
}  # fmt: skip


@pytree_dataclass
class QuantizedWeight:
    """Quantized matrices, which a parameter may hold in the place of an array: `nnx.Param(QuantizedWeight(...))`.

    Kernels read the codes and scales of all kinds but "FP8_ROWS". Other code reads `parameter[...]`, or `parameter[i]`
    for matrices of a stack. If blocks have one row ("FP8_ROWS", "FP4"), `i` may also index the rows of a matrix. Each
    read dequantizes, within the program that reads, only the values that it returns.

    Attributes:
      codes: uint8 codes. "FP4": [..., out, in / 2] pairs of E2M1 codes, with the even input channel in the low nibble.
        The other kinds: [..., out, in] E4M3 bits.
      scale: uint8 E8M0 bits, [..., ceil(out / rows), ceil(in / columns)], a scale for each block of values, see
        `BLOCKS`. Kernels represent all values exactly if the bits are 42 to 160.
      kind: the storage (static). Its blocks have 128 x 128 values in "FP8", 32 x 32 values in "FP8_32", and 32 values
        of a row in "FP8_ROWS" (for Engram's tables) and "FP4".
      dtype: dtype of the dequantized values (static): float32 or bfloat16, either of which represents them exactly.
    """

    codes: Any
    scale: Any
    kind: QuantizedKind = static_field()
    dtype: DTypeLike = static_field()

    @classmethod
    def encode(cls, values: Array | np.ndarray, kind: QuantizedKind) -> "QuantizedWeight":
        """Quantizes matrices to the same storage as in the release's files.

        A scale is the smallest power of two with which the largest value of its block does not overflow, and 1 for a
        block of zeros. Values are rounded to nearest, ties to even. NumPy arrays are quantized by NumPy, on the host,
        and all other arrays by JAX, to the same bytes unless values are subnormal.

        Args:
          values: [..., out, in] finite values, float32 or bfloat16.
          kind: the storage.
        """
        xp: Any = np if isinstance(values, np.ndarray) else jnp
        *leading, rows, columns = values.shape
        block_rows, block_columns = BLOCKS[kind]
        padding = [(0, 0)] * len(leading) + [(0, -rows % block_rows), (0, -columns % block_columns)]
        padded = xp.pad(values.astype(np.float32), padding)
        shape = padded.shape[-2] // block_rows, block_rows, padded.shape[-1] // block_columns, block_columns
        blocks = padded.reshape(*leading, *shape)
        exponents = _exponents(xp, xp.abs(blocks).max(axis=(-3, -1)), E2M1_MAX if kind == "FP4" else E4M3_MAX)
        reciprocals = ((127 - exponents) << 23).view(np.float32)  # the float32 2**-exponent, from its bits
        scaled = (blocks * reciprocals[..., :, None, :, None]).reshape(padded.shape)[..., :rows, :columns]
        if kind != "FP4":
            codes = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        else:
            codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) if xp is np else encode_e2m1(scaled)
            codes = codes[..., 0::2] | codes[..., 1::2] << 4  # a byte holds two codes, the first in its low half
        return cls(codes, (exponents + 127).astype(np.uint8), kind, values.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., out, in] of the dequantized values."""
        *leading, columns = self.codes.shape
        return (*leading, 2 * columns if self.kind == "FP4" else columns)

    @property
    def block(self) -> tuple[int, int]:
        """The numbers of rows and columns of a block of values that share a scale."""
        return BLOCKS[self.kind]

    def __getitem__(self, index: Any) -> Float[Array, "..."]:
        """Returns dequantized values: all for the index `...`, else those at this index of the leading axes."""
        codes, scale = (self.codes, self.scale) if index is ... else (self.codes[index], self.scale[index])
        if self.kind == "FP4":
            return round_to(decode_mxfp4(codes, scale), self.dtype)
        rows, columns = self.block
        scale = e8m0_value(scale)
        if rows > 1:
            scale = jnp.repeat(scale, rows, axis=-2)[..., : codes.shape[-2], :]
        scale = jnp.repeat(scale, columns, axis=-1)[..., : codes.shape[-1]]
        return round_to(decode_e4m3(codes) * scale, self.dtype)


def _exponents(xp, largest, limit):
    """Returns the exponents of scales: the least integer e from -126 to 126 with largest <= limit * 2 ** e.

    Args:
      xp: module of the array, `numpy` or `jax.numpy`.
      largest: float32 largest magnitude of each block. The exponent of 0 is 0.
      limit: the largest finite value of a code.
    """
    m, x = xp.frexp(largest)
    limit_m, limit_x = math.frexp(limit)
    exponents = xp.clip(x - limit_x + (m > limit_m).astype(np.int32), -126, 126)
    return xp.where(largest > 0, exponents, 0)


def is_quantized_kind(storage: str) -> TypeGuard[QuantizedKind]:
    """Returns whether the name of a weight's storage is a `QuantizedKind`, and not the name of a dtype."""
    return storage in BLOCKS


def fp8_kind(weight_block: int) -> QuantizedKind:
    """Returns the kind of the matrices that a release stores in FP8, see `DSV4Config.weight_block`."""
    return "FP8" if weight_block == WEIGHT_BLOCK else "FP8_32"


def quantized_shapes(kind: QuantizedKind, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (shape of the codes, shape of the scales) that store values of the shape [..., out, in]."""
    *leading, rows, columns = shape
    block_rows, block_columns = BLOCKS[kind]
    codes = (*leading, rows, columns // 2) if kind == "FP4" else shape
    return codes, (*leading, math.ceil(rows / block_rows), math.ceil(columns / block_columns))


def quantized_struct(kind: QuantizedKind, values: jax.ShapeDtypeStruct) -> QuantizedWeight:
    """Returns a QuantizedWeight that holds structs instead of arrays, for `values`, a struct [..., out, in]."""
    codes, scale = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in quantized_shapes(kind, values.shape))
    return QuantizedWeight(codes, scale, kind, values.dtype)
