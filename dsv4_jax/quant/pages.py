"""FlashMLA's page layout of "v4" rows, to exchange a cache with CUDA kernels; 584 bytes per entry (dsv4.md 6.3).

[entries] x (448 E4M3 codes | 64 bfloat16 RoPE dims)  then  [entries] x (7 E8M0 scales | 1 unused)  then padding
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8

from dsv4_jax.quant.codecs import Rows
from dsv4_jax.quant.fp8 import FP8_BLOCK
from pallas_kernels.formats.layouts import RowLayout


NOPE_DIM = 448
ROPE_DIM = 64
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALES = NOPE_DIM // FP8_BLOCK
SCALE_BYTES = 8
PAGE_ALIGNMENT = 576


def flashmla_page_bytes(entries: int) -> int:
    """The bytes of a page: 584 per entry, rounded up to a multiple of 576 (the kernels' stride)."""
    return -(-entries * (DATA_BYTES + SCALE_BYTES) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def to_flashmla_pages(rows: Rows) -> UInt8[Array, "blocks page_bytes"]:
    """Lays out one layer's pool, "v4" rows [blocks, entries, ..] of 448 + 64 dims, as FlashMLA pages.

    Returns [blocks, `flashmla_page_bytes(entries)`] uint8, in which unused scale bytes and padding are 0. Raises
    ValueError for rows of another format or width.
    """
    _check_rows(rows)
    blocks, entries, _ = rows.nope.shape
    rope = lax.bitcast_convert_type(rows.rope, jnp.uint8).reshape(blocks, entries, 2 * ROPE_DIM)
    data = jnp.concatenate([rows.nope, rope], axis=-1).reshape(blocks, entries * DATA_BYTES)
    used = entries * (DATA_BYTES + SCALE_BYTES)
    padding = jnp.zeros((blocks, flashmla_page_bytes(entries) - used), jnp.uint8)
    return jnp.concatenate([data, rows.scale.reshape(blocks, entries * SCALE_BYTES), padding], axis=-1)


def from_flashmla_pages(pages: UInt8[Array, "blocks page_bytes"], entries: int) -> Rows:
    """Reads FlashMLA pages of so many rows back into "v4" rows; the undefined eighth scale byte becomes 0.

    Raises ValueError if the pages [blocks, bytes] uint8 are not `flashmla_page_bytes(entries)` long.
    """
    blocks, page_bytes = pages.shape
    if entries < 1 or page_bytes != flashmla_page_bytes(entries):
        raise ValueError(
            f"pages of {entries} entries are {flashmla_page_bytes(entries)} bytes long, got pages of {page_bytes} bytes"
        )
    data = pages[:, : entries * DATA_BYTES].reshape(blocks, entries, DATA_BYTES)
    rope = data[..., NOPE_DIM:].reshape(blocks, entries, ROPE_DIM, 2)
    scale = pages[:, entries * DATA_BYTES : entries * (DATA_BYTES + SCALE_BYTES)].reshape(blocks, entries, SCALE_BYTES)
    return Rows(
        nope=data[..., :NOPE_DIM],
        rope=lax.bitcast_convert_type(rope, jnp.bfloat16),
        scale=scale.at[..., SCALES:].set(0),
    )


def _check_rows(rows: Rows) -> None:
    for name, dtype, width in RowLayout(NOPE_DIM, ROPE_DIM, FP8_BLOCK).columns:
        value = getattr(rows, name)
        if value is None or value.dtype != dtype or value.ndim != 3 or value.shape[-1] != width:
            got = "None" if value is None else f"{value.dtype}{list(value.shape)}"
            raise ValueError(
                f'FlashMLA pages hold "v4" rows of {NOPE_DIM} + {ROPE_DIM} dims: rows.{name} must be '
                f"{jnp.dtype(dtype).name}[blocks, entries, {width}], got {got}"
            )
