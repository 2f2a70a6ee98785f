"""Codecs: objects that encode window rows, compressed entries and indexer keys for the KV cache, and decode them.

A codec knows the widths of its rows. The cache's pools are allocated by the codec's `struct`, which follows from
`encode`, and kernels take its `layout`.

FP8 and FP4 codes and 8-bit scales are stored as uint8 bits, because XLA on CPU would upcast a whole pool of FP8 around
a scatter. Except in the format "v41", the dims of a row that RoPE rotates are not quantized below bfloat16
(docs/dsv4.md 7.3).
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.quant.fp4 import (
    MXFP4_BLOCK,
    NVFP4_GROUP,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp4_entry,
    encode_mxfp4,
    encode_nvfp4,
)
from dsv4_jax.quant.fp8 import MXFP8_BLOCK, decode_fp8_block, decode_fp8_entry, encode_fp8_block, encode_fp8_entry
from dsv4_jax.quant.numerics import hadamard, round_to, straight_through
from pallas_kernels.formats.layouts import KeyLayout, RowLayout
from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class Rows:
    """Stored KV rows, one for each leading index, in one of the formats of `quant.formats`.

    format               nope               rope           scale
    "v4"                 E4M3 bits, uint8   bfloat16       E8M0 bits, uint8, one for 64 dims
    "v41", window rows   E4M3 bits, uint8   None           E8M0 bits, uint8, one for 32 dims
    "v41", entries       E2M1 pairs, uint8  None           E4M3 bits, uint8, one for 16 dims
    "per_entry"          E4M3 bits, uint8   bfloat16       float32, one inverse scale
    "plain"              model's dtype      model's dtype  None

    E8M0 scales are zero-padded to a multiple of 8. The layout of FP8 rows is described at
    `pallas_kernels.formats.layouts.RowLayout`.

    Attributes:
      nope: [..., N] the dims without RoPE; in "v41" all dims.
      rope: [..., R] the dims with RoPE.
      scale: [..., S] the scales of `nope`.
    """

    nope: Any
    rope: Any
    scale: Any


@pytree_dataclass
class IndexRows:
    """Stored indexer keys, one for each leading index, in one of the formats of `quant.formats`.

    Attributes:
      codes: [..., Di // 2] uint8, two E2M1 codes in a byte, that of the even dim in the low nibble. "plain": [..., Di]
        values.
      scale: [..., G] uint8 scales. "v4" and "v41": E8M0 bits, one for 32 dims. "per_entry": E4M3 bits, one for 16 dims.
        "plain": None.
    """

    codes: Any
    scale: Any


class Codec(abc.ABC):
    """The interface of codecs of KV rows or indexer keys. Codecs are hashable, for use as static arguments of `jit`.

    Methods take rows with any leading shape. The bits of a row do not depend on this shape. A codec has an attribute
    `dim`, the number of values in a row.
    """

    @property
    def layout(self) -> Any:
        """The byte layout of a row for kernels; None if kernels do not take these rows."""
        return None

    @property
    def struct(self) -> Any:
        """The shapes and dtypes of one stored row, as `Rows` or `IndexRows` of `jax.ShapeDtypeStruct`."""
        return _struct(self)

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*rows D"]) -> Any:
        """Encodes rows [..., D], finite float32 or bfloat16 values after norm and RoPE."""
        raise NotImplementedError

    @abc.abstractmethod
    def decode(self, rows: Any, dtype: Any = jnp.float32) -> Float[Array, "*rows D"]:
        """Decodes rows to [..., D] of `dtype`. Values are float32 products of code and scale, rounded once.

        If `encode` rotates keys (by a Hadamard matrix), they remain rotated.
        """

    def fake_quantize(self, x: Float[Array, "*rows D"], dtype: Any = jnp.float32) -> Float[Array, "*rows D"]:
        """Returns the values of rows after encoding and decoding, in `dtype`. The gradient ignores the rounding."""
        return straight_through(self.decode(self.encode(x), dtype), self._rotate(x.astype(jnp.float32)))

    def _rotate(self, x):
        """Rotates keys as `encode` does before it quantizes; by default not at all."""
        return x


@functools.cache
def _struct(codec):
    rows = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((codec.dim,), jnp.float32))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)  # without a sharding on a mesh


# --- rows ---


@dataclasses.dataclass(frozen=True)
class RowCodec(Codec):
    """The interface of codecs of KV rows with given widths.

    Attributes:
      nope_dim: number of dims in `Rows.nope`, the first dims of a row: head_dim - qk_rope_head_dim. "v41": head_dim.
      rope_dim: number of dims in `Rows.rope`, the last dims of a row: qk_rope_head_dim. "v41": 0.
    """

    nope_dim: int
    rope_dim: int

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self.nope_dim + self.rope_dim

    def _split(self, kv, rope_dtype=jnp.bfloat16):
        kv = kv.astype(jnp.float32)
        return kv[..., : self.nope_dim], round_to(kv[..., self.nope_dim :], rope_dtype) if self.rope_dim else None

    def _join(self, nope, rope, dtype):
        nope = round_to(nope, dtype)
        return nope if rope is None else jnp.concatenate([nope, round_to(rope.astype(jnp.float32), dtype)], axis=-1)


@dataclasses.dataclass(frozen=True)
class FP8Rows(RowCodec):
    """The codec of rows in E4M3, with a scale for each block of dims ("v4", "v41") or for the row ("per_entry").

    A row of DeepSeek-V4's 448 + 64 dims takes 584 bytes with scales of 64 dims, and 580 bytes with one scale. A window
    row of DeepSeek-V4.1's 512 + 0 dims takes 528 bytes.

    Attributes:
      scale_block: number of dims that share an E8M0 scale, 64 in "v4" and 32 in "v41"; None = one float32 inverse scale
        for the row.

    Raises:
      ValueError: `nope_dim` is not positive, or not a multiple of `scale_block` if this is set.
    """

    scale_block: int | None

    def __post_init__(self):
        name = {None: "per_entry", MXFP8_BLOCK: "v41"}.get(self.scale_block, "v4")
        _check_row_dim(name, self, self.scale_block or 1)

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.nope_dim, self.rope_dim, self.scale_block)

    def encode(self, x: Float[Array, "*rows D"]) -> Rows:
        nope, rope = self._split(x)
        if self.scale_block is None:
            codes, scale = encode_fp8_entry(nope)
        else:
            codes, scale = encode_fp8_block(nope, self.scale_block)
            # Scales are padded to a multiple of 8 bytes, as in FlashMLA's rows of 584 bytes (docs/dsv4.md 6.3).
            padding = [(0, 0)] * (scale.ndim - 1) + [(0, self.layout.scale_width - scale.shape[-1])]
            scale = jnp.pad(scale, padding)
        return Rows(codes, rope, scale)

    def decode(self, rows: Rows, dtype: Any = jnp.float32) -> Float[Array, "*rows D"]:
        if self.scale_block is None:
            nope = decode_fp8_entry(rows.nope, rows.scale)
        else:
            nope = decode_fp8_block(rows.nope, rows.scale[..., : self.nope_dim // self.scale_block])
        return self._join(nope, rows.rope, dtype)


@dataclasses.dataclass(frozen=True)
class FP4Rows(RowCodec):
    """The codec of rows in E2M1 with an E4M3 scale for each 16 dims, the entries of "v41": 288 bytes for 512 + 0 dims.

    Raises:
      ValueError: `nope_dim` is not a positive multiple of 16, or `rope_dim` is not 0.
    """

    def __post_init__(self):
        _check_row_dim("v41", self, NVFP4_GROUP)
        if self.rope_dim:
            raise ValueError(f"FP4 rows quantize all dims: rope_dim={self.rope_dim} must be 0")

    @property
    def layout(self) -> RowLayout:
        return RowLayout(self.nope_dim, 0, NVFP4_GROUP, codes="e2m1")

    def encode(self, x: Float[Array, "*rows D"]) -> Rows:
        codes, scale = encode_fp4_entry(x.astype(jnp.float32))
        return Rows(codes, None, scale)

    def decode(self, rows: Rows, dtype: Any = jnp.float32) -> Float[Array, "*rows D"]:
        return round_to(decode_nvfp4(rows.nope, rows.scale), dtype)


@dataclasses.dataclass(frozen=True)
class PlainRows(RowCodec):
    """The codec of unquantized rows.

    Attributes:
      dtype: dtype of the stored values, float32 or bfloat16.
    """

    dtype: Any

    def encode(self, x: Float[Array, "*rows D"]) -> Rows:
        nope, rope = self._split(x, self.dtype)
        return Rows(round_to(nope, self.dtype), rope, None)

    def decode(self, rows: Rows, dtype: Any = jnp.float32) -> Float[Array, "*rows D"]:
        return self._join(rows.nope.astype(jnp.float32), rows.rope, dtype)


# --- indexer keys ---


@dataclasses.dataclass(frozen=True)
class KeyCodec(Codec):
    """The interface of codecs of indexer keys with a given width. A codec can also round queries as it rounds keys.

    Attributes:
      dim: number of dims of a key, index_head_dim.
    """

    dim: int

    def round_query(self, q: Float[Array, "*rows Di"]) -> Float[Array, "*rows Di"]:
        """Encodes and decodes queries [..., Di] like keys, and returns them in the dtype of q (docs/dsv4.md 4).

        The gradient is that of the Hadamard rotation, if the codec rotates; it ignores the rounding.
        """
        return self.fake_quantize(q, q.dtype)


@dataclasses.dataclass(frozen=True)
class FP4Keys(KeyCodec):
    """The codec of keys in E2M1: MXFP4 ("v4", "v41") or NVFP4 ("per_entry").

    An MXFP4 key has an E8M0 scale for each 32 dims: 68 bytes for 128 dims. An NVFP4 key has an E4M3 scale for each 16
    dims, and a scale that all keys share: 72 bytes.

    Attributes:
      hadamard: whether keys and queries are rotated by a Hadamard matrix before they are quantized, as in "v4".
      global_scale: the scale that all NVFP4 keys and queries share; None = MXFP4.

    Raises:
      ValueError: `dim` is not a positive multiple of the number of dims that share a scale, or `hadamard` is set and
        `dim` is not a power of two.
    """

    hadamard: bool
    global_scale: float | None

    def __post_init__(self):
        name = "per_entry" if self.global_scale is not None else "v4" if self.hadamard else "v41"
        _check_multiple(name, "index_head_dim", self.dim, self.layout.scale_block)
        if self.hadamard and self.dim & (self.dim - 1):
            raise ValueError(f'format "{name}" needs index_head_dim to be a power of two (Hadamard), got {self.dim}')

    @property
    def layout(self) -> KeyLayout:
        if self.global_scale is None:
            return KeyLayout(self.dim, MXFP4_BLOCK, "e8m0", self.hadamard)
        return KeyLayout(self.dim, NVFP4_GROUP, "e4m3", self.hadamard, self.global_scale)

    def encode(self, x: Float[Array, "*rows Di"]) -> IndexRows:
        keys = self._rotate(x.astype(jnp.float32))
        if self.global_scale is None:
            return IndexRows(*encode_mxfp4(round_to(keys, jnp.bfloat16).astype(jnp.float32)))
        return IndexRows(*encode_nvfp4(keys, self.global_scale))

    def decode(self, rows: IndexRows, dtype: Any = jnp.float32) -> Float[Array, "*rows Di"]:
        if self.global_scale is None:
            return round_to(decode_mxfp4(rows.codes, rows.scale), dtype)
        return round_to(decode_nvfp4(rows.codes, rows.scale, self.global_scale), dtype)

    def _rotate(self, x):
        return hadamard(x) if self.hadamard else x


@dataclasses.dataclass(frozen=True)
class PlainKeys(KeyCodec):
    """The codec of unquantized keys.

    Attributes:
      dtype: dtype of the stored values, float32 or bfloat16.
    """

    dtype: Any

    def encode(self, x: Float[Array, "*rows Di"]) -> IndexRows:
        return IndexRows(round_to(x.astype(jnp.float32), self.dtype), None)

    def decode(self, rows: IndexRows, dtype: Any = jnp.float32) -> Float[Array, "*rows Di"]:
        return round_to(rows.codes.astype(jnp.float32), dtype)


# --- training ---


@dataclasses.dataclass(frozen=True)
class FakeQuantCodec(Codec):
    """The part of a codec that replaces values by those of another codec, so that gradients pass through the rows.

    Attributes:
      codec: the codec that quantizes the values.
    """

    codec: Any

    def encode(self, x: Float[Array, "*rows D"]) -> Any:
        return super().encode(self.codec.fake_quantize(x))

    def convert(self, rows: Any) -> Any:
        """Converts rows that `codec` has encoded to rows of this codec with the same values."""
        return super().encode(self.codec.decode(rows, jnp.float32))


@dataclasses.dataclass(frozen=True)
class FakeQuantRows(FakeQuantCodec, PlainRows):
    """The codec that stores the values of rows that another codec quantizes in `dtype`."""


@dataclasses.dataclass(frozen=True)
class FakeQuantKeys(FakeQuantCodec, PlainKeys):
    """The codec that stores the values of keys that another codec quantizes in `dtype`."""

    def round_query(self, q: Float[Array, "*rows Di"]) -> Float[Array, "*rows Di"]:
        return self.codec.round_query(q)


def _check_row_dim(format_name, codec, block):
    dim_name = "head_dim - qk_rope_head_dim" if codec.rope_dim else "head_dim"
    _check_multiple(format_name, dim_name, codec.nope_dim, block)


def _check_multiple(format_name: str, dim_name: str, dim: int, block: int) -> None:
    if dim <= 0 or dim % block:
        raise ValueError(f'format "{format_name}" needs {dim_name} to be a positive multiple of {block}, got {dim}')
