"""A store of compiled programs on disk, from which a new process takes a program without tracing or lowering it.

JAX's persistent compilation cache finds a program by its lowered text, so a step has to be traced and lowered first,
which takes seconds on the host. A file of this store holds an executable, serialized by
`jax.experimental.serialize_executable`, and the tree structure of its results. The file's name is a hash of everything
that the program depends on:

  * the function, its static arguments, and the tree structure of all arguments with their static fields,
  * types and shardings of the arguments' arrays,
  * the sources of `dsv4_jax` and `pallas_kernels`,
  * versions, devices, and the settings of JAX and XLA.

Executables are pickled, and loading a pickle runs code. So the folder must belong to the user, and no other user may
write into it. Files are written atomically and have a checksum. A file that is missing or incomplete, or that JAX
cannot load, is replaced.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import io
import logging
import os
import pickle
import platform
import threading
import time
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.extend.backend
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from dsv4_jax.common.private_folder import make_private_folder
from dsv4_jax.decode.step_launch import static_names
from dsv4_jax.ops.dispatch import default_implementation
from pallas_kernels.runtime.atomic_write import atomic_write


FOLDER = "DSV4_JAX_PROGRAMS"  # environment variable with the store's folder; without it there is no store
MAX_BYTES = 4 << 30  # if all files exceed this size, the least recently used ones are removed
logger = logging.getLogger(__name__)
# A thread holds this lock while it traces a step, so that the next thread can use the finished trace of the model.
# Tracing in parallel would save no time, because it needs the GIL.
TRACE = threading.Lock()
# A thread holds this lock while it changes JAX's setting `jax_enable_compilation_cache` of the whole process.
_JAX_CACHE = threading.Lock()
# The hash covers these packages by their sources or versions. The classes of a user's own model are in another package,
# so the programs of such a model are not stored.
_KNOWN = {"builtins", "dsv4_jax", "flax", "jax", "jaxlib", "ml_dtypes", "numpy", "pallas_kernels"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and the time that it took to make or load it.

    Attributes:
      call: the executable, a function of all arguments that are not static.
      seconds: {name of a phase, "trace", "lower" or "compile": its duration in seconds}. For a program loaded from
        disk, "compile" is the time to load it, and the other durations are 0.
    """

    call: jax.stages.Compiled
    seconds: dict[str, float]


class ProgramTable:
    """The programs of one model that this process has compiled or loaded.

    The key of a program has these parts:

    * its function and its static arguments,
    * the tree structure of the arguments other than the model,
    * the shapes, dtypes and shardings of these arguments' arrays,
    * the choice of `ops.use_implementation`.

    Attributes:
      compilations: number of programs compiled or loaded.
    """

    def __init__(self):
        self.compilations = 0
        self._programs: dict[Any, Future[Program | None]] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: Any) -> "ProgramTable":
        return self  # shared by all copies of a model, since programs are immutable

    def find(self, function: Any, args: tuple, options: Mapping[str, Any]) -> tuple[Program | None, tuple]:
        """Returns the program for the call `function(*args, **options)`, and the arguments to call it with.

        If several threads ask for the same program at once, one makes it and the others wait.

        Args:
          function: jitted function of (model, cache, ..), see `find_program`.
          args: positional arguments, the model first.
          options: keyword arguments, the static ones and possibly others.

        Returns:
          (program, its positional arguments). The program is None if `find_program` returns None; then call the jitted
          function instead.
        """
        if not os.environ.get(FOLDER):
            return None, args
        if not options.keys() <= static_names(function):  # options that are not static become positional arguments
            bound = inspect.signature(function).bind(*args, **options)
            bound.apply_defaults()  # otherwise `bound.args` would end before the first argument that is not given
            args = bound.args
            options = {name: value for name, value in bound.kwargs.items() if name in options}
        leaves, structure = jax.tree.flatten(args[1:])
        leaf_types = tuple([(np.shape(x), getattr(x, "dtype", type(x)), _sharding(x)) for x in leaves])
        key = function, structure, leaf_types, tuple(options.items()), default_implementation()
        program = self._programs.get(key)
        if program is None:
            new = Future[Program | None]()
            program = self._programs.setdefault(key, new)  # one thread's `new` gets into the table
            if program is new:
                try:
                    result = find_program(function, args, options)
                except BaseException as error:
                    del self._programs[key]  # so that a later call tries again
                    new.set_exception(error)
                else:
                    with self._lock:
                        self.compilations += result is not None
                    new.set_result(result)
        return program.result(), args


