"""The rows of DeepSeek-V4.1 against the bytes in tests/data/formats and tests/data/official_v41."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.quant import (
    FakeQuantFormat,
    IndexRows,
    Rows,
    V4Format,
    V41Format,
    decode_e4m3,
    encode_fp4_entry,
    encode_nvfp4,
    to_flashmla_pages,
)
from dsv4_jax.quant.fp4 import unpack_fp4
from tests.paths import DATA
from tests.quant.test_oracle import assert_same_bits, compiled, load  # noqa: F401 (a fixture)


FORMAT = V41Format()
WINDOW = FORMAT.window(448, 64)
ENTRY = FORMAT.entries(448, 64)
KEY = FORMAT.keys(128)
GOLDEN = {WINDOW: "v41_window_mxfp8_528", ENTRY: "v41_entry_fp4_288", KEY: "v41_key_mxfp4_68"}
CODECS = pytest.mark.parametrize("codec", GOLDEN, ids=GOLDEN.values())
E4M3 = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # the positive values
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BF16 = np.arange(1, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)  # the positive values


def row_bytes(rows: Rows | IndexRows, size: int) -> np.ndarray:
    """Codes and scales [.., size] of rows, without the padding of scales."""
    codes = rows.codes if isinstance(rows, IndexRows) else rows.nope
    return np.concatenate([codes, rows.scale], axis=-1)[..., :size]


def stored(codec, golden) -> Rows | IndexRows:
    data = jnp.asarray(golden["data"])
    scale = jnp.asarray(golden["scale"])
    return IndexRows(data, scale) if codec == KEY else Rows(data, None, scale)


def decode(codec, rows, dtype=jnp.float32):
    return codec.decode(rows) if codec == KEY else codec.decode(rows, dtype)


def not_flushed(codec, golden) -> np.ndarray:
    """[79] bool, False for keys that XLA on a CPU flushes. The floors of other rows lie above subnormals."""
    exact = ~golden["ftz_sensitive"] | (codec != KEY)
    assert exact.sum() == (75 if codec == KEY else 79)
    return exact


@CODECS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_and_values(compiled, codec, dtype):  # noqa: F811
    golden = load(GOLDEN[codec])
    exact = not_flushed(codec, golden)
    got = row_bytes(compiled(codec.encode)(jnp.asarray(golden["x"], dtype)), golden["row"].shape[1])
    assert_same_bits(got[exact], golden["row"][exact])
    for values_dtype in (jnp.float32,) if codec == KEY else (jnp.float32, jnp.bfloat16):  # bfloat16 holds every value
        values = compiled(lambda rows, dtype=values_dtype: decode(codec, rows, dtype))(stored(codec, golden))
        assert values.dtype == values_dtype
        assert_same_bits(np.asarray(values.astype(jnp.float32))[exact], golden["dequant"][exact])


@CODECS
def test_which_values_are_stored_as_themselves(codec):
    golden = load(GOLDEN[codec])
    values = golden["dequant"]
    exact = not_flushed(codec, golden) & np.isfinite(values).all(axis=1)  # 256 * 2**120 overflows
    again = np.asarray(decode(codec, codec.encode(jnp.asarray(values))))
    kept = (again.view(np.uint32) == values.view(np.uint32)).reshape(golden["idempotent"].shape + (-1,)).all(axis=2)
    chex.assert_trees_all_equal(kept[exact], golden["idempotent"][exact])
    assert (~golden["idempotent"]).sum() == (42 if codec == ENTRY else 0)


def test_window_floor_is_that_of_amax():
    """SGLang's reference floors the scale at 1e-4, and so stores other bytes for small values."""
    golden = load(GOLDEN[WINDOW])
    differs = ~golden["sglang_equal"]
    assert differs.sum() == 31
    got = row_bytes(WINDOW.encode(jnp.asarray(golden["x"])), 528)
    assert (got != golden["sglang_row"]).any(axis=1)[differs].all()
    assert WINDOW.encode(jnp.zeros(512)).scale.tolist() == [105] * 16


def test_ties_of_entries_are_those_of_the_exact_quotient():
    golden = load(GOLDEN[ENTRY])
    fragile = ~golden["codes_robust"]
    assert fragile.sum() == 194
    x = jnp.asarray(golden["x"])
    exact = unpack_fp4(encode_fp4_entry(x)[0])
    assert_same_bits(np.asarray(exact)[fragile], np.asarray(unpack_fp4(jnp.asarray(golden["data"])))[fragile])
    by_reciprocal = unpack_fp4(encode_nvfp4(x)[0])
    assert (np.asarray(by_reciprocal) != np.asarray(exact))[fragile].any(), "the other rule of E4M3 scales misses ties"


