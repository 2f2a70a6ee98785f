"""The bfloat16 linear kernel against float64: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import LinearSpec
from pallas_kernels.linear import bfloat16_linear
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.linear.test_quantized_linear import BF16, F32, make_spec
from tests.pallas_kernels.stacks import LAYERS, check_kernel


def check(implementation, tokens, outputs, depth, groups=1):
    rng = np.random.default_rng(tokens)
    rows = sum(size for size, _ in outputs) // groups
    x = jnp.asarray(rng.standard_normal((tokens, groups * depth)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((groups * rows, depth)), jnp.bfloat16)
    call = functools.partial(ops.linear, spec=make_spec(outputs, groups), implementation=implementation)
    found = jax.jit(call)(x, weight)
    exact = [np.asarray(a, np.float64) for a in (x, weight)]
    want = np.einsum("tgk,gmk->tgm", exact[0].reshape(tokens, groups, -1), exact[1].reshape(groups, rows, depth))
    want = np.split(want.reshape(tokens, -1), np.cumsum([size for size, _ in outputs])[:-1], axis=1)
    for (_, dtype), got, expected in zip(outputs, found, want, strict=True):
        assert got.dtype == dtype
        # A tensor core adds 16 products at a time and cuts off what float32 does not hold, up to 2**-23 of a partial
        # sum; these are up to 4 * depth**0.5 large. bfloat16 has 8 bits.
        atol = depth / 16 * 2**-23 * 4 * depth**0.5
        chex.assert_trees_all_close(np.float64(got), expected, rtol=2.0**-8 if dtype == BF16 else 0, atol=atol)


# One block a tile over several tiles; clusters of 2 whose blocks add up; of groups, and outputs of two dtypes.
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups"),
    [
        (8, ((320, F32),), 256, 1),
        (16, ((64, BF16), (64, F32)), 512, 1),
        (8, ((128, BF16), (64, F32), (64, F32)), 768, 2),
    ],
)
def test_interpreted(tokens, outputs, depth, groups):
    check("interpret", tokens, outputs, depth, groups)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "depth", "groups"),
    [
        (((32768, BF16), (8192, BF16)), 1024, 1),
        (((1024, BF16), (512, BF16), (1024, F32), (1024, F32), (256, F32), (256, F32), (64, BF16)), 4096, 1),
        (((1024, BF16), (512, BF16), (512, F32), (512, F32)), 4096, 1),
        (((1024, BF16), (512, BF16)), 4096, 1),
        (((4096, BF16),), 8192, 1),
        (((8192, BF16),), 4096, 8),
        (((32320, F32),), 5120, 1),  # the head of V4.1-Flash on each of four devices
    ],
)
@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_on_gpu(tokens, outputs, depth, groups):
    check("mosaic_gpu", tokens, outputs, depth, groups)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_one_layer_of_a_stack(implementation):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, 512)), jnp.bfloat16)
    layers = [jnp.asarray(rng.standard_normal((128, 512)), jnp.bfloat16) for _ in range(LAYERS)]
    run = functools.partial(bfloat16_linear, x, spec=LinearSpec(), interpret=implementation == "interpret")
    check_kernel(run, layers)


def test_its_gradient_is_that_of_the_reference():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 256), (128, 256)))

    def gradient(implementation):
        def loss(x, weight):
            rounded, sums = ops.linear(
                x, weight, spec=make_spec(((64, BF16), (64, F32))), implementation=implementation
            )
            return jnp.sum(rounded.astype(jnp.float32)) + jnp.sum(sums)

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    for mine, other in zip(gradient("interpret"), gradient("xla"), strict=True):
        chex.assert_trees_all_equal(np.float32(mine), np.float32(other))


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels.linear import LinearSpec, bfloat16_linear
S = jax.ShapeDtypeStruct
for tokens in (8, 64):
    # Clusters of one block, of two, and of four.
    one, two, four, head = (8192,), (2048, 2048), (1536,), (129280,)
    for sizes, depth, groups in (one, 4096, 8), (two, 8192, 1), (four, 4096, 1), (head, 5120, 1):
        spec = LinearSpec(sizes, (jnp.bfloat16, jnp.float32)[: len(sizes)], groups)
        args = S((tokens, groups * depth), jnp.bfloat16), S((sum(sizes), depth), jnp.bfloat16)
        compile_for_h100(f"{tokens}x{depth}x{groups}", functools.partial(bfloat16_linear, spec=spec), *args)
""")
    # One block of 256 threads a multiprocessor.
    assert len(used) == 8 and max(used.values()) <= 255, used


def test_what_the_kernel_does_not_take_is_refused():
    weight = jnp.zeros((64, 256), jnp.bfloat16)
    for x, w in ((jnp.zeros((8, 128)), weight[:, :128]), (jnp.zeros((8, 256)), weight[:9])):
        with pytest.raises(
            NotImplementedError, match="takes (outputs of a multiple of 64 rows|columns in multiples of 256)"
        ):
            ops.linear(x.astype(jnp.bfloat16), w, implementation="interpret")
    for tokens in (1, 72):
        with pytest.raises(NotImplementedError, match=f"takes tokens in range.8, 65, 8., got {tokens}"):
            ops.linear(jnp.zeros((tokens, 256), jnp.bfloat16), weight, implementation="interpret")
    with pytest.raises(NotImplementedError, match="x"):
        ops.linear(jnp.zeros((8, 256), jnp.float32), weight, implementation="interpret")


def test_small_weights_are_left_to_xla(monkeypatch):
    monkeypatch.setattr("dsv4_jax.ops.dispatch.why_no_mosaic_gpu", lambda: None)
    x = jnp.zeros((8, 256), jnp.bfloat16)
    weight = jnp.zeros((64, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="for weights of 1536 rows or more, got 64"):
        ops.linear(x, weight, implementation="mosaic_gpu")
    assert ops.linear(x, weight)[0].shape == (8, 64)


@pytest.mark.parametrize("tokens", [1, 2, 6, 72])
def test_other_numbers_of_tokens_are_left_to_xla(monkeypatch, tokens):
    monkeypatch.setattr("dsv4_jax.ops.dispatch.why_no_mosaic_gpu", lambda: None)
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "1")
    x = jnp.zeros((tokens, 256), jnp.bfloat16)
    weight = jnp.zeros((1536, 256), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"the kernel is for tokens in range.8, 65, 8., got {tokens}"):
        ops.linear(x, weight, implementation="mosaic_gpu")
    assert ops.linear(x, weight)[0].shape == (tokens, 1536)


def test_mistakes_are_explained():
    x = jnp.zeros((8, 256), jnp.bfloat16)
    weight = jnp.zeros((6, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"x must have 1 \* 128 channels for a weight \[6, 128\], got 256"):
        ops.linear(x, weight)
    with pytest.raises(ValueError, match="num_groups=4 must divide the weight's 6 rows"):
        ops.linear(jnp.zeros((8, 512), jnp.bfloat16), weight, LinearSpec(num_groups=4))
    with pytest.raises(ValueError, match=r"output_sizes=\(4,\) must sum to 6"):
        ops.linear(x, weight, LinearSpec((4,), num_groups=2))


def test_a_tokens_bits_do_not_change_when_its_neighbors_do():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 512), (64, 512)))
    alone, beside_others = (ops.linear(x, weight, implementation="interpret")[0] for x in (x.at[1:].set(0), x))
    chex.assert_trees_all_equal(alone[0], beside_others[0])
