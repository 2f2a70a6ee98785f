"""The kernel that adds products of adapters: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import check_layers


SCALES = (0.5, 1.0, 2.0, 3.0)


def operands(tokens, maps, rank, adapters=4, depth=256):
    """(outputs, x, downs, ups, numbers) of maps, each (channels, groups). Some tokens have no adapter."""
    rng = np.random.default_rng(tokens)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    outputs = [draw(tokens, channels) for channels, _ in maps]
    x = draw(tokens, maps[0][1] * depth) * depth**-0.5
    downs = [draw(adapters, rank, depth) for _ in maps]
    ups = [draw(channels, adapters, rank) for channels, _ in maps]
    return outputs, x, downs, ups, jnp.asarray(rng.integers(-1, adapters, tokens), jnp.int32)


def check(implementation, *args, scales=SCALES, depth=256):
    outputs, x, downs, ups, numbers = operands(*args, adapters=len(scales), depth=depth)
    add = functools.partial(ops.add_adapters, scales=scales, implementation=implementation)
    found = jax.jit(add)(outputs, x, downs, ups, numbers)
    exact = functools.partial(np.asarray, dtype=np.float64)
    for got, *arrays in zip(found, outputs, downs, ups, strict=True):
        y, down, up = map(exact, arrays)
        rows = exact(x).reshape(len(y), -1, depth)
        for token, number in enumerate(np.asarray(numbers).tolist()):
            if number < 0:
                chex.assert_trees_all_equal(exact(got[token]), y[token])
                continue
            inner = rows[token] @ down[number].T
            size = np.abs(inner).max() * scales[number]
            product = scales[number] * np.einsum(
                "gr,gmr->gm", inner, up[:, number].reshape(len(inner), -1, up.shape[2])
            )
            # bfloat16 has 8 bits: of the result, and of each of the `rank` values of `inner`, whose errors add up.
            atol = 2.0**-9 * size * 4 * up.shape[2] ** 0.5
            chex.assert_trees_all_close(exact(got[token]), y[token] + product.reshape(-1), rtol=2.0**-8, atol=atol)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("tokens", "maps", "rank"),
    [(8, ((64, 1), (192, 1)), 16), (16, ((128, 2),), 32), (40, ((128, 2),), 32), (64, ((64, 1),), 48)],
)
def test_products_of_each_tokens_adapter(implementation, tokens, maps, rank):
    check(implementation, tokens, maps, rank)


@pytest.mark.gpu
@pytest.mark.parametrize("maps", [((1024, 1), (512, 1)), ((32768, 1),), ((8192, 8),)])
@pytest.mark.parametrize("tokens", [8, 32, 64])
def test_on_gpu(tokens, maps):
    check("mosaic_gpu", tokens, maps, 16, scales=SCALES * 2, depth=1024)


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_layers_of_a_stack(implementation):
    outputs, x, *matrices, numbers = operands(8, ((64, 1),), 16)

    def call(matrices, carry, implementation):
        return carry, ops.add_adapters(outputs, x, *matrices, numbers, SCALES, implementation=implementation)

    check_layers(implementation, call, [jax.tree.map(lambda m, i=i: m * (i + 1), matrices) for i in range(3)])


def test_its_gradient_is_that_of_the_reference():
    *arrays, numbers = operands(8, ((64, 1), (64, 1)), 16)

    def gradient(implementation):
        def loss(*arrays):
            added = ops.add_adapters(*arrays, numbers, SCALES, implementation=implementation)
            return sum(jnp.sum(x.astype(jnp.float32)) for x in added)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)

    chex.assert_trees_all_equal(gradient("interpret"), gradient("xla"))


@pytest.mark.parametrize(("tokens", "rank"), [(7, 16), (72, 16), (8, 8), (8, 80)])
def test_what_the_kernel_does_not_take_runs_as_xla(monkeypatch, tokens, rank):
    monkeypatch.setattr("dsv4_jax.ops.dispatch.why_no_mosaic_gpu", lambda: None)
    args = *operands(tokens, ((64, 1),), rank), SCALES
    with pytest.raises(NotImplementedError, match="add_adapters cannot run as 'mosaic_gpu'"):
        ops.add_adapters(*args, implementation="mosaic_gpu")
    assert ops.add_adapters(*args)[0].shape == (tokens, 64)


@pytest.mark.aot
def test_compiles_without_spills():
    used = registers("""
import jax
import jax.numpy as jnp
from dsv4_jax import ops

def add(*args):
    return ops.add_adapters(*args, (1.0,) * 8, implementation="mosaic_gpu")

ops.dispatch.why_no_mosaic_gpu = lambda: None
for tokens, maps, rank in (32, ((1024, 1), (512, 1)), 16), (64, ((32768, 1),), 32):
    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)
    outputs = [struct(tokens, channels) for channels, _ in maps]
    downs = [struct(8, rank, 4096) for _ in maps]
    ups = [struct(channels, 8, rank) for channels, _ in maps]
    numbers = struct(tokens, dtype=jnp.int32)
    compile_for_h100(f"add_adapters_{rank}", add, outputs, struct(tokens, 4096), downs, ups, numbers)
""")
    assert used.keys() == {"add_adapters_16", "add_adapters_32"}


def test_products_of_another_adapter_may_be_infinite():
    x = jnp.full((2, 4), 2.0)
    down = jnp.stack([jnp.ones((1, 4)), jnp.full((1, 4), 3e38)])
    (y,) = ops.add_adapters([jnp.zeros((2, 3))], x, [down], [jnp.ones((3, 2, 1))], jnp.array([0, -1]), (1.0, 1.0))
    np.testing.assert_array_equal(y, [[8.0] * 3, [0.0] * 3])


def test_another_number_of_scales_is_refused():
    with pytest.raises(ValueError, match=r"scales=\(0.5, 1.0\) must have a factor for each of the 4 adapters"):
        ops.add_adapters(*operands(8, ((64, 1),), 16), SCALES[:2])
