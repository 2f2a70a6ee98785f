"""Weights that stay quantised in memory, as the release stores them."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.quant.fp4 import decode_mxfp4
from dsv4_jax.quant.fp8 import decode_e4m3
from dsv4_jax.quant.numerics import e8m0_value, round_to


WEIGHT_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """Matrices in the release's storage, which a parameter may hold in place of an array.

    `nnx.Param(QuantizedWeight(...))` is all it takes. Kernels read the codes. Whatever else reads `parameter[...]`, or
    `parameter[i]` for some matrices of a stack, dequantises what it asks for, exactly, within the program that uses it.

    Attributes:
      codes: uint8; "FP8": [..., out, in] E4M3 bits; "FP4": [..., out, in / 2] two E2M1 codes, the even input's low.
      scale: uint8, E8M0 bits; "FP8": [..., ceil(out / 128), ceil(in / 128)], one for each block of 128 x 128; "FP4":
        [..., out, in / 32], one for each 32 inputs. From 42 to 160: outside, kernels would not hold values exactly.
      kind: "FP8" or "FP4" (static).
      dtype: of the values: float32 or bfloat16, which both hold them exactly (static).
    """

    codes: Any
    scale: Any
    kind: Literal["FP8", "FP4"] = dataclasses.field(metadata=dict(static=True))
    dtype: DTypeLike = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: [..., out, in]."""
        *leading, columns = self.codes.shape
        return (*leading, 2 * columns if self.kind == "FP4" else columns)

    def __getitem__(self, index: Any) -> Float[Array, "..."]:
        """The values of all matrices (`...`), or of some, by an index of the leading axes."""
        codes, scale = (self.codes, self.scale) if index is ... else (self.codes[index], self.scale[index])
        if self.kind == "FP4":
            return round_to(decode_mxfp4(codes, scale), self.dtype)
        rows, columns = codes.shape[-2:]
        scale = jnp.repeat(jnp.repeat(e8m0_value(scale), WEIGHT_BLOCK, axis=-2), WEIGHT_BLOCK, axis=-1)
        return round_to(decode_e4m3(codes) * scale[..., :rows, :columns], self.dtype)
