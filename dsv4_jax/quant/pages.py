"""Conversion of "v4" rows to and from FlashMLA's page layout, to exchange a cache with CUDA kernels (docs/dsv4.md 6.3).

A page holds a block of entries, 584 bytes for each, in three parts:

    for each entry: 448 E4M3 codes, then 64 RoPE dims in bfloat16
    for each entry: 7 E8M0 scales, then 1 unused byte
    padding to a multiple of 576 bytes
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
    """Returns the number of bytes in a page: 584 per entry, rounded up to a multiple of 576 as FlashMLA requires."""
    return -(-entries * (DATA_BYTES + SCALE_BYTES) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def to_flashmla_pages(rows: Rows) -> UInt8[Array, "blocks page_bytes"]:
    """Converts the entries of one layer to FlashMLA pages.

    Args:
      rows: "v4" rows [blocks, entries per block, ...] of 448 + 64 dims.

    Returns:
      [blocks, `flashmla_page_bytes(entries per block)`] uint8. Unused scale bytes and padding are 0.

    Raises:
      ValueError: the rows are of another format, width or number of axes.
    """
    _check_rows(rows)
    blocks, entries, _ = rows.nope.shape
    rope = lax.bitcast_convert_type(rows.rope, jnp.uint8).reshape(blocks, entries, 2 * ROPE_DIM)
    data = jnp.concatenate([rows.nope, rope], axis=-1).reshape(blocks, entries * DATA_BYTES)
    used = entries * (DATA_BYTES + SCALE_BYTES)
    padding = jnp.zeros((blocks, flashmla_page_bytes(entries) - used), jnp.uint8)
    return jnp.concatenate([data, rows.scale.reshape(blocks, entries * SCALE_BYTES), padding], axis=-1)


def from_flashmla_pages(pages: UInt8[Array, "blocks page_bytes"], entries: int) -> Rows:
    """Converts FlashMLA pages to "v4" rows.

    Args:
      pages: [blocks, bytes] uint8.
      entries: number of entries in a page.

    Returns:
      Rows [blocks, entries, ...] of 448 + 64 dims. The eighth scale byte of a row, which FlashMLA leaves undefined, is
      0.

    Raises:
      ValueError: `entries` is less than 1, or a page does not have `flashmla_page_bytes(entries)` bytes.
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