def find_program(function: Any, args: tuple, options: Mapping[str, Any]) -> Program | None:
    """Loads the program of a jitted function from the store, or compiles it and writes it to the store.

    Args:
      function: function of (model, cache, ..) whose last result is the updated cache. Its keyword-only arguments, and
        no others, are static.
      args: positional arguments.
      options: {name: value} of the static arguments.

    Returns:
      The program. None if there is no store, if there are several processes, or if the program depends on an object
      that the name of its file cannot describe.
    """
    begin = time.perf_counter()
    folder = _private_folder(os.environ.get(FOLDER))
    if folder is None or jax.process_count() > 1:
        return None
    try:
        path = folder / _name(function, args, options)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        logger.debug("no program of %s is kept: %s", function.__qualname__, error)
        return None
    with _reported(f"cannot load {function.__qualname__}"):
        if (data := _read(path)) is not None:
            executable = _load(data, args)
            return Program(executable, {"trace": 0.0, "lower": 0.0, "compile": time.perf_counter() - begin})

    program = compile_program(function, args, options, _without_jax_cache())
    *results, cache = program.call.out_tree.children()
    with _reported(f"cannot keep {function.__qualname__} in {folder}"):
        if cache != jax.tree.structure(args[1]):
            raise ValueError("its last result is not the updated cache")
        # Pytrees of zeros stand for the tree structures of the results.
        outputs = tuple(result.unflatten([0] * result.num_leaves) for result in results)
        _write(path, pickle.dumps((serialize(program.call)[0], outputs)))
    _remove_oldest(folder)
    return program


def _name(function, args, options):
    """Returns the name of a program's file: a hash of everything that the program of this call depends on.

    Raises PicklingError, TypeError or AttributeError if the program depends on an object that cannot be pickled, or
    whose class or function is outside the packages that the hash covers.
    """
    leaves, structure = jax.tree.flatten(args)
    call = _definition(function), structure, dict(options), [_describe(leaf) for leaf in leaves]
    description = io.BytesIO()
    _Pickler(description).dump((call, default_implementation(), _environment(), _sources()))
    return hashlib.sha256(description.getvalue()).hexdigest()


def _load(data, args):
    """Returns the executable from `data`, the content of a file, for calls with the positional arguments `args`."""
    payload, outputs = pickle.loads(data)
    cache = jax.tree.structure(args[1])
    out_tree = jax.tree.structure((*outputs, cache.unflatten(range(cache.num_leaves))))
    devices = _devices(jax.tree.leaves(args))
    return deserialize_and_load(payload, jax.tree.structure((args, {})), out_tree, execution_devices=devices)


def compile_program(
    function: Any, args: tuple, options: Mapping[str, Any], context: contextlib.AbstractContextManager | None = None
) -> Program:
    """Traces, lowers and compiles a jitted function for the call `function(*args, **options)`.

    The lowered program is compiled in the context manager `context`, if there is one.
    """
    times = [time.perf_counter()]
    with TRACE:
        traced = function.trace(*args, **options)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    with context or contextlib.nullcontext():
        executable = lowered.compile()
    times.append(time.perf_counter())
    return Program(executable, dict(zip(("trace", "lower", "compile"), np.diff(times).tolist(), strict=True)))


