"""Codecs: they encode window rows, compressed entries and indexer keys as bytes, and decode them.

A codec knows its widths: pools are made of its structs, views carry it, and kernels take its `layout`. Codes and scales
are stored as uint8 bits, because XLA on CPU upcasts a whole pool of fp8 around a scatter. RoPE dims are never quantized
below bfloat16 (dsv4.md 7.3).
"""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.quant.fp4 import MXFP4_BLOCK, NVFP4_GROUP, decode_mxfp4, decode_nvfp4, encode_mxfp4, encode_nvfp4
from dsv4_jax.quant.fp8 import decode_fp8_block, decode_fp8_entry, encode_fp8_block, encode_fp8_entry
from dsv4_jax.quant.numerics import hadamard, round_to, straight_through
from pallas_kernels.formats.layouts import KeyLayout, RowLayout
from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class Rows:
    """Stored KV rows, one for each leading index, in the cache format "v4", "per_entry" or "plain" (unquantized).

    `pallas_kernels.formats.layouts.RowLayout` describes the quantized rows.

    Attributes:
      nope: [..., N] dims without RoPE. E4M3 bits in uint8; unquantized values in the format "plain".
      rope: [..., R] RoPE dims in bfloat16; in the format's dtype in "plain".
      scale: [..., S] scales. "v4": E8M0 bits in uint8, one for 64 dims, zero-padded to a multiple of 8.
        "per_entry": one float32 inverse scale. "plain": None.
    """

    nope: Any
    rope: Any
    scale: Any


@pytree_dataclass
class IndexRows:
    """Stored indexer keys, one per leading index.

    Attributes:
      codes: [..., Di // 2] packed E2M1 (uint8, low nibble = even index), or [..., Di] values in "plain".
      scale: [..., G] "v4": E8M0 bits per 32 dims; "per_entry": E4M3 bits per 16 dims; "plain": None.
    """

    codes: Any
    scale: Any


def _structs(layout):
    return [jax.ShapeDtypeStruct((width,), dtype) for _, dtype, width in layout.columns]


# --- rows ---


@dataclasses.dataclass(frozen=True)
class RowCodec(abc.ABC):
    """Encodes KV rows of one width. Hashable, so that it can be a static argument of jitted functions.

    Every method takes any leading shape and gives a row the same bits in all of them.

    Attributes:
      nope_dim: head_dim - qk_rope_head_dim.
      rope_dim: qk_rope_head_dim; the last dims of a row.
    """

    nope_dim: int
    rope_dim: int

    @property
    def layout(self) -> RowLayout | None:
        """The layout of a row for kernels; None if they do not take it."""
        return None

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self.nope_dim + self.rope_dim

    @property
    def struct(self) -> Rows:
        """The shapes and dtypes of one row, as Rows of jax.ShapeDtypeStruct; by default those of the layout."""
        return Rows(*_structs(self.layout))

    @abc.abstractmethod
    def encode(self, kv: Float[Array, "*rows D"]) -> Rows:
        """Quantizes rows [..., D] (float32 or bfloat16, finite, after norm and RoPE)."""

    @abc.abstractmethod
    def decode(self, rows: Rows, dtype: Any) -> Float[Array, "*rows D"]:
        """Dequantizes rows to [..., D] of `dtype`; each value is an exact float32 product, rounded once."""

    def fake_quantize(self, kv: Float[Array, "*rows D"], dtype: Any) -> Float[Array, "*rows D"]:
        """Encodes and decodes rows, as storing and reading them would, with the gradient of unquantized rows."""
        return straight_through(self.decode(self.encode(kv), dtype), kv)

    def _split(self, kv):
        kv = kv.astype(jnp.float32)
        return kv[..., : self.nope_dim], kv[..., self.nope_dim :]

    def _join(self, nope, rope, dtype):
        return jnp.concatenate([round_to(nope, dtype), round_to(rope.astype(jnp.float32), dtype)], axis=-1)


