"""Programs are compiled while weights are read, and the engine runs these."""

import queue

import jax
import pytest

from dsv4_jax.checkpoint import load_checkpoint, save_release
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel, program_store
from dsv4_jax.decode.program_store import FOLDER
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.parallel.mesh import make_mesh
from tests.engine.test_engine import drain
from tests.paths import DATA


# A layer with a window only, and one with CSA.
CONFIG = DSV4Config.from_hf(DATA / "official_fp8").first_layers(2)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    save_release(DeepseekV4ForCausalLM(CONFIG), folder)
    return folder


def from_files(release, on_outline, mesh=None):
    return load_checkpoint(release, mesh=mesh, on_outline=on_outline)


def quantized(release, on_outline, mesh=None):
    return load_checkpoint(release, mesh=mesh, weights="quantized", on_outline=on_outline)


def random(_, on_outline, mesh=None):
    return random_model(CONFIG, mesh, on_outline=on_outline)


@pytest.mark.parametrize(
    ("load", "mesh"), [(from_files, None), (from_files, {"model": 2}), (quantized, None), (random, None)]
)
def test_an_engine_runs_programs_that_began_before_its_weights(load, mesh, release, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "steps"))
    asked = queue.SimpleQueue()
    find_program = program_store.find_program
    monkeypatch.setattr(program_store, "find_program", lambda *args: asked.put(args) or find_program(*args))
    mesh = mesh and make_mesh(mesh)
    outlines = []

    def on_outline(module):
        outlines.append(CompiledModel(module))
        Engine.begin_programs(outlines[0], manager(module.config), token_budget=8)
        for _ in range(2):
            asked.get(timeout=120)  # before any weight is read

    def manager(config):
        return KVCacheManager(config, num_blocks=4, max_requests=2, max_context=256, mesh=mesh)

    module = load(release, on_outline, mesh)
    engine = Engine(outlines[0].with_weights(module), manager(module.config), token_budget=8)
    engine.warm_up()
    assert asked.empty() and outlines[0].compilations == 2
    other = Engine(module, manager(module.config), token_budget=8)
    requests = [one.add([5, 6, 7], max_new_tokens=4) for one in (engine, other)]
    drain(engine)
    drain(other)
    assert requests[0].generated == requests[1].generated


def test_a_program_that_failed_is_tried_again(monkeypatch):
    monkeypatch.setenv(FOLDER, "folder")
    table = program_store.ProgramTable()
    program = program_store.Program(jax.jit(abs).lower(1.0).compile(), {})
    results = iter([MemoryError("the device is full"), program])

    def find_program(*args):
        if isinstance(result := next(results), Exception):
            raise result
        return result

    monkeypatch.setattr(program_store, "find_program", find_program)
    args = ("model", "cache")
    with pytest.raises(MemoryError):
        table.find(drain, args, {})
    assert table.find(drain, args, {}) == (program, args) and table.compilations == 1