def test_every_code_of_an_entry():
    """All pairs of a scale and a bfloat16 below its largest code, each in a group whose largest value has the scale."""

    @jax.jit
    def encode(x, amax):
        packed, scale = encode_fp4_entry(jnp.zeros((len(x), 16)).at[:, 0].set(amax).at[:, 1].set(x))
        return packed[:, 0] >> 4, decode_e4m3(scale[:, 0])

    missed = 0
    for scale in E4M3:
        x = BF16[BF16 <= 6 * scale][-12_000:]  # smaller ones are below 2**-90 of the scale
        codes, scales = encode(jnp.asarray(x), np.float32(6 * scale))
        assert (np.asarray(scales) == scale).all()
        want = nearest_even(E2M1, x.astype(np.float64) / scale)
        chex.assert_trees_all_equal(np.asarray(codes), want.astype(np.uint8))
        missed += (nearest_even(E2M1, x * (np.float32(1) / np.float32(scale))) != want).sum()
    assert missed == 42, "ties that a product with the reciprocal misses"


def nearest_even(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The index of the value nearest to x, of two equally near ones the even index; by float64, exact for these x."""
    upper = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    middle = (values[upper] + values[upper - 1]) / 2
    return np.where((x > middle) | ((x == middle) & (upper % 2 == 0)), upper, upper - 1)


def test_every_scale_of_an_entry(compiled):  # noqa: F811
    """The product with fp32(1/6) rounds to the same E4M3 scale as amax / 6, for every bfloat16."""
    groups = np.zeros((len(BF16), 16), np.float32)
    groups[:, 3] = -BF16
    want = nearest_even(np.array([0, *E4M3]), np.clip(BF16.astype(np.float64) / 6, 2.0**-9, 448))
    for dtype in (jnp.float32, jnp.bfloat16):
        scale = compiled(lambda x: ENTRY.encode(jnp.tile(x, (1, 32))).scale[:, 0])(jnp.asarray(groups, dtype))
        chex.assert_trees_all_equal(np.asarray(scale), want.astype(np.uint8))


@pytest.mark.parametrize("layer", [1, 2, 4, 6, 9])
def test_rows_of_the_official_model(compiled, layer):  # noqa: F811
    codecs = {"window": FORMAT.window(80, 16), "entry": FORMAT.entries(80, 16), "key": FORMAT.keys(32)}
    with np.load(DATA / "official_v41" / "golden_rows.npz") as golden:
        roles = [role for role in codecs if f"{role}_{layer}" in golden]
        assert roles == {2: ["entry", "key"], 1: ["window"], 9: ["window"]}.get(layer, [*codecs])
        for role in roles:
            want = golden[f"{role}_bytes_{layer}"]
            rows = compiled(codecs[role].encode)(jnp.asarray(golden[f"{role}_{layer}"], jnp.bfloat16))
            assert_same_bits(row_bytes(rows, want.shape[-1]), want)


def test_queries_are_rounded_like_keys():
    golden = load(GOLDEN[KEY])
    exact = not_flushed(KEY, golden)
    assert_same_bits(np.asarray(KEY.round_query(jnp.asarray(golden["x"])))[exact], golden["dequant"][exact])


def test_fake_quantized_rows_have_the_values_and_the_gradients_of_rows():
    training = FakeQuantFormat(FORMAT)
    x = jax.random.normal(jax.random.key(0), (3, 512))
    for codec, fake in ((WINDOW, training.window(448, 64)), (ENTRY, training.entries(448, 64))):
        values, pull = jax.vjp(lambda x, fake=fake: fake.decode(fake.encode(x), jnp.float32), x)
        chex.assert_trees_all_equal(values, codec.decode(codec.encode(x), jnp.float32))
        chex.assert_trees_all_equal(pull(x), (x,))
    keys = x[:, :128]
    fake = training.keys(128)
    for run in (lambda x: fake.decode(fake.encode(x)), fake.round_query):
        values, pull = jax.vjp(run, keys)
        chex.assert_trees_all_equal(values, KEY.decode(KEY.encode(keys)))
        chex.assert_trees_all_equal(pull(keys), (keys,))  # no rotation


def test_rows_are_no_flashmla_pages():
    x = jnp.ones((1, 2, 512))
    assert to_flashmla_pages(V4Format().entries(448, 64).encode(x)).shape == (1, 1728)
    for codec in (WINDOW, ENTRY):
        with pytest.raises(ValueError, match=r'"v4" rows of 448 \+ 64 dims'):
            to_flashmla_pages(codec.encode(x))


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='"v41" needs head_dim to be a positive multiple of 32, got 80'):
        FORMAT.window(64, 16)
    with pytest.raises(ValueError, match='"v41" needs head_dim to be a positive multiple of 16, got 72'):
        FORMAT.entries(64, 8)
    with pytest.raises(ValueError, match='"v41" needs index_head_dim to be a positive multiple of 32, got 48'):
        FORMAT.keys(48)
    FORMAT.keys(96)  # which has no Hadamard matrix