@dataclasses.dataclass(frozen=True)
class FP8Rows(RowCodec):
    """The codec of E4M3 rows: 584 bytes for DeepSeek-V4's 448 + 64 dims, 580 for the seeds' one scale per row.

    Raises ValueError if `nope_dim` is 0, or not a multiple of the block.

    Attributes:
      scale_block: number of dims that share an E8M0 scale, 64 in "v4"; None = one float32 inverse scale for the row.
    """

    scale_block: int | None

    def __post_init__(self):
        name = "v4" if self.scale_block else "per_entry"
        _check_multiple(name, "head_dim - qk_rope_head_dim", self.nope_dim, self.scale_block or 1)

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.nope_dim, self.rope_dim, self.scale_block)

    def encode(self, kv: Float[Array, "*rows D"]) -> Rows:
        nope, rope = self._split(kv)
        if self.scale_block is None:
            codes, scale = encode_fp8_entry(nope)
        else:
            codes, scale = encode_fp8_block(nope, self.scale_block)
            # Padded to a multiple of 8 as in FlashMLA's rows of 584 bytes (dsv4.md 6.3).
            padding = [(0, 0)] * (scale.ndim - 1) + [(0, self.layout.scale_width - scale.shape[-1])]
            scale = jnp.pad(scale, padding)
        return Rows(codes, round_to(rope, jnp.bfloat16), scale)

    def decode(self, rows: Rows, dtype: Any) -> Float[Array, "*rows D"]:
        if self.scale_block is None:
            nope = decode_fp8_entry(rows.nope, rows.scale)
        else:
            nope = decode_fp8_block(rows.nope, rows.scale[..., : self.nope_dim // self.scale_block])
        return self._join(nope, rows.rope, dtype)


@dataclasses.dataclass(frozen=True)
class PlainRows(RowCodec):
    """The codec of unquantized rows.

    Attributes:
      dtype: dtype that values are rounded to, float32 or bfloat16.
    """

    dtype: Any

    @property
    def struct(self) -> Rows:
        nope, rope = (jax.ShapeDtypeStruct((width,), self.dtype) for width in (self.nope_dim, self.rope_dim))
        return Rows(nope, rope, None)

    def encode(self, kv: Float[Array, "*rows D"]) -> Rows:
        nope, rope = self._split(kv)
        return Rows(round_to(nope, self.dtype), round_to(rope, self.dtype), None)

    def decode(self, rows: Rows, dtype: Any) -> Float[Array, "*rows D"]:
        return self._join(rows.nope.astype(jnp.float32), rows.rope, dtype)


# --- indexer keys ---


@dataclasses.dataclass(frozen=True)
class KeyCodec(abc.ABC):
    """Encodes indexer keys of one width, and rounds queries as it rounds keys. Hashable, like `RowCodec`.

    Attributes:
      dim: index_head_dim.
    """

    dim: int

    @property
    def layout(self) -> KeyLayout | None:
        """The layout of a key for kernels; None if they do not take it."""
        return None

    @property
    def struct(self) -> IndexRows:
        """The shapes and dtypes of one key, as IndexRows of jax.ShapeDtypeStruct; by default those of the layout."""
        return IndexRows(*_structs(self.layout))

    @abc.abstractmethod
    def encode(self, keys: Float[Array, "*rows Di"]) -> IndexRows:
        """Quantizes keys [..., Di] (float32 or bfloat16, finite, after RoPE)."""

    @abc.abstractmethod
    def decode(self, rows: IndexRows) -> Float[Array, "*rows Di"]:
        """Dequantizes keys to [..., Di] float32, in the rotated basis if the codec rotates."""

    def round_query(self, q: Float[Array, "*rows Di"]) -> Float[Array, "*rows Di"]:
        """Rotates and rounds queries [..., Di] as keys are, and returns them in q's dtype (dsv4.md 4).

        The gradient is that of the rotation.
        """
        return straight_through(round_to(self.decode(self.encode(q)), q.dtype), self._rotate(q.astype(jnp.float32)))

    def fake_quantize(self, keys: Float[Array, "*rows Di"]) -> Float[Array, "*rows Di"]:
        """Encodes and decodes keys, to float32; the gradient is that of the rotation."""
        return straight_through(self.decode(self.encode(keys)), self._rotate(keys.astype(jnp.float32)))

    def _rotate(self, keys):
        """Changes the basis to that of `decode`."""
        return keys


@dataclasses.dataclass(frozen=True)
class FP4Keys(KeyCodec):
    """The codec of E2M1 keys: DeepSeek-V4's MXFP4 (68 bytes for 128 dims) or the seeds' NVFP4 (72 bytes).

    MXFP4 keys have an E8M0 scale per 32 dims, and are rotated by a Hadamard matrix first; `dim` is a power of two then.
    NVFP4 keys have an E4M3 scale per 16 dims. Raises ValueError if `dim` does not fit.

    Attributes:
      global_scale: second-level scale of all NVFP4 keys and queries; None = MXFP4.
    """

    global_scale: float | None

    def __post_init__(self):
        is_mxfp4 = self.global_scale is None
        _check_multiple("v4" if is_mxfp4 else "per_entry", "index_head_dim", self.dim, self.layout.scale_block)
        if is_mxfp4 and self.dim & (self.dim - 1):
            raise ValueError(f'format "v4" needs index_head_dim to be a power of two (Hadamard), got {self.dim}')

    @property
    def layout(self) -> KeyLayout:
        if self.global_scale is None:
            return KeyLayout(self.dim, MXFP4_BLOCK, "e8m0", hadamard=True)
        return KeyLayout(self.dim, NVFP4_GROUP, "e4m3", hadamard=False, global_scale=self.global_scale)

    def encode(self, keys: Float[Array, "*rows Di"]) -> IndexRows:
        keys = self._rotate(keys.astype(jnp.float32))
        if self.global_scale is None:
            return IndexRows(*encode_mxfp4(round_to(keys, jnp.bfloat16).astype(jnp.float32)))
        return IndexRows(*encode_nvfp4(keys, self.global_scale))

    def decode(self, rows: IndexRows) -> Float[Array, "*rows Di"]:
        if self.global_scale is None:
            return decode_mxfp4(rows.codes, rows.scale)
        return decode_nvfp4(rows.codes, rows.scale, self.global_scale)

    def _rotate(self, keys):
        return hadamard(keys) if self.global_scale is None else keys


@dataclasses.dataclass(frozen=True)
class PlainKeys(KeyCodec):
    """The codec of unquantized keys.

    Attributes:
      dtype: dtype that values are rounded to, float32 or bfloat16.
    """

    dtype: Any

    @property
    def struct(self) -> IndexRows:
        return IndexRows(jax.ShapeDtypeStruct((self.dim,), self.dtype), None)

    def encode(self, keys: Float[Array, "*rows Di"]) -> IndexRows:
        return IndexRows(round_to(keys.astype(jnp.float32), self.dtype), None)

    def decode(self, rows: IndexRows) -> Float[Array, "*rows Di"]:
        return rows.codes.astype(jnp.float32)


# --- training ---


@dataclasses.dataclass(frozen=True)
class FakeQuantRows(PlainRows):
    """Rows with the values of another codec, stored as numbers through which gradients pass.

    Attributes:
      codec: the codec whose values they are.
    """

    codec: RowCodec

    def encode(self, kv: Float[Array, "*rows D"]) -> Rows:
        return super().encode(self.codec.fake_quantize(kv, jnp.float32))


@dataclasses.dataclass(frozen=True)
class FakeQuantKeys(PlainKeys):
    """Keys with the values of another codec, stored as numbers through which gradients pass.

    Attributes:
      codec: the codec whose values they are.
    """

    codec: KeyCodec

    def encode(self, keys: Float[Array, "*rows Di"]) -> IndexRows:
        return super().encode(self.codec.fake_quantize(keys))

    def round_query(self, q: Float[Array, "*rows Di"]) -> Float[Array, "*rows Di"]:
        return self.codec.round_query(q)


def _check_multiple(format_name: str, dim_name: str, dim: int, block: int) -> None:
    if dim <= 0 or dim % block:
        raise ValueError(f'format "{format_name}" needs {dim_name} to be a positive multiple of {block}, got {dim}')
