"""What `dsv4_jax` offers: names that are imported when they are used."""

import ast
import importlib
import pydoc
import types
from collections import Counter
from pathlib import Path

import pytest

import dsv4_jax
import pallas_kernels
from dsv4_jax.decode import decode_loop, decode_step, forward, sample_step


@pytest.mark.parametrize("name", dsv4_jax.__all__)
def test_every_name_is_found(name):
    found = getattr(dsv4_jax, name)
    if isinstance(found, types.ModuleType):
        assert found is importlib.import_module(f"dsv4_jax.{name}")
    else:
        assert found.__name__ == name and found.__module__.startswith("dsv4_jax.")


def test_other_names_are_no_attributes():
    assert "Engine" in dir(dsv4_jax) and not hasattr(dsv4_jax, "engin")


def test_no_two_modules_or_classes_share_a_name():
    rooms = Path(dsv4_jax.__file__).parent, Path(pallas_kernels.__file__).parent
    files = [file for room in rooms for file in room.rglob("*.py") if file.name != "__init__.py"]
    modules = Counter(file.stem for file in files if file.parent.name != "ops")  # an op has its kernel's name
    trees = [ast.parse(file.read_bytes()) for file in files]
    classes = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(classes) > 100
    del classes["Config"]  # the tuning choices of a kernel, beside it
    assert not [name for name, count in [*modules.items(), *classes.items()] if count > 1]


@pytest.mark.parametrize("step", [forward, decode_step, sample_step, decode_loop])
def test_help_shows_a_compiled_step_as_the_function_that_it_is(step):
    text = pydoc.plain(pydoc.render_doc(step))
    assert f"{step.__name__}(model: " in text and "Args:" in text and "PjitFunction" not in text
