"""Lowered kernels are kept: programs lowered for a GPU, without one, in a cache folder of their own."""

import functools
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import jax.numpy as jnp
import loky
import numpy as np
import pytest
from jax import export

from pallas_kernels import indexer_topk
from pallas_kernels.runtime import lowering_cache
from tests.pallas_kernels.kernels import compile_in_process
from tests.programs import KERNELS_FOLDER


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are kept during a test."""
    monkeypatch.setattr(lowering_cache, "kernels_folder", KERNELS_FOLDER)
    new = dict(jax_enable_compilation_cache=True, jax_compilation_cache_dir=str(tmp_path))
    old = {name: getattr(jax.config, name) for name in new}
    for name, value in new.items():
        jax.config.update(name, value)
    yield tmp_path / "kernels"
    for name, value in old.items():
        jax.config.update(name, value)


@pytest.fixture
def exports(monkeypatch):
    """What was lowered anew, by name."""
    found = []
    original = export.export

    def counted(function, **options):
        found.append(function)
        return original(function, **options)

    monkeypatch.setattr(export, "export", counted)
    return found


def program(keys, k=64):
    """Text of a program of two equal kernels, as a new process would lower it."""
    jax.clear_caches()
    shapes = jax.ShapeDtypeStruct((2, keys), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def both(scores, lengths):
        select = functools.partial(indexer_topk, k=k)
        return select(scores, lengths), select(-scores, lengths)

    return jax.jit(both).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_lowered_once_for_all_processes(folder, exports, monkeypatch):
    first = program(1024)
    assert first.count("@mosaic_gpu_v2") == 1 and len(exports) == len(list(folder.iterdir())) == 1
    assert program(1024) == first and len(exports) == 1
    # Other shapes, other static arguments, other sources.
    program(2048)
    program(1024, k=32)
    monkeypatch.setattr(lowering_cache, "_versions", lambda: "others")
    program(1024)
    assert len(exports) == len(list(folder.iterdir())) == 4


def test_a_broken_file_is_replaced(folder, exports):
    first = program(1024)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    again = program(1024)
    assert len(exports) == 2
    # Before JAX 0.12, Mosaic numbers the kernels that a process lowers: JAX would not find its compiled program again.
    assert (again != first) == (jax.__version_info__ < (0, 12))
    assert program(1024) == again and len(exports) == 2


def test_what_the_kernel_does_not_take_is_refused_as_without_the_cache(folder):
    with pytest.raises(NotImplementedError, match="k of 1 to"):
        program(1024, k=0)
    assert not folder.exists()


def test_without_a_compilation_cache_nothing_is_kept(exports):
    assert program(1024).count("@mosaic_gpu_v2") == 1 and not exports


def refuse(lower):
    raise OSError("no more processes")


@pytest.mark.parametrize("broken", ["", "worker", "pool"])
def test_workers_lower_kernels(folder, exports, monkeypatch, broken):
    """Workers that cannot lower, or cannot start, are replaced by this process."""
    compiled = []
    with loky.ProcessPoolExecutor(1, env={"JAX_PLATFORMS": "cpu"}) as workers, ThreadPoolExecutor(1) as threads:
        if broken:
            failing = {"worker": lambda lower: threads.submit(int, "broken"), "pool": refuse}
            monkeypatch.setattr(workers, "submit", failing[broken])
        monkeypatch.setattr(lowering_cache, "_executors", lambda: (workers, threads))
        monkeypatch.setattr(lowering_cache, "_compile", compiled.append)
        made = program(1024)
    assert len(exports) == bool(broken) and len(list(folder.iterdir())) == len(compiled) == 1
    assert program(1024) == made and len(exports) == bool(broken)


@pytest.mark.gpu
def test_kept_kernels_find_the_same_on_gpu(folder):
    scores = np.random.default_rng(0).permuted(np.tile(np.arange(4096, dtype=np.float32), (3, 1)), axis=1)
    expected = np.sort(np.argsort(-scores, axis=1)[:, :64], axis=1)
    written = set()
    for _ in ("lowered", "kept"):
        jax.clear_caches()
        found = indexer_topk(jnp.asarray(scores), jnp.full((3,), 4096, jnp.int32), k=64)
        chex.assert_trees_all_equal(found, expected)
        written |= {(path.name, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert len(written) == 1  # by a worker


@pytest.mark.aot
def test_kept_kernels_write_in_place(tmp_path):
    """The second program's kernel comes from the folder."""
    compile_in_process(f"""
import jax, jax.numpy as jnp
from dsv4_jax.quant import kv_format
from pallas_kernels import Rings, append_swa
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # this host cannot load a GPU's programs
S, layout = jax.ShapeDtypeStruct, kv_format("v4").entries(448, 64).layout
pools = [S((2, 8, 128, width), dtype) for width, dtype in ((448, jnp.uint8), (64, jnp.bfloat16), (8, jnp.uint8))]
ints = S((4,), jnp.int32)

def twice(kv, slots, positions, *pools):
    for layer in (0, 1):
        pools = append_swa(kv, slots, positions, Rings(jnp.int32(layer), pools, 128, layout))
    return pools

for name in ("lowered", "kept"):
    jax.clear_caches()
    compiled = compile_for_h100(name, twice, S((4, 512), jnp.bfloat16), ints, ints, *pools, donate_argnums=(3, 4, 5))
    text = compiled.as_text()
    assert text.count("mosaic_gpu_v2") == 2, text
    assert " copy(" not in text and "copy-start" not in text, text
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * 8 * 128 * (448 + 128 + 8)
""")
    assert len(list((tmp_path / "kernels").iterdir())) == 1
