"""Lowered kernels on disk, and worker processes that lower kernels in parallel.

JAX keeps compiled programs in the folder `jax_compilation_cache_dir`, and finds them by their lowered text. So each
process still has to lower its programs. For the kernels of one decode step, this takes 20 to 30 seconds of Python, most
of it in Mosaic's search for register layouts. The lowered text also differs between processes, because Mosaic numbers
the kernels in the order in which a process lowers them. Therefore the lowered module of each kernel is stored, as
`jax.export` writes it, in the subfolder `kernels`. The name of a file is a hash of everything that the module depends
on: the arguments' types, the static arguments, the kernels' sources, and the versions of JAX.

On a GPU, a kernel that is not stored is lowered by a worker process, while this process continues to trace the program.
Then a thread of this process compiles the kernel. Worker processes and threads save time, because XLA would compile the
program's kernels one after another. `_executors` says when there are no worker processes.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import jax
import loky
from jax import export
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.runtime.atomic_write import atomic_write
from pallas_kernels.runtime.hardware import runs_all_blocks_at_once, why_no_mosaic_gpu
from pallas_kernels.runtime.pytrees import on_leaves


# Allows exports to contain Mosaic's custom calls, whose format may change in a later version of JAX. This is safe,
# because the name of a stored kernel's file depends on the version of JAX, so another version does not read the file.
_CHECKS = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
logger = logging.getLogger("pallas_kernels")
MAX_WORKERS = 8  # maximum number of worker processes; each takes 0.4 GB of memory and 3 seconds to start


def cached_trace(*static: str, writes: bool = False) -> Callable[[Callable], Callable]:
    """Returns a decorator that makes a program trace a kernel's public function only once per set of shapes.

    This saves time, because a model has dozens of layers, and lowering a kernel takes seconds. The lowered kernel is
    also stored on disk, unless it is interpreted. Under `jax.vmap` the kernel runs once for each element of the batch,
    one after another, because a kernel with a batch axis gave wrong results on a GPU (attention of 32 requests).

    Args:
      static: names of the static arguments; `interpret` is always static.
      writes: whether the function writes its arguments in place. If True, the function does not support `jax.vmap`.
    """

    def decorate(function):
        @functools.wraps(function)
        def call(*args, interpret=False, **kwargs):
            call_function = functools.partial(function, interpret=interpret)
            on_arrays, arrays = on_leaves(call_function, args, kwargs, lambda x: isinstance(x, jax.Array))
            if not interpret:
                on_arrays = functools.partial(_call, on_arrays, function, *_shapes((args, kwargs)))
            if not writes:
                return jax.custom_batching.sequential_vmap(on_arrays)(*arrays)
            # If an operand is a slice of an array, XLA would fuse the slice with the call, and the call could not write
            # the operand in place. The barrier prevents this fusion.
            return on_arrays(*jax.lax.optimization_barrier(arrays))

        return jax.jit(call, static_argnames=(*static, "interpret"))

    return decorate


def _shapes(tree):
    """Returns a tree with ShapeDtypeStructs in place of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree)


def _call(on_arrays: Callable, function: Callable, args, kwargs, *arrays: jax.Array):
    """Calls a kernel's function on arrays. Uses the lowered module that is stored on disk, if there is one.

    Args:
      on_arrays: the function, bound to all arguments except arrays.
      function: the function that `cached_trace` decorates.
      args, kwargs: all arguments of the function, with ShapeDtypeStructs in place of arrays.
      arrays: the arrays among the arguments.

    Returns:
      The results of the function.
    """
    folder = kernels_folder()
    if folder is None or not _is_local(arrays):
        return on_arrays(*arrays)
    key = f"{_versions()} {function.__module__} {function.__qualname__} {jax.tree.flatten((args, kwargs))}"
    path = folder / hashlib.sha256(key.encode()).hexdigest()
    stored = _read(path)
    if stored is None:
        results = jax.eval_shape(on_arrays, *_shapes(arrays))  # raises if the kernel does not take the arguments
        build = _build(path, function, args, kwargs)
    else:
        results = jax.tree.unflatten(stored.out_tree, stored.out_avals)
        build = functools.partial(lambda exported: exported, stored)
    # Within `jax.shard_map`, the types of the results have to name the mesh and the axes along which values differ. The
    # axes are copied from the type of the first array.
    array_type = jax.typeof(arrays[0])
    mesh = jax.sharding.get_abstract_mesh()
    leaves, structure = jax.tree.flatten(results)
    types = []
    for x in leaves:
        sharding = jax.NamedSharding(mesh, jax.P(*[None] * x.ndim))
        types.append(array_type.update(x.shape, x.dtype, weak_type=False, sharding=sharding))
    return jax.tree.unflatten(structure, _kernel_p.bind(*arrays, build=build, types=tuple(types)))


