"""Queries rounded by the kernel against the formats' own code: interpreted, on a GPU, and compiled for one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.ops.indexer_scores import round_index_query_operands
from dsv4_jax.quant import kv_format
from dsv4_jax.quant.formats import PerEntryFormat
from pallas_kernels import round_index_query
from pallas_kernels.formats.row_encoder import e2m1_codes
from pallas_kernels.mgpu.bfloat16_words import e2m1_value
from tests.pallas_kernels.kernels import registers


FORMATS = dict(v4=kv_format("v4"), v41=kv_format("v41"), per_entry=PerEntryFormat(index_global_scale=0.5))
HEADS = dict(v4=64, v41=32, per_entry=64)
LAYOUT = FORMATS["v4"].keys(128).layout
INV_FREQ = jnp.asarray(1.6e5 ** -(np.arange(64) / 64), jnp.float32)


def check(name, q, positions=None, inv_freq=None, *, interpret):
    q = q[:, : HEADS[name]]
    codec = FORMATS[name].keys(q.shape[-1])
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape[:2]), jnp.float32)
    cpu = jax.device_put((q, weights, positions, inv_freq), jax.devices("cpu")[0])
    want = jax.jit(functools.partial(round_index_query_operands, codec))(*cpu)
    got = round_index_query(q, weights, positions, inv_freq, codec.layout, interpret=interpret)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        # A CPU takes the weights of heads of zeros, of scale 2**-126, for zero.
        x, y = (np.asarray(z) if z.dtype != jnp.float32 else np.where(np.abs(z) < 2.0**-126, 0, z) for z in (x, y))
        chex.assert_trees_all_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))


def queries(tokens):
    """Heads of all sizes whose values and steps stay normal numbers, as a CPU takes the others for zero; zeros of both
    signs, one value among zeros."""
    rng = np.random.default_rng(tokens)
    q = rng.standard_normal((tokens, 64, 128)) * 2.0 ** rng.integers(-90, 100, (tokens, 64, 1))
    q[0, :2] = np.array([[0.0], [-0.0]])
    q[0, 2] = 0.0
    q[0, 2, 77] = -3.0
    # Ties between codes: halves of quarters.
    q[0, 3:8] = rng.integers(-24, 25, (5, 128)) / 4
    # After the rotation one dim is 2**10 to 2**15 times the others.
    q[0, 8:14] = 1.0
    q[0, range(8, 14), range(6)] -= 2.0 ** -np.arange(3, 9)
    return jnp.asarray(q, jnp.bfloat16)


def turned(tokens):
    """Queries of all sizes that stay normal numbers when pairs are added, positions up to 2**20, one of padding."""
    rng = np.random.default_rng(tokens)
    positions = rng.integers(0, 1 << 20, tokens)
    positions[-1] = -1
    q = jnp.clip(queries(tokens).astype(jnp.float32), -(2.0**90), 2.0**90).astype(jnp.bfloat16)
    return q, jnp.asarray(positions, jnp.int32)


@pytest.mark.parametrize("name", FORMATS)
def test_interpreted(name):
    check(name, queries(1), interpret=True)


@pytest.mark.parametrize(("name", "pairs"), [("v4", 32), ("v41", 32), ("per_entry", 20)])
def test_with_rope_interpreted(name, pairs):
    """Half of the channels, and a number that ends within a thread's."""
    check(name, *turned(2), INV_FREQ[:pairs], interpret=True)


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, 24), (jnp.bfloat16, 8)])
def test_values_are_rounded_as_codes_are(dtype, bits):
    """What a GPU does in place of codes: adding and taking away a large number rounds to E2M1's steps."""
    ties = np.arange(-96, 97) / 16
    above = np.array([0.25, 2.5, 5]) * (1 + 2.0 ** (1 - bits))
    others = np.random.default_rng(0).uniform(-6, 6, 10000)
    x = np.concatenate([ties, above, others, [-0.0, 1e-30, -1e-30]]).astype(dtype)
    power = 2.0 ** np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 1)))
    large = (1.5 * 2.0 ** (bits - 2) * power).astype(dtype)
    rounded = np.copysign(((x + large).astype(dtype) - large).astype(np.float32), x.astype(np.float32))
    want = np.asarray(e2m1_value(e2m1_codes(jnp.asarray(x, jnp.float32))))
    chex.assert_trees_all_equal(rounded.view(np.uint32), want.view(np.uint32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_gpu(name):
    check(name, queries(333), interpret=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "pairs"), [("v4", 32), ("v41", 32), ("per_entry", 32), ("v4", 20), ("per_entry", 64)])
@pytest.mark.parametrize("tokens", [1, 333])
def test_with_rope_on_gpu(name, pairs, tokens):
    check(name, *turned(tokens), INV_FREQ[:pairs], interpret=False)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import round_index_query
from pallas_kernels.formats.layouts import KeyLayout
v4, per_entry = KeyLayout(128, 32, "e8m0", hadamard=True), KeyLayout(128, 16, "e4m3", hadamard=False)
v41 = KeyLayout(128, 32, "e8m0", hadamard=False)
for name, heads, layout in ("v4", 64, v4), ("v41", 32, v41), ("per_entry", 64, per_entry):
    f = functools.partial(round_index_query, layout=layout)
    q, positions = jax.ShapeDtypeStruct((8192, heads, 128), jnp.bfloat16), jax.ShapeDtypeStruct((8192,), jnp.int32)
    weights, inv_freq = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, heads), (32,)))
    compile_for_h100(name, f, q, weights, positions, inv_freq)
""")
    # 4 warpgroups on a multiprocessor.
    assert len(used) == 3 and max(used.values()) <= 128, used


def test_no_queries():
    q, weights = round_index_query(*heads(0, 64), None, None, LAYOUT)
    assert (q.shape, q.dtype, weights.shape) == ((0, 64, 128), jnp.float8_e4m3fn, (0, 64))


def heads(tokens, count, dim=128):
    return jnp.zeros((tokens, count, dim), jnp.bfloat16), jnp.zeros((tokens, count), jnp.float32)


def test_what_the_kernel_does_not_take_is_refused():
    with pytest.raises(NotImplementedError, match="multiple of 32 heads, got 6"):
        round_index_query(*heads(1, 6), None, None, LAYOUT)
    with pytest.raises(NotImplementedError, match="bfloat16.any, any, 128., got bfloat16.1, 4, 64."):
        round_index_query(*heads(1, 4, 64), None, None, LAYOUT)
    with pytest.raises(NotImplementedError, match="weights as float32.1, 32., got float32.1, 64."):
        round_index_query(heads(1, 32)[0], heads(1, 64)[1], None, None, LAYOUT)
    with pytest.raises(NotImplementedError, match="keys of 128 dims.*got KeyLayout.dim=64"):
        round_index_query(*heads(1, 4, 64), None, None, dataclasses.replace(LAYOUT, dim=64))
    with pytest.raises(NotImplementedError, match="at most 128 rotated channels, got 130"):
        round_index_query(*heads(1, 32), jnp.zeros((1,), jnp.int32), jnp.ones((65,), jnp.float32), LAYOUT)
