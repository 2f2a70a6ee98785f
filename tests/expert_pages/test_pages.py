"""Experts in pages: values stay while memory moves, and nothing is left behind, whatever fails."""

import gc
import time
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.expert_pages import ExpertStack, Mover, dlpack
from dsv4_jax.expert_pages.paged_experts import empty_on_host
from tests.expert_pages.cpu_memory import CpuMemory, whole_pages


LAYERS = 3
EXPERTS = 6
SHAPE = (6, 4, 2048)
# The experts of each layer that lie in host memory.
ON_HOST = (3, 4, 5), (0, 2, 4), (0, 1, 5)


@pytest.fixture
def memory():
    memory = CpuMemory()
    yield memory
    for _ in range(100):  # JAX's threads drop their references a little after a program's end
        gc.collect()
        if memory.is_empty():
            break
        time.sleep(0.02)
    assert memory.is_empty()


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)


def make(memory, on_host=ON_HOST):
    rows = np.stack([np.isin(np.arange(EXPERTS), experts) for experts in on_host])
    return ExpertStack(memory, (len(rows), *SHAPE), rows, jax.devices()[0])


def make_layer(memory, data):
    """Returns the pages of a stack of one layer."""
    stack = make(memory, ON_HOST[:1])
    stack.write(0, list(data))
    return stack.layers[0]


def on_host(stack):
    return tuple(tuple(np.flatnonzero(pages.on_host)) for pages in stack.layers)


def test_every_expert_of_a_stack_has_its_bytes(memory):
    data = np.random.default_rng(0).integers(0, 256, (LAYERS, *SHAPE), np.uint8)
    stack = make(memory)
    assert memory.room[True] == (1 << 40) - 9 * data[0, 0].nbytes == memory.room[False]
    for layer in (2, 0, 1):
        stack.write(layer, list(data[layer]))
    chex.assert_trees_all_equal(np.asarray(stack.array), data)
    assert on_host(stack) == ON_HOST
    (nbytes,) = memory.ranges.values()
    assert nbytes == data.nbytes
    # The second layer again, in pieces, of which some come from addresses of the GPU.
    pieces = data[0].reshape(2 * EXPERTS, -1)
    stack.write(1, [piece.ctypes.data if i % 3 else piece for i, piece in enumerate(pieces)])
    chex.assert_trees_all_equal(np.asarray(stack.array), data[[0, 0, 2]])


def test_a_layer_of_its_own_has_no_axis_of_layers(memory, data):
    stack = ExpertStack(memory, SHAPE, np.arange(EXPERTS)[None] >= 3, jax.devices()[0])
    stack.write(0, list(data))
    chex.assert_trees_all_equal(np.asarray(stack.array), data)
    assert on_host(stack) == ((3, 4, 5),)


def test_a_stack_of_more_bytes_than_32_bits_count(memory):
    """It has the range of V4-Flash: 20 layers of 2 GiB. Its memory is made when it is touched."""
    layers = 20
    experts = 4
    rows = 1 << 14
    columns = 1 << 15
    on_host = np.arange(layers * experts).reshape(layers, experts) % 3 == 0
    stack = ExpertStack(memory, (layers, experts, rows, columns), on_host, jax.devices()[0])
    assert list(memory.ranges.values()) == [layers << 31] and stack.array.nbytes == layers << 31
    pieces = rows * columns // 4096
    for layer, pages in enumerate(stack.layers):
        for expert in range(experts):
            for piece in (0, pieces - 1):
                marks = np.full(4096, 7 * layer + 40 * expert + (piece > 0), np.uint8)
                pages.write(expert, marks, piece, pieces)

    @jax.jit
    def corners(x, layer, expert):
        return jnp.stack([x[layer, expert, 0, 0], x[layer, expert, -1, -1]])

    for layer in range(layers):
        for expert in range(experts):
            mark = np.uint8(7 * layer + 40 * expert)
            values = np.asarray(corners(stack.array, layer, expert))
            chex.assert_trees_all_equal(values, np.array([mark, mark + np.uint8(1)]))


@pytest.mark.parametrize("keep", [lambda stack: stack.array, lambda stack: stack.layers[1].array])
def test_memory_lives_as_long_as_the_array_or_the_pages_of_a_layer(memory, data, keep):
    stack = make(memory)
    for layer in range(LAYERS):
        stack.write(layer, list(data))
    kept = keep(stack)
    del stack
    gc.collect()
    assert not memory.is_empty()
    added = np.asarray(jax.jit(lambda x: x + jnp.uint8(1))(kept))
    chex.assert_trees_all_equal(added, np.stack([data + np.uint8(1)] * LAYERS))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32, jnp.bfloat16])
def test_an_array_in_host_memory(memory, data, dtype):
    x = jnp.asarray(data[:, :, 5:]).astype(dtype)
    device = jax.devices()[0]
    copied, view = empty_on_host(memory, x.shape, x.dtype, device)
    view[...] = np.asarray(x)
    room = (1 << 40) - whole_pages(x.nbytes)
    assert memory.room == {False: 1 << 40, True: room}
    chex.assert_trees_all_equal(jax.jit(jnp.copy)(copied), x)
    with mock.patch.object(memory, "map", side_effect=RuntimeError("cuMemMap")), pytest.raises(RuntimeError):
        empty_on_host(memory, x.shape, x.dtype, device)
    assert memory.room[True] == room
    chex.assert_trees_all_equal(copied, x)