def _run(*arrays, build, types):
    return jax.tree.leaves(build().call(*arrays))


# JAX primitive that calls a lowered kernel. Its parameter `build` is a function that returns the kernel's module. The
# function is called when the surrounding program is lowered.
_kernel_p = Primitive("lowered_kernel")
_kernel_p.multiple_results = True
_kernel_p.def_impl(_run)
_kernel_p.def_abstract_eval(lambda *arrays, build, types: types)
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run, multiple_results=True))


def _build(path: Path, function: Callable, args, kwargs) -> Callable[[], export.Exported]:
    """Returns a function without arguments, `build`, that returns the lowered kernel.

    If there are worker processes, one of them starts to lower the kernel now, a thread then compiles it, and `build`
    waits for both. Otherwise the first call of `build` lowers the kernel.
    """
    lower = functools.partial(_lower, path, function.__module__, function.__qualname__, args, kwargs)
    executors = _executors()
    if executors is None:
        return functools.cache(lambda: export.deserialize(bytearray(lower())))
    workers, compilers = executors
    try:
        lowering = workers.submit(lower)
    except Exception as error:  # worker processes could not be started, or have ended
        lowering = Future()
        lowering.set_exception(error)
    return compilers.submit(_finish, lowering, lower).result


def _lower(path: Path, module: str, name: str, args, kwargs) -> bytes:
    """Lowers a kernel for a GPU, and returns the serialized module, which is also stored at `path`.

    Args:
      path: file to store the serialized module in.
      module: name of the Python module that defines the function that `cached_trace` decorates.
      name: name of this function.
      args, kwargs: all arguments of the function, with ShapeDtypeStructs in place of arrays.
    """
    function = getattr(importlib.import_module(module), name).__wrapped__.__wrapped__
    on_arrays, shapes = on_leaves(function, args, kwargs, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    data = bytes(export.export(jax.jit(on_arrays), platforms=["cuda"], disabled_checks=_CHECKS)(*shapes).serialize())
    _write(path, data)
    return data


def _finish(lowering: Future[bytes], lower: Callable[[], bytes]) -> export.Exported:
    """Waits until a worker has lowered a kernel, and compiles it. If the worker fails, `lower` runs in this process."""
    try:
        data = lowering.result()
    except Exception as error:
        logger.warning("a kernel is lowered without workers: %s", error)
        data = lower()
    exported = export.deserialize(bytearray(data))
    _compile(exported)
    return exported


def _compile(exported: export.Exported) -> None:
    """Compiles a kernel for the GPU. Mosaic keeps the compiled kernel in the memory of this process."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    jax.jit(exported.call).lower(*shapes).compile()


@functools.cache
def _executors() -> tuple[Executor, Executor] | None:
    """Returns (worker processes that lower kernels, threads that compile them).

    Returns None if the default device cannot run the kernels, if it has fewer than `MULTIPROCESSORS` multiprocessors,
    or if the machine has fewer than four CPU cores.
    """
    count = min(MAX_WORKERS, loky.cpu_count() // 2)
    if count < 2 or why_no_mosaic_gpu() is not None or not runs_all_blocks_at_once():
        return None
    # Idle workers end after a minute. If a worker ends just when it gets a kernel, loky warns and starts another one.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
    workers = loky.ProcessPoolExecutor(count, timeout=60, env={"JAX_PLATFORMS": "cpu"})
    return workers, ThreadPoolExecutor(count, "compile-kernels")


def kernels_folder() -> Path | None:
    """Returns the folder of lowered kernels, or None if JAX keeps no compiled programs in a local folder."""
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return Path(folder) / "kernels" if folder and "://" not in folder else None


def _is_local(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether each array lies on one device, or is a device's shard within `jax.shard_map` over all axes."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return all(mesh.empty or mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names) for mesh in meshes)


def _read(path: Path) -> export.Exported | None:
    """Returns the lowered kernel in a file, or None if the file is missing, unreadable or incomplete."""
    try:
        data = path.read_bytes()
        digest = data[:32]
        data = data[32:]
        return export.deserialize(bytearray(data)) if digest == hashlib.sha256(data).digest() else None
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Writes a file atomically: the SHA-256 digest of a lowered kernel, followed by the kernel.

    Errors, such as those of a read-only folder, are ignored. The next process then lowers the kernel again.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(hashlib.sha256(data).digest() + data)


@functools.cache
def _versions() -> str:
    """Returns the versions of JAX and a hash of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return " ".join([*(importlib.metadata.version(name) for name in ("jax", "jaxlib")), digest.hexdigest()])
