"""The release's quantized storage: a tensor of codes, `NAME.weight`, and one of power-of-two scales, `NAME.scale`.

- FP8: codes F8_E4M3 [out, in], and scales F8_E8M0 [ceil(out / 128), ceil(in / 128)], one per block of 128 x 128. In
  V4.1 blocks are 32 x 32, and in the tables of Engram 1 x 32.
- FP4: codes I8 [out, in / 2], and scales F8_E8M0 [out, in / 32], one per 32 inputs. A byte holds the e2m1 codes of two
  inputs, the even one in the low nibble.

A scale of byte e is 2 ** (e - 127); byte 255 is NaN. The dtype of the codes in the file, not config.json, says whether
a weight is FP8 or FP4. The shape of the scales must fit the configuration's blocks, or blocks of 1 x 32.
"""

import dataclasses

import ml_dtypes
import numpy as np

from dsv4_jax.checkpoint.reader import StoredTensor
from dsv4_jax.quant import BLOCKS, QuantizedKind, quantized_shapes
from dsv4_jax.quant.fp4 import MXFP4_BLOCK


# `CODES` maps each kind to the dtype of its codes.
CODES = {kind: "I8" if kind == "FP4" else "F8_E4M3" for kind in BLOCKS}
_CHUNK = 1 << 10  # number of rows that are scaled at a time, a multiple of a block's rows
# Kernels compute exactly with scales whose bytes are in this range, both ends included. They multiply each value by
# 2**-32. The product is then zero or a normal bfloat16, because the largest value is 448 * 2**33, and the smallest
# positive value is 2**-9 * 2**-85.
STORED_SCALES = 42, 160
# `E2M1[code]` is the value of an e2m1 code.
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A quantized weight: its codes, its scales, and the kind of storage.

    This class has the properties of a `StoredTensor` that loading needs.
    """

    codes: StoredTensor
    scale: StoredTensor
    dtype: QuantizedKind

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, [out, in]."""
        rows, columns = self.codes.shape
        return (rows, 2 * columns) if self.dtype == "FP4" else (rows, columns)

    @property
    def can_stay(self) -> bool:
        """Whether all scales are in the range `STORED_SCALES`, in which kernels compute exactly."""
        low, high = STORED_SCALES
        return not self.scale.data.size or bool(low <= self.scale.data.min() <= self.scale.data.max() <= high)

    def count_nan(self, codes: np.ndarray) -> int:
        """Returns the number of NaN among some codes of this tensor, uint8."""
        # FP4 has no NaN. The test of the maximum is ten times as fast as counting.
        if self.dtype == "FP4" or not codes.size or np.max(codes & 0x7F) < 0x7F:
            return 0
        return int(np.count_nonzero(codes & 0x7F == 0x7F))

    def load(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the exact values of rows `start` to `stop - 1`, [rows, in] float32; infinite if float32 overflows.

        `start` must be a multiple of the number of rows in a block. None for `stop`, or a `stop` beyond the last row,
        means all rows from `start` on.
        """
        codes = self.codes.data.reshape(self.codes.shape)[start:stop]
        scale = self.scale.data.reshape(self.scale.shape)
        return dequantize(codes, scale[start // BLOCKS[self.dtype][0] :], self.dtype)


@np.errstate(over="ignore")  # the caller looks for infinite values
def dequantize(codes: np.ndarray, scale: np.ndarray, kind: QuantizedKind) -> np.ndarray:
    """Returns the exact values [out, in] float32 of a quantized matrix; infinite if they exceed float32's range.

    Args:
      codes, scale: uint8, as in a `QuantizedWeight`. `scale` may have more rows than the codes need.
      kind: the storage.
    """
    rows, width = codes.shape
    scale = scale.view(ml_dtypes.float8_e8m0fnu)
    if kind == "FP4":
        values = np.empty((rows, 2 * width), np.float32)
        values[:, 0::2] = E2M1[codes & 15]
        values[:, 1::2] = E2M1[codes >> 4]
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    block_rows, block_columns = BLOCKS[kind]
    for i in range(0, rows, _CHUNK):  # to avoid an array of scales as large as the weight
        chunk = values[i : i + _CHUNK]
        # The conversion is exact for each byte, also for 0 (a subnormal) and 255 (NaN).
        factors = scale[i // block_rows : -(-(i + len(chunk)) // block_rows)].astype(np.float32)
        factors = np.repeat(factors, block_columns, axis=1)[:, : values.shape[1]]
        chunk *= np.repeat(factors, block_rows, axis=0)[: len(chunk)]
    return values


def scale_name(name: str) -> str:
    """Returns the name of the scales of the weight `name`: "a.scale" for "a.weight"."""
    return f"{name.removesuffix('.weight')}.scale"


def join_scales(
    stored: dict[str, StoredTensor], fp8: QuantizedKind = "FP8"
) -> tuple[dict[str, StoredTensor | QuantizedTensor], dict[str, str]]:
    """Pairs the quantized weights of a checkpoint with their scales.

    Args:
      stored: the checkpoint's tensors by name.
      fp8: kind of the matrices in FP8, see `quant.fp8_kind`.

    Returns:
      (tensors by name, in which a `QuantizedTensor` replaces codes and scales; {name: problem} of each quantized weight
      that is left out because its codes or its scale do not fit).
    """
    tensors: dict[str, StoredTensor | QuantizedTensor] = dict(stored)
    problems = {}
    for name, tensor in stored.items():
        # Skips tensors that are not quantized, and scales, which are handled with their codes.
        if not tensor.quantized or (name.endswith(".scale") and name.removesuffix("scale") + "weight" in stored):
            continue
        scale = stored.get(scale_name(name))
        kinds: tuple[QuantizedKind, ...] = ("FP4",) if tensor.dtype == "I8" else (fp8, "FP8_ROWS")
        problem_of_kind = {kind: _wrong_scale(tensor, scale, kind) for kind in kinds}
        fitting = [kind for kind, problem in problem_of_kind.items() if not problem]
        if fitting:
            assert scale is not None
            tensors[name] = QuantizedTensor(tensor, scale, fitting[0])
        else:
            problems[name] = problem_of_kind[kinds[0]]
            del tensors[name]
        tensors.pop(scale_name(name), None)
    return tensors, problems


def _wrong_scale(codes, scale, kind):
    """Returns a sentence that says why codes and scale do not form a weight of this kind; an empty text if they do."""
    stored = f"{codes.name} is stored as {codes.dtype} {list(codes.shape)}"
    if codes.dtype != CODES[kind] or len(codes.shape) != 2:
        return f"{stored}, which no weight is"
    rows, columns = codes.shape
    if kind == "FP4":
        columns *= 2
        if columns % MXFP4_BLOCK:
            return f"{stored}; FP4 needs whole groups of {MXFP4_BLOCK} inputs, this has {columns}"
    _, shape = quantized_shapes(kind, (rows, columns))
    needed = f"F8_E8M0 {list(shape)}"
    if scale is None:
        return f"{stored}; it needs {scale_name(codes.name)}, {needed}, which is missing"
    if scale.dtype != "F8_E8M0" or scale.shape != shape:
        return f"{stored}; {scale.name} must be {needed}, and is {scale.dtype} {list(scale.shape)}"
    return ""
