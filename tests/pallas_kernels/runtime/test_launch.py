"""Which implementation of a primitive a kernel gets, and what the checks before a launch say."""

import contextlib

import chex
import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.formats.layouts import KeyLayout, RowLayout, check_pools, quantized
from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.runtime.launch import interpreting, kernel, primitive
from tests.races import race_checked


@primitive
def negate(x: jax.Array) -> jax.Array:
    """-x."""
    return -x


@negate.mosaic
def _(x):
    def emit(x):
        zero = mlir.Scalar(0.0)
        return [mlir.ptx("sub.f32 $0, $1, $2;", zero, value, results=zero.type, pure=True) for value in mlir.values(x)]

    return vectors.inline(emit, x, returns=x)


def step(_, x):
    """Of a loop; one function for all kernels, so that JAX may take what it traced before."""
    return negate(x)


def negate_often(interpret):
    def body(x, out):
        assert interpreting() == interpret
        out[...] = lax.fori_loop(0, 3, step, vectors.load(x))

    return kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), interpret=interpret)


def test_a_kernel_gets_its_own_implementation_whatever_was_traced_before():
    x = jnp.arange(128, dtype=jnp.float32)
    for _ in range(2):
        # Not its text: JAX 0.12 leaves out what lies within.
        lowered = jax.jit(negate_often(False)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu_v2" in lowered
        lowered = jax.jit(negate_often(True)).trace(x).lower(lowering_platforms=("cpu",)).as_text()
        assert "mosaic_gpu_v2" not in lowered
    chex.assert_trees_all_equal(jax.jit(negate_often(True))(x), -x)
    assert negate.__doc__ == "-x."
    chex.assert_trees_all_equal(negate(x), -x)  # outside of kernels


def test_operands_keep_their_structure():
    def body(operands, out):
        out[...] = operands["pair"][0][...] + operands["pair"][1][...]

    run = kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), interpret=True)
    chex.assert_trees_all_equal(run(dict(pair=[jnp.ones(128), jnp.ones(128)])), 2)


@pytest.mark.parametrize("ordered", [True, False])
def test_races_of_every_kernel_of_a_program_are_found(ordered):
    """The first of two kernels has a race if its two warpgroups do not meet before the second one reads."""

    def body(out, barrier):
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _():
            out[0] = jnp.int32(1)

        if ordered:
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        @pl.when(warpgroup == 1)
        def _():
            out[1] = out[0]

    shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    options = dict(num_threads=2, scratch_types=[plgpu.Barrier(num_arrivals=2)])
    run = kernel(body, out_type=shape, interpret=True, **options)
    # JAX 0.12 raises where 0.11 prints.
    found = pytest.raises((AssertionError, RuntimeError), match="1 of the interpreted kernels|RACE DETECTED")
    race = contextlib.nullcontext() if ordered else found
    with race, race_checked():
        jax.block_until_ready(run())
        jax.block_until_ready(jax.jit(negate_often(True))(jnp.zeros(128)))


def test_exchanges_and_votes_interpreted():
    def body(out, votes, scratch):
        channel = vectors.channels(256)
        total = vectors.butterfly(jnp.add, channel, 128, 64, scratch)
        out[...] = total
        thread = vectors.thread()
        votes[0] = vectors.count(jnp.where(thread < 5, 1, 0))
        votes[1] = vectors.lowest_bit(vectors.ballot(jnp.where((thread & 31) >= 7, 1, 0)))

    run = kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((256,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)),
        scratch_types=[plgpu.SMEM((256,), jnp.float32)],
        interpret=True,
    )
    out, votes = run()
    chex.assert_trees_all_equal(out, np.tile(np.arange(256).reshape(4, 64).sum(0), 4))
    chex.assert_trees_all_equal(votes, np.array([5, 7]))


def test_pools_are_checked_against_their_layout():
    rows = RowLayout(448, 64, 64)
    pools = [jnp.zeros((1, 2, 3, width), dtype) for width, dtype in ((448, jnp.uint8), (64, jnp.bfloat16))]
    check_pools(rows, (*pools, jnp.zeros((1, 2, 3, 8), jnp.uint8)))
    with pytest.raises(NotImplementedError, match=r"takes scale as float32\[1, 2, 3, 1\], got uint8\[1, 2, 3, 8\]"):
        check_pools(RowLayout(448, 64, None), (*pools, jnp.zeros((1, 2, 3, 8), jnp.uint8)))
    with pytest.raises(NotImplementedError, match="takes pools that hold a row"):
        empty = [jnp.zeros((1, 0, 3, width), jnp.uint8) for width in (64, 4)]
        check_pools(KeyLayout(128, 32, "e8m0", hadamard=True), tuple(empty))
    with pytest.raises(NotImplementedError, match="formats 'v4', 'v41' and 'per_entry'"):
        quantized(None)
    assert [RowLayout(n, 64, 64).scale_width for n in (64, 448, 512, 576)] == [8, 8, 8, 16]