def test_a_step_compiles_once(memory):
    array = make(memory).array

    @jax.jit
    def step(x, y):
        return y + x.astype(jnp.int32).sum()

    jax.block_until_ready(step(array, step(array, jnp.int32(0))))
    assert step._cache_size() == 1


def test_moves_change_no_value(memory):
    """Two matrices in two stacks of the same layers, whose spare memory goes from layer to layer."""
    data = np.random.default_rng(0).integers(0, 256, (2, LAYERS, *SHAPE), np.uint8)
    stacks = [make(memory), make(memory)]
    for stack, layers in zip(stacks, data, strict=True):
        for layer, matrices in enumerate(layers):
            stack.write(layer, list(matrices))
    written = memory.copied
    nbytes = data[0, 0, 0].nbytes
    mover = Mover(memory, list(zip(*(stack.layers for stack in stacks), strict=True)), batch=2)
    mover.copy([(1, 4, 1), (0, 3, 2)])
    assert mover.swaps == [(1, 4, 1), (0, 3, 2)] and on_host(stacks[0]) == ON_HOST
    mover.remap()
    mover.remap()  # nothing is left to do
    assert not mover.swaps
    mover.copy([(1, 1, 4), (2, 5, 2)])  # one goes back
    mover.remap()
    for stack, layers in zip(stacks, data, strict=True):
        chex.assert_trees_all_equal(np.asarray(stack.array), layers)
        assert on_host(stack) == ((2, 4, 5), (0, 2, 4), (0, 1, 2))
    assert memory.copied == written + 4 * 2 * 2 * nbytes
    mover.close()


def test_a_swap_in_the_wrong_direction_is_refused(memory, data):
    mover = Mover(memory, [[make_layer(memory, data)]])
    with pytest.raises(ValueError, match="layer 0: expert 0 must be in host memory, expert 1 must not"):
        mover.copy([(0, 0, 1)])
    assert not mover.swaps
    mover.close()


def test_copied_swaps_are_remapped_before_others_are_copied(memory, data):
    mover = Mover(memory, [[make_layer(memory, data)]])
    mover.copy([(0, 5, 0)])
    with pytest.raises(ValueError, match="1 swaps are copied already: remap them first"):
        mover.copy([(0, 4, 1)])
    mover.close()


def test_closing_drops_copied_swaps(memory, data):
    pages = make_layer(memory, data)
    mover = Mover(memory, [[pages]])
    mover.copy([(0, 5, 0)])
    mover.close()
    chex.assert_trees_all_equal(np.asarray(pages.array[0]), data)


@pytest.mark.parametrize("room", [0, 1, 8])
def test_nothing_stays_when_memory_is_short(room):
    memory = CpuMemory(host_bytes=room * 8192)
    with pytest.raises(MemoryError, match="8192 bytes on the host"):
        make(memory)
    assert memory.is_empty()


@pytest.mark.parametrize("call", [0, 1, 7, 17])
def test_nothing_stays_when_mapping_fails(monkeypatch, call):
    memory = CpuMemory()
    original = memory.map
    calls = []

    def map_or_fail(*args, **options):
        calls.append(args)
        if len(calls) == call + 1:
            raise RuntimeError("cuMemSetAccess: CUDA_ERROR_INVALID_VALUE")
        original(*args, **options)

    monkeypatch.setattr(memory, "map", map_or_fail)
    with pytest.raises(RuntimeError, match="cuMemSetAccess"):
        make(memory)
    assert memory.is_empty()


def test_nothing_stays_when_jax_refuses_the_memory(monkeypatch):
    memory = CpuMemory()
    before = set(dlpack._owned)
    monkeypatch.setattr("jax.dlpack.from_dlpack", mock.Mock(side_effect=RuntimeError("no such memory")))
    with pytest.raises(RuntimeError, match="no such memory"):
        make(memory)
    assert memory.is_empty() and set(dlpack._owned) <= before


def test_spare_memory_that_is_short_leaves_nothing(data):
    memory = CpuMemory(host_bytes=4 * 8192)
    pages = make_layer(memory, data)
    ranges = dict(memory.ranges)
    with pytest.raises(MemoryError):
        Mover(memory, [[pages]], batch=2)
    assert memory.ranges == ranges
    del pages
    gc.collect()
    assert memory.is_empty()


def test_experts_of_part_of_a_page_lie_on_the_gpu_only(memory):
    message = r"an expert of the matrices \[2, 3, 1000\] has 3000 bytes; only whole pages of 4096"
    with pytest.raises(ValueError, match=message):
        ExpertStack(memory, (2, 3, 1000), np.array([[False, True]]), jax.devices()[0])
    stack = ExpertStack(memory, (2, 3, 1000), np.zeros((1, 2), bool), jax.devices()[0])
    data = np.random.default_rng(0).integers(0, 256, (2, 3, 1000), np.uint8)
    stack.write(0, list(data))
    chex.assert_trees_all_equal(np.asarray(stack.array), data)
    assert not stack.layers[0].on_host.any()
    del stack
    gc.collect()
    assert memory.is_empty()


def test_data_of_another_size_is_refused(memory, data):
    with pytest.raises(ValueError, match="data must hold 8192 contiguous bytes, got 2048"):
        make_layer(memory, data).write(0, data[0, 0])
