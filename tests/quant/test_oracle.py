"""The quantizers against the bytes in tests/data/formats, eagerly and compiled."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.quant import (
    PerEntryFormat,
    V4Format,
    decode_fp8_block,
    decode_fp8_entry,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp8_block,
    encode_fp8_entry,
    encode_mxfp4,
    encode_nvfp4,
    flashmla_page_bytes,
    from_flashmla_pages,
    hadamard,
    round_to,
    to_flashmla_pages,
)
from dsv4_jax.quant.fp4 import unpack_fp4
from tests.paths import DATA


FORMATS = DATA / "formats"


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def compiled(request):
    return request.param


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FORMATS / f"{name}.npz") as file:
        return dict(file)


def assert_same_bits(got, expected: np.ndarray):
    """Equality that also tells -0 from 0; bfloat16 goldens are stored as float32."""
    got = np.asarray(got)
    if got.dtype == jnp.bfloat16:
        got = got.astype(np.float32)
    assert got.dtype == expected.dtype
    chex.assert_trees_all_equal(got.view(f"u{got.itemsize}"), expected.view(f"u{got.itemsize}"))


def assert_neighbors(got: np.ndarray, expected: np.ndarray, robust: np.ndarray):
    """Bit-equal where `robust`; elsewhere one float32 rounding decides, so a neighboring code is right too."""
    chex.assert_trees_all_equal(got[robust], expected[robust])
    sign = 0x80 if expected.max() >= 16 else 8
    chex.assert_trees_all_equal(got & sign, expected & sign)
    step = np.abs((got & ~np.uint8(sign)).astype(int) - (expected & ~np.uint8(sign)).astype(int))
    assert step.max() <= 1


def test_fp8_blocks(compiled):
    golden = load("fp8_ue8m0_block64")
    codes, scale = compiled(encode_fp8_block)(jnp.asarray(golden["x"]))
    assert_same_bits(codes, golden["codes"])
    assert_same_bits(scale, golden["scale"])
    values = compiled(lambda c, s: round_to(decode_fp8_block(c, s), jnp.bfloat16))(codes, scale)
    assert_same_bits(values, golden["dequant"])


def test_mxfp4(compiled):
    golden = load("fp4_mx_block32")
    packed, scale = compiled(encode_mxfp4)(jnp.asarray(golden["x"]))
    assert_same_bits(scale, golden["scale"])
    exact = ~golden["ftz_sensitive"]  # XLA on CPU flushes the subnormals of the other two rows
    assert exact.sum() == 73
    assert_same_bits(np.asarray(packed)[exact], golden["packed"][exact])
    assert_same_bits(unpack_fp4(jnp.asarray(golden["packed"])), golden["codes"])
    values = compiled(decode_mxfp4)(jnp.asarray(golden["packed"]), scale)
    assert_same_bits(np.asarray(values)[exact], golden["dequant"][exact])


@pytest.mark.parametrize("size", [64, 128])
def test_indexer_keys_are_rotated_then_mxfp4(compiled, size):
    golden = load(f"fp4_mx_hadamard{size}")
    x = jnp.asarray(golden["x"])
    rotated = compiled(lambda x: round_to(hadamard(x), jnp.bfloat16))(x)
    chex.assert_trees_all_equal(rotated.astype(jnp.float32), golden["rotated"])
    codec = V4Format().keys(size)
    for keys in (x, x.astype(jnp.bfloat16)):
        rows = compiled(codec.encode)(keys)
        assert_same_bits(rows.codes, golden["packed"])
        assert_same_bits(rows.scale, golden["scale"])
        assert_same_bits(compiled(codec.decode)(rows), golden["dequant"])
        query = compiled(codec.round_query)(keys)
        assert query.dtype == keys.dtype
        assert_same_bits(query, golden["dequant"])


@pytest.mark.parametrize("case", ["tensor", "one", "saturating"])
def test_nvfp4(compiled, case):
    golden = load("nvfp4_group16")
    format = PerEntryFormat(index_global_scale=float(golden[f"{case}_global"][0]))
    codec = format.keys(golden["x"].shape[-1])
    rows = compiled(codec.encode)(jnp.asarray(golden["x"]))
    assert_neighbors(np.asarray(rows.scale), golden[f"{case}_scale"], golden[f"{case}_scale_robust"])
    codes = np.asarray(unpack_fp4(rows.codes))
    assert_neighbors(codes, golden[f"{case}_codes"], golden[f"{case}_codes_robust"])

    stored = type(rows)(jnp.asarray(golden[f"{case}_packed"]), jnp.asarray(golden[f"{case}_scale"]))
    values = compiled(codec.decode)(stored)
    assert_same_bits(values, golden[f"{case}_dequant"])
    assert_same_bits(compiled(lambda v: round_to(v, jnp.bfloat16))(values), golden[f"{case}_dequant_bf16"])


def test_nvfp4_saturates_its_scales():
    golden = load("nvfp4_group16")
    _, scale = encode_nvfp4(jnp.asarray(golden["x"]), float(golden["saturating_global"][0]))
    assert (np.asarray(scale) == 0x7E).sum() > 0  # 448
    chex.assert_tree_all_finite(decode_nvfp4(jnp.asarray(golden["saturating_packed"]), scale))


def test_fp8_entries(compiled):
    golden = load("fp8_entry_scale")
    codes, inv_scale = compiled(encode_fp8_entry)(jnp.asarray(golden["x"]))
    assert_same_bits(np.asarray(inv_scale)[:, 0], golden["inv_scale_mul"])
    assert_neighbors(np.asarray(codes), golden["codes"], golden["codes_robust"])
    assert_neighbors(np.asarray(codes), golden["codes_mul"], golden["codes_robust"])

    stored = jnp.asarray(golden["codes"]), jnp.asarray(golden["inv_scale"])[:, None]
    values = compiled(decode_fp8_entry)(*stored)
    assert_same_bits(values, golden["dequant"])
    assert_same_bits(compiled(lambda v: round_to(v, jnp.bfloat16))(values), golden["dequant_bf16"])


@pytest.mark.parametrize("entries", [64, 2])
def test_flashmla_pages(compiled, entries):
    golden = load("flashmla_v4_pages")
    x = jnp.asarray(golden[f"rows_{entries}"])[None]  # one block
    codec = V4Format().entries(448, 64)
    rows = compiled(codec.encode)(x)
    assert_same_bits(rows.nope[0], golden[f"codes_{entries}"])
    assert_same_bits(rows.scale[0, :, :7], golden[f"scale_{entries}"])
    values = compiled(lambda rows: codec.decode(rows, jnp.bfloat16))(rows)
    assert_same_bits(values[0], golden[f"dequant_{entries}"])

    page = np.asarray(compiled(to_flashmla_pages)(rows))
    defined = golden[f"defined_{entries}"]
    assert page.shape == (1, flashmla_page_bytes(entries)) == (1, *defined.shape)
    assert_same_bits(page[0, defined], golden[f"page_{entries}"][defined])

    foreign = np.where(defined, golden[f"page_{entries}"], 0xFF).astype(np.uint8)  # what nobody defined is not read
    back = compiled(lambda pages: from_flashmla_pages(pages, entries))(jnp.asarray(foreign)[None])
    chex.assert_trees_all_equal(back, rows)
