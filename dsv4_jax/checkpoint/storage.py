"""The release's quantized storage: weights with power-of-two scales beside them, `NAME.weight` and `NAME.scale`.

- FP8: F8_E4M3 [out, in] with F8_E8M0 [ceil(out / 128), ceil(in / 128)], one scale per 128 x 128 block;
- FP4: I8 [out, in / 2], two e2m1 codes per byte, the even input's in the low nibble, with F8_E8M0 [out, in / 32].

An e8m0 byte e is 2 ** (e - 127); 255 is NaN. Each tensor's stored dtype decides, not the configuration.
"""

import dataclasses
from typing import Literal

import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.reader import StoredTensor
from dsv4_jax.quant import WEIGHT_BLOCK


FP4_GROUP = 32
# Kernels compute with values times 2 ** -32. For these e8m0 bytes every product is zero or a normal bfloat16: the
# extremes are 448 * 2 ** 33 and 2 ** -9 * 2 ** -85.
STORED_SCALES = 42, 160
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight in quantized storage, with the attributes of a `StoredTensor` that loading needs."""

    codes: StoredTensor
    scale: StoredTensor

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    @property
    def dtype(self) -> Literal["FP8", "FP4"]:
        """The kind of storage."""
        return "FP4" if self.codes.dtype == "I8" else "FP8"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, [out, in]."""
        rows, columns = self.codes.shape
        return (rows, 2 * columns) if self.dtype == "FP4" else (rows, columns)

    @property
    def can_stay(self) -> bool:
        """Whether kernels compute with every value exactly: no NaN, no scale out of range."""
        low, high = STORED_SCALES
        if self.scale.data.size and not low <= self.scale.data.min() <= self.scale.data.max() <= high:
            return False
        return self.dtype == "FP4" or not np.any(self.codes.data & 0x7F == 0x7F)

    @np.errstate(over="ignore")  # the caller looks for infinite values
    def load(self) -> np.ndarray:
        """Returns the exact values, [out, in] float32; infinite if they exceed float32's range."""
        rows, columns = self.shape
        # 2 ** (e - 127) as float32 bits, e = 0 and NaN (255) included.
        scale = self.scale.data.view(ml_dtypes.float8_e8m0fnu).reshape(self.scale.shape).astype(np.float32)
        if self.dtype == "FP4":
            codes = self.codes.data.reshape(rows, -1)
            values = np.empty((rows, columns), np.float32)
            values[:, 0::2] = E2M1[codes & 15]
            values[:, 1::2] = E2M1[codes >> 4]
            values.reshape(rows, -1, FP4_GROUP)[...] *= scale[:, :, None]
            return values
        values = self.codes.data.view(ml_dtypes.float8_e4m3fn).reshape(rows, columns).astype(np.float32)
        for i, of_row in enumerate(scale):  # one block row at a time: avoids an array of scales as large as the weight
            block = values[i * WEIGHT_BLOCK : (i + 1) * WEIGHT_BLOCK]
            block *= np.repeat(of_row, WEIGHT_BLOCK)[None, :columns]
        return values


def join_scales(stored: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor | QuantizedTensor], dict[str, str]]:
    """Joins a checkpoint's quantized weights with their scales.

    Returns:
      (tensors by name, in which a quantized weight includes its scale; {name: problem} of the weights that are left out
      because their scale does not fit).
    """
    tensors: dict[str, StoredTensor | QuantizedTensor] = dict(stored)
    problems = {}
    for name, tensor in stored.items():
        scale_name = name.removesuffix(".weight") + ".scale"
        if not tensor.quantized or (name.endswith(".scale") and name.removesuffix("scale") + "weight" in stored):
            continue
        scale = stored.get(scale_name)
        if problem := _wrong_scale(tensor, scale, scale_name):
            problems[name] = problem
            del tensors[name]
        else:
            assert scale is not None
            tensors[name] = QuantizedTensor(tensor, scale)
        tensors.pop(scale_name, None)
    return tensors, problems


def _wrong_scale(codes: StoredTensor, scale: StoredTensor | None, scale_name: str) -> str:
    """Describes the problem of a quantized weight's scale; empty if it fits."""
    stored = f"{codes.name} is stored as {codes.dtype} {list(codes.shape)}"
    if codes.dtype not in ("F8_E4M3", "I8") or len(codes.shape) != 2:
        return f"{stored}, which no weight is"
    rows, columns = codes.shape
    if codes.dtype == "I8":
        columns *= 2
        needed = [rows, columns // FP4_GROUP]
        if columns % FP4_GROUP:
            return f"{stored}; FP4 needs whole groups of {FP4_GROUP} inputs, this has {columns}"
    else:
        needed = [-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK)]
    if scale is None:
        return f"{stored}; it needs {scale_name}, F8_E8M0 {needed}, which is missing"
    if scale.dtype != "F8_E8M0" or list(scale.shape) != needed:
        return f"{stored}; {scale_name} must be F8_E8M0 {needed}, and is {scale.dtype} {list(scale.shape)}"
    return ""
