"""Experts in pages: values stay while memory moves, and nothing is left behind, whatever fails."""

import gc
import time
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.expert_pages import ExpertPages, Mover, dlpack
from dsv4_jax.expert_pages.paged_experts import copy_to_host
from tests.expert_pages.cpu_memory import CpuMemory, whole_pages


EXPERTS, SHAPE = 6, (6, 4, 2048)


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


def make(memory, data, on_host=range(3, 6)):
    pages = ExpertPages(memory, SHAPE, np.isin(np.arange(EXPERTS), list(on_host)), jax.devices()[0])
    for expert, rows in enumerate(data):
        pages.write(expert, rows)
    return pages


def test_an_array_over_pages(memory, data):
    pages = make(memory, data)
    chex.assert_trees_all_equal(np.asarray(pages.array), data)
    assert pages.on_host.tolist() == [False] * 3 + [True] * 3


def test_memory_lives_as_long_as_the_array(memory, data):
    array = make(memory, data).array
    gc.collect()
    assert not memory.is_empty()
    chex.assert_trees_all_equal(np.asarray(jax.jit(lambda x: x + jnp.uint8(1))(array)), data + np.uint8(1))


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32, jnp.bfloat16])
def test_a_copy_in_host_memory(memory, data, dtype):
    x = jnp.asarray(data[:, :, 5:]).astype(dtype)
    copied, room = copy_to_host(memory, x), (1 << 40) - whole_pages(x.nbytes)
    assert memory.room == {False: 1 << 40, True: room}
    chex.assert_trees_all_equal(jax.jit(jnp.copy)(copied), x)
    with mock.patch.object(memory, "map", side_effect=RuntimeError("cuMemMap")), pytest.raises(RuntimeError):
        copy_to_host(memory, x)
    assert memory.room[True] == room
    chex.assert_trees_all_equal(copied, x)


def test_a_step_compiles_once(memory, data):
    pages = make(memory, data)

    @jax.jit
    def step(x, y):
        return y + x.astype(jnp.int32).sum()

    jax.block_until_ready(step(pages.array, step(pages.array, jnp.int32(0))))
    assert step._cache_size() == 1


def test_moves_change_no_value(memory, data):
    layers = [[make(memory, data), make(memory, data[::-1])] for _ in range(2)]
    mover = Mover(memory, layers, batch=2)
    assert mover.stage(1, hot=4, cold=0) and mover.stage(0, hot=3, cold=2)
    assert not mover.stage(0, hot=5, cold=1)  # no spare memory is left
    mover.wait()
    assert mover.remap() == 2 and mover.remap() == 0
    assert mover.stage(1, hot=0, cold=4)  # and back
    mover.wait()
    mover.remap()
    for pages in layers:
        chex.assert_trees_all_equal(np.asarray(pages[0].array), data)
        chex.assert_trees_all_equal(np.asarray(pages[1].array), data[::-1])
    assert np.flatnonzero(layers[0][0].on_host).tolist() == np.flatnonzero(layers[0][1].on_host).tolist() == [2, 4, 5]
    assert np.flatnonzero(layers[1][0].on_host).tolist() == [3, 4, 5]
    assert memory.copied == 4 * data[:3].nbytes + 3 * 2 * 2 * data[0].nbytes
    mover.close()


def test_a_swap_in_the_wrong_direction_is_refused(memory, data):
    mover = Mover(memory, [[make(memory, data)]])
    with pytest.raises(ValueError, match="layer 0: expert 0 must be in host memory, expert 1 must not"):
        mover.stage(0, hot=0, cold=1)
    mover.stage(0, hot=4, cold=0)
    with pytest.raises(ValueError, match="neither may be on its way"):
        mover.stage(0, hot=5, cold=0)
    mover.close()


def test_closing_drops_staged_swaps(memory, data):
    pages = make(memory, data)
    mover = Mover(memory, [[pages]])
    mover.stage(0, hot=5, cold=0)
    mover.close()
    chex.assert_trees_all_equal(np.asarray(pages.array), data)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_nothing_stays_when_memory_is_short(room):
    memory = CpuMemory(host_bytes=room * 8192)
    with pytest.raises(MemoryError, match="8192 bytes on the host"):
        make(memory, [])
    assert memory.is_empty()


@pytest.mark.parametrize("call", range(6))
def test_nothing_stays_when_mapping_fails(monkeypatch, call):
    memory = CpuMemory()
    original, calls = memory.map, []

    def map_or_fail(*args, **options):
        calls.append(args)
        if len(calls) == call + 1:
            raise RuntimeError("cuMemSetAccess: CUDA_ERROR_INVALID_VALUE")
        original(*args, **options)

    monkeypatch.setattr(memory, "map", map_or_fail)
    with pytest.raises(RuntimeError, match="cuMemSetAccess"):
        make(memory, [])
    assert memory.is_empty()


def test_nothing_stays_when_jax_refuses_the_memory(monkeypatch):
    memory, before = CpuMemory(), set(dlpack._owned)
    monkeypatch.setattr("jax.dlpack.from_dlpack", mock.Mock(side_effect=RuntimeError("no such memory")))
    with pytest.raises(RuntimeError, match="no such memory"):
        make(memory, [])
    assert memory.is_empty() and set(dlpack._owned) <= before


def test_spare_memory_that_is_short_leaves_nothing(data):
    memory = CpuMemory(host_bytes=4 * 8192)
    pages = make(memory, data)
    ranges = dict(memory.ranges)
    with pytest.raises(MemoryError):
        Mover(memory, [[pages]], batch=2)
    assert memory.ranges == ranges
    del pages
    gc.collect()
    assert memory.is_empty()


def test_experts_of_part_of_a_page_are_refused(memory):
    with pytest.raises(ValueError, match=r"a matrix \[3, 1000\] of an expert has 3000 bytes; only whole pages of 4096"):
        ExpertPages(memory, (2, 3, 1000), np.zeros(2, bool), jax.devices()[0])


def test_data_of_another_size_is_refused(memory, data):
    with pytest.raises(ValueError, match="data must hold 8192 contiguous bytes, got 2048"):
        make(memory, data).write(0, data[0, 0])
