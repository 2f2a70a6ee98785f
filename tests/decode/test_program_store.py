"""Compiled programs are kept on disk, and found again without tracing; what cannot be loaded is compiled."""

import functools
import os
import pickle
import subprocess
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.decode import CompiledModel, program_store
from dsv4_jax.decode.program_store import FOLDER, ProgramTable, find_program
from dsv4_jax.ops import use_implementation
from dsv4_jax.parallel.mesh import make_mesh


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="scale")
def toy_step(model, cache, batch, bias=None, *, scale=1):
    y = (model["w"] + batch).sum() * scale
    return (y if bias is None else (y, bias)), {"rows": cache["rows"].at[0].set(y.astype(cache["rows"].dtype))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A store that takes functions of tests too."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "steps"))
    monkeypatch.setattr(program_store, "_KNOWN", program_store._KNOWN | {"tests"})
    return tmp_path / "steps"


def toy_args(size=4):
    return {"w": jnp.arange(3.0)}, {"rows": jnp.zeros(size)}, np.ones(3, np.float32)


def traced(scale=1, args=None, options=None):
    """Whether the program had to be traced, after comparing its results with the function's."""
    args = toy_args() if args is None else args
    options = dict(scale=scale) if options is None else options
    program = find_program(toy_step, args, options)
    expected = toy_step(args[0], jax.tree.map(jnp.copy, args[1]), *args[2:], **options)
    chex.assert_trees_all_equal(program.call(*args), expected)
    assert all(x.is_deleted() for x in jax.tree.leaves(args[1]))  # donated
    return program.seconds["trace"] > 0


def test_a_program_is_found_again(folder):
    assert traced() and not traced()
    # All that programs depend on is part of the name.
    changes = (
        dict(scale=2), dict(args=toy_args(5)), dict(args=(*toy_args(), jnp.ones(2))),
        dict(args=(toy_args()[0], {"rows": jnp.zeros(4, jnp.bfloat16)}, np.ones(3, np.float32))),
        dict(args=jax.device_put(toy_args(), jax.devices()[1])),
        dict(args=jax.device_put(toy_args(), jax.NamedSharding(make_mesh({"model": 2}), jax.P()))),
    )  # fmt: skip
    for change in changes:
        args = change.pop("args", None)
        copy = None if args is None else (args[0], jax.tree.map(jnp.copy, args[1]), *args[2:])
        assert traced(args=args, **change) and not traced(args=copy, **change), change
    with use_implementation("xla"):
        assert traced()


def test_arguments_by_name_need_not_follow_one_another(folder):
    """An argument that is given by name, behind one that is not given."""

    @functools.partial(jax.jit, donate_argnames="cache")
    def step(model, cache, batch, left_out=None, bias=None):
        return batch.sum() + bias, cache

    table = ProgramTable()
    program, args = table.find(step, toy_args(), {"bias": np.float32(2)})
    assert program is not None and float(program.call(*args)[0]) == 5
    again, args = table.find(step, (*toy_args(), None, np.float32(3)), {})
    assert again is program and float(again.call(*args)[0]) == 6


def test_programs_of_changed_sources_are_compiled_again(folder, monkeypatch):
    assert traced()
    monkeypatch.setattr(program_store, "_sources", lambda: "other sources")
    assert traced() and not traced()
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["torn", "garbage", "foreign", "empty", "link"])
def test_what_does_not_load_is_compiled_and_replaced(folder, damage, tmp_path, caplog):
    assert traced()
    for path in list(folder.iterdir()):
        data = path.read_bytes()
        if damage == "torn":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "garbage":
            program_store._write(path, b"no pickle")
        elif damage == "foreign":
            program_store._write(path, pickle.dumps(types.SimpleNamespace(a=1)))
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
    assert traced() and not traced()
    assert ("cannot load toy_step" in caplog.text) == (damage in ("garbage", "foreign"))


def test_a_folder_that_others_can_write_is_not_used(folder, caplog):
    folder.mkdir()
    folder.chmod(0o777)
    assert find_program(toy_step, toy_args(), dict(scale=1)) is None
    assert "chmod 700" in caplog.text and not list(folder.iterdir())
    table = ProgramTable()
    assert table.find(toy_step, toy_args(), {})[0] is None


def test_the_folder_and_its_files_are_the_users_alone(folder):
    assert traced()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_the_least_recently_used_files_are_removed(folder, monkeypatch):
    for scale in (1, 2, 3):
        traced(scale)
    for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)):
        os.utime(path, (1e9 + age, 1e9 + age))
    assert not traced(1)  # used now
    size = max(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(program_store, "MAX_BYTES", int(2.5 * size))
    assert traced(4)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2.5 * size
    assert not traced(1) and traced(2)


def test_objects_of_unknown_classes_are_not_kept(folder, monkeypatch):
    """The sources of a user's own model are not hashed, so its program could be another one tomorrow."""
    monkeypatch.setattr(program_store, "_KNOWN", {"builtins", "jax", "numpy"})
    assert find_program(toy_step, toy_args(), {}) is None
    assert not list(folder.iterdir())


def test_without_a_store_functions_are_called(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    args = toy_args()
    assert ProgramTable().find(toy_step, args, {}) == (None, args)


def test_a_model_counts_what_it_compiles_or_loads(folder):
    for expected in (1, 1):
        model = CompiledModel({"w": jnp.arange(3.0)})
        _, cache, batch = toy_args()
        for _ in range(2):
            (y, _), cache = model.run(_toy_step_of_model, cache, batch, bias=jnp.ones(2), scale=2)
        assert float(y) == 12.0 and model.compilations == expected
    assert len(list(folder.iterdir())) == 1


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="scale")
def _toy_step_of_model(model, cache, batch, bias=None, *, scale=1):
    return toy_step(model.module, cache, batch, bias, scale=scale)


_STEPS = """
import tests.conftest
import dataclasses, hashlib
import jax, numpy as np
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import CompiledModel, BatchedSamplingParams
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.decode.conftest import make_manager
from tests.paths import TINY
config = DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()])
model, manager = CompiledModel(DeepseekV4ForCausalLM(config)), make_manager(config)
slot, events = manager.admit(), []
jax.monitoring.register_event_duration_secs_listener(lambda event, _, **more: events.append((event, more)))
before = manager.init_cache()
sampling = BatchedSamplingParams.of([GREEDY] * 3)
output, cache = model.sample_step(before, manager.prepare_forward({slot: [5, 6]}), None, sampling)
assert all(x.is_deleted() for x in jax.tree.leaves(before)) and model.compilations == 1
print(hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves((output, cache)))).hexdigest())
print([event for event, more in events if "sample_step" in str(more)])
"""


@pytest.mark.slow
def test_another_process_neither_traces_nor_lowers(tmp_path):
    """A model's step: equal to the last bit, and the cache is donated."""
    env = os.environ | {FOLDER: str(tmp_path)}
    outputs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, env=env, timeout=500)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    (first, events), (second, none) = outputs
    assert first == second and "trace" in events and none == "[]"
