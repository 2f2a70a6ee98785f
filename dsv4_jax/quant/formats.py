"""Formats of the KV cache. A format chooses the codecs of window rows, compressed entries and indexer keys.

"v4"         DeepSeek-V4's format: rows in E4M3 with a power-of-two scale per 64 dims; keys in MXFP4, rotated by a
             Hadamard matrix.
"v41"        DeepSeek-V4.1's format, which quantizes all dims: window rows in E4M3 with a power-of-two scale per 32 dims
             (MXFP8); entries in E2M1 with an E4M3 scale per 16 dims; keys in MXFP4, not rotated.
"per_entry"  rows in E4M3 with one float32 inverse scale per row; keys in NVFP4.
"plain"      unquantized rows and keys in the model's dtype, to compare with reference implementations.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from dsv4_jax.common.arguments import check_choice, check_positive
from dsv4_jax.quant import codecs
from dsv4_jax.quant.codecs import KeyCodec, RowCodec
from dsv4_jax.quant.fp8 import FP8_BLOCK, MXFP8_BLOCK


@dataclasses.dataclass(frozen=True)
class KVFormat(abc.ABC):
    """The interface of formats, whose methods return codecs for the widths of a model. Formats are hashable."""

    name: ClassVar[str]

    @abc.abstractmethod
    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        """Returns the codec of compressed entries; raises ValueError if the format cannot hold rows of these widths."""

    def window(self, nope_dim: int, rope_dim: int) -> RowCodec:
        """Returns the codec of sliding-window rows, by default that of the entries."""
        return self.entries(nope_dim, rope_dim)

    @abc.abstractmethod
    def keys(self, index_dim: int) -> KeyCodec:
        """Returns the codec of indexer keys; raises ValueError if the format cannot hold keys of this width."""


class V4Format(KVFormat):
    """DeepSeek-V4's own format: rows in E4M3 with a scale per 64 dims, and keys in MXFP4."""

    name = "v4"

    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FP8Rows(nope_dim, rope_dim, FP8_BLOCK)

    def keys(self, index_dim: int) -> KeyCodec:
        return codecs.FP4Keys(index_dim, hadamard=True, global_scale=None)


class V41Format(KVFormat):
    """DeepSeek-V4.1's own format: window rows in MXFP8, entries in FP4 and keys in MXFP4, with no dims in bfloat16."""

    name = "v41"

    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FP4Rows(nope_dim + rope_dim, 0)

    def window(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FP8Rows(nope_dim + rope_dim, 0, MXFP8_BLOCK)

    def keys(self, index_dim: int) -> KeyCodec:
        return codecs.FP4Keys(index_dim, hadamard=False, global_scale=None)


@dataclasses.dataclass(frozen=True)
class PerEntryFormat(KVFormat):
    """The format "per_entry": rows in E4M3 with one scale each, and keys in NVFP4.

    Attributes:
      index_global_scale: NVFP4's second-level scale, which all indexer keys and queries share.

    Raises:
      TypeError: `index_global_scale` is not a number.
      ValueError: `index_global_scale` is not positive and finite.
    """

    name = "per_entry"
    index_global_scale: float = 1.0

    def __post_init__(self):
        check_positive("index_global_scale", self.index_global_scale)

    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FP8Rows(nope_dim, rope_dim, None)

    def keys(self, index_dim: int) -> KeyCodec:
        return codecs.FP4Keys(index_dim, hadamard=False, global_scale=self.index_global_scale)


@dataclasses.dataclass(frozen=True)
class PlainFormat(KVFormat):
    """Unquantized rows and keys: `PlainRows` and `PlainKeys`.

    Attributes:
      dtype: dtype of the stored values, float32 or bfloat16.

    Raises:
      ValueError: `dtype` is neither float32 nor bfloat16.
    """

    name = "plain"
    dtype: Any = jnp.bfloat16

    def __post_init__(self):
        dtype = np.dtype(self.dtype)
        check_choice("dtype", dtype.name, "float32", "bfloat16", reason=' in the format "plain"')
        object.__setattr__(self, "dtype", dtype)  # as np.dtype, so that equal formats have equal hashes

    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.PlainRows(nope_dim, rope_dim, self.dtype)

    def keys(self, index_dim: int) -> KeyCodec:
        return codecs.PlainKeys(index_dim, self.dtype)


@dataclasses.dataclass(frozen=True)
class FakeQuantFormat(KVFormat):
    """A format for training, which stores the values of a quantized format as float32 and lets gradients pass through.

    Attributes:
      format: the format that quantizes the values.
    """

    name = "fake_quant"
    format: KVFormat = V4Format()

    def entries(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FakeQuantRows(nope_dim, rope_dim, jnp.float32, self.format.entries(nope_dim, rope_dim))

    def window(self, nope_dim: int, rope_dim: int) -> RowCodec:
        return codecs.FakeQuantRows(nope_dim, rope_dim, jnp.float32, self.format.window(nope_dim, rope_dim))

    def keys(self, index_dim: int) -> KeyCodec:
        return codecs.FakeQuantKeys(index_dim, jnp.float32, self.format.keys(index_dim))


FORMATS = {cls.name: cls for cls in (V4Format, V41Format, PerEntryFormat, PlainFormat)}


def kv_format(name: str | KVFormat, dtype: Any = None) -> KVFormat:
    """Returns the format with the given name.

    Args:
      name: "v4", "v41", "per_entry" or "plain". A KVFormat is returned as it is.
      dtype: dtype that "plain" stores, float32 or bfloat16; None = bfloat16. Other formats ignore it.

    Raises ValueError if there is no format of this name, or if "plain" cannot store the dtype.
    """
    if isinstance(name, KVFormat):
        return name
    check_choice("kv_format", name, *FORMATS, reason=", or a KVFormat")
    if name == PlainFormat.name and dtype is not None:
        return PlainFormat(dtype)
    return FORMATS[name]()
