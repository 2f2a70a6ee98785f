"""Every public name has a docstring, which names its arguments or fields; the walk follows each package's exports."""

import dataclasses
import doctest
import importlib
import inspect
import re

import pytest

import pallas_kernels
from dsv4_jax import Engine, KVCacheManager, ops
from dsv4_jax.config import DSV4Config


PARTS = ("cache", "checkpoint", "cli", "decode", "engine", "expert_pages", "host", "nn", "ops", "quant", "serve")
PACKAGES = ["dsv4_jax", "dsv4_jax.config", *(f"dsv4_jax.{part}" for part in PARTS), "pallas_kernels"]


def public():
    """{qualified name of the definition: object} of everything exported, each once."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
            thing = getattr(module, name)
            own = getattr(thing, "__module__", "").split(".")[0] in ("dsv4_jax", "pallas_kernels")
            if own and (inspect.isclass(thing) or callable(thing)):
                found[f"{thing.__module__}.{thing.__qualname__}"] = inspect.unwrap(thing)
    return found


NAMES = public()
CLASSES = {name: thing for name, thing in NAMES.items() if inspect.isclass(thing)}
METHODS = {
    f"{name}.{method}": getattr(member, "__func__", member)
    for name, cls in CLASSES.items()
    if not getattr(cls, "_is_protocol", False)  # what a protocol's methods do is said where they are implemented
    for method, member in vars(cls).items()
    if not method.startswith(("_", "tree_")) and (inspect.isfunction(member) or isinstance(member, classmethod))
}
FUNCTIONS = {name: thing for name, thing in NAMES.items() if name not in CLASSES} | METHODS


def doc(name):
    """A name's docstring; of a method without one, that of the class that declared it."""
    owner = CLASSES.get(name.rpartition(".")[0])
    return inspect.getdoc(getattr(owner, name.rpartition(".")[2]) if owner else NAMES[name]) or ""


def test_the_walk_finds_them():
    assert len(NAMES) > 90 and len(METHODS) > 60
    assert "dsv4_jax.cache.handle.LayerCacheHandle.attend" in FUNCTIONS


def test_everything_has_a_docstring():
    # A dataclass without one gets its signature.
    signatures = {name for name in CLASSES if doc(name).startswith(f"{name.rpartition('.')[2]}(")}
    assert not {name for name in NAMES | METHODS if not doc(name)} | signatures


def described(text, heading):
    """The names that the section of a docstring describes: "name: ..." or "one, two: ..."."""
    section = re.search(rf"^{heading}:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    if section is None:
        return set()
    indent = re.match(r"[ \t]+", section[1])[0]
    entries = re.findall(rf"^{indent}([*\w]+(?:, [*\w]+)*)(?: \([^)]*\))?:", section[1], re.MULTILINE)
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def test_sections_are_read():
    text = "Adds.\n\nArgs:\n  x, y: [n] numbers\n    to add.\n  **more: others.\n\nReturns:\n  z: the sum."
    assert described(text, "Args") == {"x", "y", "more"} and described(text, "Attributes") == set()


def test_arguments_are_described():
    missing = []
    for name, function in FUNCTIONS.items():
        names = [arg for arg in inspect.signature(inspect.unwrap(function)).parameters if arg not in ("self", "cls")]
        found = described(doc(name), "Args")
        # A sentence may describe one or two obvious arguments.
        if found or len(names) > 2:
            missing += [f"{name}: {arg}" for arg in names if arg not in found]
    assert not missing


def test_fields_are_described():
    missing = []
    for name, cls in CLASSES.items():
        # The configuration's fields are those of config.json, as its docstring says.
        if dataclasses.is_dataclass(cls) and cls is not DSV4Config:
            fields = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
            found = set().union(*(described(inspect.getdoc(base) or "", "Attributes") for base in cls.__mro__))
            missing += [f"{name}: {field}" for field in fields if field not in found]
    assert not missing


@pytest.mark.parametrize("thing", [KVCacheManager, Engine, ops, pallas_kernels], ids=lambda thing: thing.__name__)
def test_examples_run(thing):
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing), {}, thing.__name__, None, None)
    report = []
    results = doctest.DocTestRunner().run(example, out=report.append)
    assert results.attempted > 4 and not results.failed, "".join(report)
