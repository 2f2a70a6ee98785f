"""Experts in pages of a GPU and its host: kernels compute the same bits, whatever lies where."""

import gc
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.expert_pages import CudaMemory, ExpertPages, Mover
from dsv4_jax.expert_pages.paged_experts import copy_to_host
from dsv4_jax.quant import QuantizedWeight


pytestmark = pytest.mark.gpu
E, INNER, HIDDEN = 8, 2048, 4096


@pytest.fixture(scope="module")
def memory():
    jax.block_until_ready(jnp.zeros(1))
    return CudaMemory(jax.devices()[0])


@pytest.fixture(scope="module")
def codes():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, shape, np.uint8) for shape in ((E, 2 * INNER, HIDDEN // 2), (E, HIDDEN, INNER // 2))]


def make(memory, codes, on_host):
    layer = [ExpertPages(memory, x.shape, on_host, jax.devices()[0]) for x in codes]
    for pages, data in zip(layer, codes, strict=True):
        for expert, rows in enumerate(data):
            pages.write(expert, rows)
    return layer


@pytest.fixture(scope="module")
def step():
    x = jax.random.normal(jax.random.key(0), (2, HIDDEN), jnp.bfloat16)
    selected, weights = jnp.array([[0, 5, 2], [7, 1, 5]], jnp.int32), jnp.full((2, 3), 0.5, jnp.float32)
    scales = jnp.full((E, 2 * INNER, HIDDEN // 32), 118, jnp.uint8), jnp.full((E, HIDDEN, INNER // 32), 118, jnp.uint8)

    @jax.jit
    def step(gate_up, down):
        matrices = [
            QuantizedWeight(x, scale, "FP4", jnp.dtype(jnp.bfloat16))
            for x, scale in zip((gate_up, down), scales, strict=True)
        ]
        return ops.experts(x, selected, weights, *matrices, limit=10.0)

    return step


def test_a_table_in_host_memory_is_read_from_there(memory):
    table, rows = jax.random.normal(jax.random.key(0), (1000, HIDDEN), jnp.bfloat16), jnp.array([0, 999, 7, 7])
    expected, free = np.asarray(table[rows]), memory.free_bytes()
    on_host = copy_to_host(memory, table)
    assert memory.free_bytes() > free - table.nbytes
    chex.assert_trees_all_equal(np.asarray(jax.jit(lambda x, i: x[i])(on_host, rows)), expected)


def test_kernels_compute_the_same_bits_before_and_after_moves(memory, codes, step):
    expected = np.asarray(step(*map(jnp.asarray, codes)))
    assert np.isfinite(expected).all() and expected.any()
    layer = make(memory, codes, np.arange(E) >= 4)
    assert [pages.on_host.sum() for pages in layer] == [4, 4]
    mover = Mover(memory, [layer])
    arrays = [pages.array for pages in layer]
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    for hot, cold in ((5, 0), (7, 1)):
        assert mover.stage(0, hot, cold)
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    mover.wait()
    assert mover.remap() == 2
    assert layer[0].on_host.tolist() == [True, True, False, False, True, False, True, False]
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    assert step._cache_size() == 1
    mover.close()


def test_the_memory_is_freed(memory, codes):
    before = memory.free_bytes()
    arrays = [pages.array for pages in make(memory, codes, np.arange(E) >= 4)]
    held = 4 * sum(x[0].nbytes for x in codes)
    assert before - memory.free_bytes() >= held
    del arrays
    for _ in range(100):
        gc.collect()
        if memory.free_bytes() == before:
            break
        time.sleep(0.02)
    assert memory.free_bytes() == before


def test_a_gpu_without_room_leaves_nothing(memory):
    before = memory.free_bytes()
    experts = before // (8 << 20) + 8
    with pytest.raises(MemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        ExpertPages(memory, (experts, 8 << 20), np.zeros(experts, bool), jax.devices()[0])
    assert memory.free_bytes() == before
