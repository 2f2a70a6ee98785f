"""Experts in pages of a GPU and its host: kernels compute the same bits, whatever lies where."""

import gc
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax import ops
from dsv4_jax.expert_pages import CudaMemory, ExpertStack, HostTables, Mover
from dsv4_jax.expert_pages.paged_experts import empty_on_host
from dsv4_jax.quant import QuantizedWeight


pytestmark = pytest.mark.gpu
E = 8
INNER = 2048
HIDDEN = 4096


@pytest.fixture(scope="module")
def memory():
    jax.block_until_ready(jnp.zeros(1))
    return CudaMemory(jax.devices()[0])


@pytest.fixture(scope="module")
def codes():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, shape, np.uint8) for shape in ((E, 2 * INNER, HIDDEN // 2), (E, HIDDEN, INNER // 2))]


def make(memory, codes, on_host):
    """Returns a stack of a single layer, with no axis of layers, for each matrix."""
    stacks = [ExpertStack(memory, x.shape, on_host[None], jax.devices()[0]) for x in codes]
    for stack, data in zip(stacks, codes, strict=True):
        stack.write(0, list(data))
    return stacks


@pytest.fixture(scope="module")
def step():
    x = jax.random.normal(jax.random.key(0), (2, HIDDEN), jnp.bfloat16)
    selected = jnp.array([[0, 5, 2], [7, 1, 5]], jnp.int32)
    weights = jnp.full((2, 3), 0.5, jnp.float32)
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
    table = jax.random.normal(jax.random.key(0), (1000, HIDDEN), jnp.bfloat16)
    rows = jnp.array([0, 999, 7, 7])
    expected = np.asarray(table[rows])
    free = memory.free_bytes()
    on_host, view = empty_on_host(memory, table.shape, table.dtype, table.device)
    view[...] = np.asarray(table)
    assert memory.free_bytes() > free - table.nbytes
    chex.assert_trees_all_equal(np.asarray(jax.jit(lambda x, i: x[i])(on_host, rows)), expected)


def test_a_table_on_a_mesh_has_its_shards_in_host_memory():
    """Every GPU of the machine has some columns of all rows."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",))
    where = NamedSharding(mesh, PartitionSpec(None, "model"))
    table = np.arange(1000 * HIDDEN, dtype=np.float32).reshape(1000, HIDDEN)
    array, shards = HostTables().empty(table.shape, table.dtype, where)
    for index, shard in shards:
        shard[...] = table[index]
    rows = jnp.array([0, 999, 7, 7])
    chex.assert_trees_all_equal(np.asarray(jax.jit(lambda x, i: x[i])(array, rows)), table[np.asarray(rows)])


def test_kernels_compute_the_same_bits_before_and_after_moves(memory, codes, step):
    expected = np.asarray(step(*map(jnp.asarray, codes)))
    assert np.isfinite(expected).all() and expected.any()
    stacks = make(memory, codes, np.arange(E) >= 4)
    layer = [stack.layers[0] for stack in stacks]
    assert [pages.on_host.sum() for pages in layer] == [4, 4]
    mover = Mover(memory, [layer])
    arrays = [stack.array for stack in stacks]
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    mover.copy([(0, 5, 0), (0, 7, 1)])
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    mover.remap()
    assert layer[0].on_host.tolist() == [True, True, False, False, True, False, True, False]
    chex.assert_trees_all_equal(np.asarray(step(*arrays)), expected)
    assert step._cache_size() == 1
    mover.close()


@pytest.mark.parametrize("keep", [lambda stack: stack.array, lambda stack: stack.layers[0]])
def test_the_memory_is_freed(memory, codes, keep):
    before = memory.free_bytes()
    kept = [keep(stack) for stack in make(memory, codes, np.arange(E) >= 4)]
    held = 4 * sum(x[0].nbytes for x in codes)
    assert before - memory.free_bytes() >= held
    del kept
    for _ in range(100):
        gc.collect()
        if memory.free_bytes() == before:
            break
        time.sleep(0.02)
    assert memory.free_bytes() == before


def test_a_gpu_without_room_leaves_nothing(memory):
    before = memory.free_bytes()
    experts = before // (16 << 20) + 8
    with pytest.raises(MemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        ExpertStack(memory, (2, experts, 8 << 20), np.zeros((2, experts), bool), jax.devices()[0])
    assert memory.free_bytes() == before


def test_layers_of_a_stack_before_and_after_moves(memory):
    """The array has 4.5 GiB, so that 32 bits do not count its bytes; half of each layer's experts are the host's."""
    layers = 9
    experts = 64
    on_host = np.stack([np.arange(experts) % 2 == layer % 2 for layer in range(layers)])
    stack = ExpertStack(memory, (layers, experts, 2048, 4096), on_host, jax.devices()[0])
    assert stack.array.nbytes == 9 << 29
    random = np.random.default_rng(0).integers(0, 256, (8 << 20) + 4096 * layers * experts, np.uint8)

    def codes(layer, expert):
        start = 4096 * (layer * experts + expert)
        return random[start : start + (8 << 20)]

    for layer in range(layers):
        stack.write(layer, [codes(layer, expert) for expert in range(experts)])

    @jax.jit
    def read(x, layer, expert):
        return x[layer, expert]

    def check():
        for layer in range(layers):
            for expert in (0, 1, layer, 30, 31, experts - 2, experts - 1):
                chex.assert_trees_all_equal(np.asarray(read(stack.array, layer, expert)).ravel(), codes(layer, expert))

    check()
    mover = Mover(memory, [[pages] for pages in stack.layers], batch=3)
    mover.copy([(0, 0, 1), (8, 62, 63), (3, 31, 30)])
    check()
    mover.remap()
    # The spare memory goes on to another layer, and one pair goes back.
    mover.copy([(7, 1, 0), (0, 1, 0)])
    mover.remap()
    check()
    assert [int(pages.on_host.sum()) for pages in stack.layers] == [experts // 2] * layers
    assert stack.layers[8].on_host[[62, 63]].tolist() == [False, True]
    mover.close()