class _Pickler(pickle.Pickler):
    """Pickles objects to bytes that are the same in every process, and that differ for objects that differ."""

    def persistent_id(self, value: Any) -> Any:
        """Returns the id of a device; checks the package of a class or function, and returns None."""
        self.clear_memo()  # so that the bytes do not depend on which of several equal objects are the same object
        if isinstance(value, jax.Device):
            return value.id
        if isinstance(value, type | types.FunctionType):
            _definition(value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Reduces a dataclass to its fields, without the cached properties that it may hold."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return type(value), tuple(getattr(value, field.name) for field in dataclasses.fields(value))
        return NotImplemented


def _definition(kind: Any) -> str:
    """Returns the full name of a class or function; raises PicklingError if its package is not in `_KNOWN`."""
    if kind.__module__.partition(".")[0] not in _KNOWN:
        raise pickle.PicklingError(f"{kind.__module__}.{kind.__qualname__} is not of this package")
    return f"{kind.__module__}.{kind.__qualname__}"


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    """Returns the sharding of a jax.Array or jax.ShapeDtypeStruct; None for other leaves, such as NumPy arrays."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and isinstance(leaf, jax.ShapeDtypeStruct):
        return SingleDeviceSharding(jax.devices()[0])
    return sharding


def _describe(leaf: Any) -> tuple:
    """Returns the shape and dtype of an array, and its sharding and placement if it has a sharding."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))
    sharding = _sharding(leaf)
    if isinstance(sharding, NamedSharding):  # P() means the same as P(None)
        spec = PartitionSpec(*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
        sharding = sharding.update(spec=spec)
    committed = leaf.committed if isinstance(leaf, jax.Array) else leaf.sharding is not None
    return leaf.shape, str(leaf.dtype), leaf.weak_type, committed, sharding


def _devices(leaves: list[Any]) -> list[jax.Device]:
    """Returns the devices that run a program with these argument arrays, in the order of their mesh."""
    shardings = [sharding for sharding in map(_sharding, leaves) if sharding is not None]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    if meshes:
        return list(meshes[0].devices.flat)
    return list(shardings[0].device_set) if shardings else jax.devices()[:1]


@functools.cache
def _environment() -> tuple:
    """Describes the devices, versions and settings that all compiled programs of this process depend on."""
    backend = jax.extend.backend.get_backend()
    devices = jax.devices()
    settings = {name: str(value) for name, value in jax.config.values.items() if "cache" not in name}
    variables = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "MOSAIC_"))}
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")]
    cpu = [platform.machine(), platform.python_version()]
    with contextlib.suppress(OSError):  # XLA compiles for the instruction sets that this CPU has
        cpu += [line for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if "flags" in line]
    machine = backend.platform, backend.platform_version, [device.device_kind for device in devices], cpu
    return *machine, versions, sorted(settings.items()), sorted(variables.items())


@functools.cache
def _sources() -> str:
    """Returns a SHA-256 over the names and contents of all Python files of `dsv4_jax` and `pallas_kernels`."""
    digest = hashlib.sha256()
    packages = Path(__file__).parents[2]
    for package in ("dsv4_jax", "pallas_kernels"):
        for path in sorted((packages / package).rglob("*.py")):
            digest.update(str(path.relative_to(packages)).encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Turns JAX's persistent compilation cache off while the body runs, if the backend is a CPU.

    A CPU executable that JAX loads from its cache cannot be serialized again: the second copy lacks functions.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    with _JAX_CACHE:
        enabled = jax.config.jax_enable_compilation_cache
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()  # JAX reads the setting again only after a reset
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    """Logs an exception of the body as a warning "`what`: error" instead of raising it.

    The store is optional: without it a program is compiled.
    """
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", what, error)


@functools.cache
def _private_folder(path: str | None) -> Path | None:
    """Returns the store's folder, which is made if it does not exist.

    Returns None if `path` is None or empty, or if the folder cannot be made, belongs to another user, or other users
    may write into it. Faults of the folder are logged.
    """
    if not path:
        return None
    with _reported(f"compiled programs are not kept in {path}"):
        return make_private_folder(path)
    return None


def _read(path: Path) -> bytes | None:
    """Returns the content of a file without its checksum, and marks the file as used.

    Returns None if the file is missing, incomplete or damaged, or belongs to another user.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError:
        return None
    if status.st_uid != os.getuid() or hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the modification time is the time of last use
    return data[32:]


def _write(path: Path, data: bytes) -> None:
    """Writes a checksum and `data` to a file atomically."""
    with atomic_write(path) as file:
        file.write(hashlib.sha256(data).digest() + data)


def _remove_oldest(folder: Path) -> None:
    """Removes the least recently used files until the remaining files have at most `MAX_BYTES` bytes together."""
    with _reported(f"cannot tidy {folder}"):
        files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder))
        excess = sum(size for _, size, _ in files) - MAX_BYTES
        for _, size, path in files:
            if excess <= 0:
                break
            os.unlink(path)
            excess -= size
