"""Weights that stay quantized in memory, in the storage format of DeepSeek's releases."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.quant.fp4 import MXFP4_BLOCK, decode_mxfp4
from dsv4_jax.quant.fp8 import decode_e4m3
from dsv4_jax.quant.numerics import e8m0_value, round_to
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


WEIGHT_BLOCK = 128
type QuantizedKind = Literal["FP8", "FP4"]


@pytree_dataclass
class QuantizedWeight:
    """Quantized matrices, which a parameter may hold in the place of an array: `nnx.Param(QuantizedWeight(...))`.

    Kernels read the codes and scales. Other code reads `parameter[...]`, or `parameter[i]` for matrices of a stack.
    Both dequantize exactly, within the program that reads them.

    Attributes:
      codes: uint8 codes. "FP8": [..., out, in] E4M3 bits. "FP4": [..., out, in / 2] pairs of E2M1 codes, with the even
        input channel in the low nibble.
      scale: uint8 E8M0 bits. "FP8": [..., ceil(out / 128), ceil(in / 128)], a scale for each block of 128 x 128 values.
        "FP4": [..., out, in / 32], a scale for 32 values of a row. Bits are 42 to 160, so that kernels represent all
        values exactly.
      kind: "FP8" or "FP4" (static).
      dtype: dtype of the dequantized values (static): float32 or bfloat16, either of which represents them exactly.
    """

    codes: Any
    scale: Any
    kind: QuantizedKind = static_field()
    dtype: DTypeLike = static_field()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., out, in] of the dequantized values."""
        *leading, columns = self.codes.shape
        return (*leading, 2 * columns if self.kind == "FP4" else columns)

    def __getitem__(self, index: Any) -> Float[Array, "..."]:
        """Dequantizes all matrices for the index `...`, or the matrices at an index of the leading axes."""
        codes, scale = (self.codes, self.scale) if index is ... else (self.codes[index], self.scale[index])
        if self.kind == "FP4":
            return round_to(decode_mxfp4(codes, scale), self.dtype)
        rows, columns = codes.shape[-2:]
        scale = jnp.repeat(jnp.repeat(e8m0_value(scale), WEIGHT_BLOCK, axis=-2), WEIGHT_BLOCK, axis=-1)
        return round_to(decode_e4m3(codes) * scale[..., :rows, :columns], self.dtype)


def quantized_shapes(kind: QuantizedKind, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (shape of the codes, shape of the scales) that store values of the shape [..., out, in]."""
    *leading, rows, columns = shape
    if kind == "FP8":
        return shape, (*leading, math.ceil(rows / WEIGHT_BLOCK), math.ceil(columns / WEIGHT_BLOCK))
    return (*leading, rows, columns // 2), (*leading, rows, columns // MXFP4_BLOCK)


def quantized_struct(kind: QuantizedKind, values: jax.ShapeDtypeStruct) -> QuantizedWeight:
    """Returns a QuantizedWeight of structs, without arrays, that stores values [..., out, in] of the given struct."""
    codes, scale = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in quantized_shapes(kind, values.shape))
    return QuantizedWeight(codes, scale, kind, values.dtype)
