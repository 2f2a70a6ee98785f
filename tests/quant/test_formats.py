"""Formats as objects: shapes, refusals, and properties that hold for every row."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dsv4_jax.quant import PerEntryFormat, PlainFormat, Rows, V4Format, V41Format, encode_mxfp4, kv_format


QUANTISED = [V4Format(), V41Format(), PerEntryFormat(), PerEntryFormat(0.25)]
ALL = [*QUANTISED, PlainFormat(jnp.float32), PlainFormat(jnp.bfloat16)]
NOPE = 128
ROPE = 32
INDEX = 64

# Finite float32 without subnormals (XLA on CPU flushes them), far enough from the top that no format overflows.
TOP = float(np.float32(1e30))
FINITE = st.floats(-TOP, TOP, width=32, allow_subnormal=False)
ROWS = hnp.arrays(np.float32, (3, NOPE + ROPE), elements=FINITE)
KEYS = hnp.arrays(np.float32, (3, INDEX), elements=FINITE)


def codecs(format, nope=NOPE, rope=ROPE, index=INDEX):
    return format.entries(nope, rope), format.keys(index)


def row_codecs(format):
    return {format.window(NOPE, ROPE), format.entries(NOPE, ROPE)}


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


@pytest.mark.parametrize("format", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_structs_describe_what_encode_returns(format, dtype):
    for codec in row_codecs(format):
        rows = codec.encode(normal(NOPE + ROPE).astype(dtype))
        chex.assert_trees_all_equal_shapes_and_dtypes(rows, codec.struct)
        chex.assert_shape(codec.decode(rows, dtype), (NOPE + ROPE,))
        chex.assert_type(codec.decode(rows, dtype), dtype)
        assert codec.dim == NOPE + ROPE
        assert codec.layout is None or codec.layout.dim == codec.dim
    key_codec = format.keys(INDEX)
    keys = key_codec.encode(normal(INDEX).astype(dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(keys, key_codec.struct)
    chex.assert_type(key_codec.round_query(normal(INDEX).astype(dtype)), dtype)
    chex.assert_type(key_codec.decode(keys), jnp.float32)
    assert (format.window(NOPE, ROPE) == format.entries(NOPE, ROPE)) == (format.name != "v41")
    layouts = format.entries(NOPE, ROPE).layout, key_codec.layout
    assert [layout is None for layout in layouts] == [format.name == "plain"] * 2


@pytest.mark.parametrize(
    "format, sizes",
    [
        (V4Format(), (584, 584, 68)),
        (V41Format(), (528, 288, 68)),
        (PerEntryFormat(), (580, 580, 72)),
        (PlainFormat(jnp.bfloat16), (1024, 1024, 256)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_bytes_of_the_release(format, sizes):
    def count(struct):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(struct))

    codecs = format.window(448, 64), format.entries(448, 64), format.keys(128)
    assert tuple(count(codec.struct) for codec in codecs) == sizes


@pytest.mark.parametrize("format", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_of_a_row_do_not_depend_on_its_company(format, dtype):
    kv = normal(6, NOPE + ROPE).astype(dtype)
    keys = normal(6, INDEX).astype(dtype)
    key_codec = format.keys(INDEX)

    @jax.jit
    def bits(kv, keys):
        rows = [(codec, codec.encode(kv)) for codec in row_codecs(format)]
        index = key_codec.encode(keys)
        values = [(encoded, codec.decode(encoded, dtype)) for codec, encoded in rows]
        return values, index, key_codec.decode(index), key_codec.round_query(keys)

    together = bits(kv, keys)
    alone = [bits(kv[i], keys[i]) for i in range(6)]
    chex.assert_trees_all_equal(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))
    folded = bits(kv.reshape(3, 1, 2, -1), keys.reshape(3, 1, 2, -1))
    chex.assert_trees_all_equal(together, jax.tree.map(lambda x: x.reshape(6, -1), folded))
    with jax.disable_jit():
        chex.assert_trees_all_equal(together, bits(kv, keys))


@pytest.mark.parametrize("format", ALL, ids=repr)
def test_no_rows_are_fine(format):
    for codec in row_codecs(format):
        rows = codec.encode(jnp.zeros((0, NOPE + ROPE), jnp.float32))
        assert codec.decode(rows, jnp.bfloat16).shape == (0, NOPE + ROPE)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.sampled_from(ALL))
def test_finite_rows_stay_finite_and_near(kv, format):
    codec = format.window(NOPE, ROPE)
    values = np.asarray(codec.decode(codec.encode(jnp.asarray(kv)), jnp.float32))
    assert np.isfinite(values).all()
    chex.assert_tree_all_finite(format.entries(NOPE, ROPE).fake_quantize(jnp.asarray(kv), jnp.float32))
    # A row's largest value keeps 3 mantissa bits or more (half a step: 2**-4); below the floors of 7.1 it may vanish.
    largest = np.abs(kv[:, :NOPE]).max(axis=-1)
    error = np.abs(values - kv)[:, :NOPE].max(axis=-1)
    np.testing.assert_array_less(error, largest * 2**-4 * 1.0001 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(KEYS, st.sampled_from(QUANTISED))
def test_finite_keys_stay_finite(keys, format):
    codec = format.keys(INDEX)
    chex.assert_tree_all_finite(codec.decode(codec.encode(jnp.asarray(keys))))


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_v4_rows_are_a_fixed_point(kv):
    """Quantized values are quantized to themselves. The bits settle a step later: a block whose largest code is 224 is
    also the block of half the scale whose largest code is 448, which is the one the rule picks."""
    codec = V4Format().entries(NOPE, ROPE)
    first = codec.encode(jnp.asarray(kv))
    values = codec.decode(first, jnp.float32)
    second = codec.encode(values)
    assert_same_bits(codec.decode(second, jnp.float32), values)
    chex.assert_trees_all_equal(codec.encode(codec.decode(second, jnp.float32)), second)

    codes = np.asarray(first.nope).reshape(3, -1, 64)
    settled = ((codes & 0x7F).max(axis=-1) != 0x76) | (np.asarray(first.scale)[:, : NOPE // 64] == minimal_scale())
    chex.assert_trees_all_equal(codes[settled], np.asarray(second.nope).reshape(3, -1, 64)[settled])


def minimal_scale() -> int:
    """E8M0 bits of the scale of an all-zero block: the floor of dsv4.md 7.1."""
    return int(V4Format().entries(64, 0).encode(jnp.zeros(64, jnp.float32)).scale[0])


@settings(max_examples=40, deadline=None)
@given(KEYS)
def test_mxfp4_values_are_a_fixed_point(keys):
    codec = V4Format().keys(INDEX)
    index = codec.encode(jnp.asarray(keys))
    values = codec.decode(index)
    again = type(index)(*encode_mxfp4(values))
    assert_same_bits(codec.decode(again), values)
    chex.assert_trees_all_equal(type(index)(*encode_mxfp4(codec.decode(again))), again)


@pytest.mark.parametrize("format", ALL, ids=repr)
def test_signs_of_zeros_are_kept(format):
    kv = jnp.asarray(np.where(np.arange(NOPE + ROPE) % 2, 0.0, -0.0), jnp.float32)
    for codec in row_codecs(format):
        assert_same_bits(codec.decode(codec.encode(kv), jnp.float32), kv)
        tiny = kv.at[0].set(1.0).at[2].set(-1e-20).at[3].set(1e-20)  # round to zero beside a one
        signs = jnp.signbit(codec.decode(codec.encode(tiny), jnp.float32))
        chex.assert_trees_all_equal(signs, jnp.signbit(tiny))


@pytest.mark.parametrize("format", QUANTISED, ids=repr)
def test_largest_values_saturate(format):
    biggest = float(np.finfo(np.float32).max)
    key_codec = format.keys(INDEX)
    for codec in row_codecs(format):
        rows = codec.encode(jnp.full((NOPE + ROPE,), biggest).at[1].set(-biggest))
        assert (np.asarray(rows.nope) & 0x7F).max() <= 0x7E  # 0x7F would be NaN
        assert not np.isnan(np.asarray(codec.decode(rows, jnp.float32))).any()
    index = key_codec.encode(jnp.full((INDEX,), 1e30, jnp.float32))
    assert not np.isnan(np.asarray(key_codec.decode(index))).any()


def test_per_entry_scale_has_a_floor():
    rows = PerEntryFormat().entries(NOPE, ROPE).encode(jnp.zeros(NOPE + ROPE, jnp.float32))
    chex.assert_trees_all_equal(rows.scale, np.float32([1e-12]))


def test_unused_v4_scale_bytes_are_zero():
    rows = V4Format().entries(448, 64).encode(normal(2, 448 + 64))
    assert rows.scale.shape == (2, 8)
    chex.assert_trees_all_equal(rows.scale[:, 7], 0)
    assert (np.asarray(rows.scale[:, :7]) > 0).all()


def test_plain_keeps_values():
    kv = normal(4, NOPE + ROPE)
    rows, keys = codecs(PlainFormat(jnp.float32), index=NOPE + ROPE)
    chex.assert_trees_all_equal(rows.decode(rows.encode(kv), jnp.float32), kv)
    chex.assert_trees_all_equal(keys.decode(keys.encode(kv)), kv)
    half, _ = codecs(PlainFormat(jnp.bfloat16))
    expected = kv.astype(jnp.bfloat16)
    chex.assert_trees_all_equal(half.decode(half.encode(kv), jnp.bfloat16), expected)


@pytest.mark.parametrize(
    "format, dims, message",
    [
        (V4Format(), (24, 8, 64), r"head_dim - qk_rope_head_dim.*multiple of 64, got 24"),
        (V4Format(), (0, 8, 64), r"head_dim - qk_rope_head_dim.*got 0"),
        (V4Format(), (64, 8, 16), r"index_head_dim.*multiple of 32, got 16"),
        (V4Format(), (64, 8, 96), r"index_head_dim.*power of two.*got 96"),
        (PerEntryFormat(), (24, 8, 24), r"index_head_dim.*multiple of 16, got 24"),
    ],
)
def test_check_names_the_dim(format, dims, message):
    with pytest.raises(ValueError, match=message):
        codecs(format, *dims)


def test_codecs_of_what_fits():
    codecs(V4Format(), 448, 64, 128)
    codecs(PerEntryFormat(), 24, 8, 48)
    codecs(PlainFormat(jnp.float32), 24, 8, 24)


def test_kv_format_by_name():
    assert kv_format("v4", jnp.float32) == V4Format()
    assert kv_format("per_entry") == PerEntryFormat()
    assert kv_format("plain") == PlainFormat(jnp.bfloat16)
    assert kv_format("plain", "float32") == PlainFormat(jnp.float32) == PlainFormat(np.float32)
    assert hash(PlainFormat("bfloat16")) == hash(PlainFormat(jnp.bfloat16))
    custom = PerEntryFormat(0.5)
    assert kv_format(custom) is custom
    for format in ALL:
        assert kv_format(format.name).name == format.name


def test_bad_formats_are_refused():
    with pytest.raises(
        ValueError, match="kv_format='fp8' must be 'v4' or 'v41' or 'per_entry' or 'plain', or a KVFormat"
    ):
        kv_format("fp8")
    with pytest.raises(ValueError, match="dtype='float16' must be 'float32' or 'bfloat16'"):
        kv_format("plain", jnp.float16)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="index_global_scale=.* must be a finite number above 0"):
            PerEntryFormat(scale)


def test_formats_are_static_arguments():
    traces = []

    def encode(kv, format):
        traces.append(format)
        return format.entries(NOPE, ROPE).encode(kv)

    encode = jax.jit(encode, static_argnames="format")
    for format in (PlainFormat("float32"), PlainFormat(jnp.float32), V4Format(), V4Format()):
        assert isinstance(encode(normal(NOPE + ROPE), format=format), Rows)
    assert len(traces) == 2


def assert_same_bits(got: jax.Array, expected: jax.Array):
    """Equality that also tells -0 from 0."""
    chex.assert_trees_all_equal(np.asarray(got).view(np.uint32), np.asarray(expected).view(np.uint32))
