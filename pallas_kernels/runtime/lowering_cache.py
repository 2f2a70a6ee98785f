"""Lowered kernels: kept on disk, beside JAX's cache of compiled programs, and made in processes beside this one.

JAX finds a compiled program (in `jax_compilation_cache_dir`) by its lowered text. Lowering the kernels of one decode
step takes 20 to 30 seconds of Python, most of it Mosaic's search for register layouts. The text also depends on which
kernels the process lowered before, because Mosaic numbers them. So this cache keeps each kernel's lowered module, as
`jax.export` writes it. The file's name is a hash of all that the module depends on: the arguments' types, static
arguments, the kernels' sources, and the versions of JAX.

A kernel that no process has lowered is lowered by a worker process while this one goes on tracing, and then compiled by
a thread: XLA finds it compiled when it compiles the program, where it would compile one kernel after the other.
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


# A lowered kernel is read only by the version of JAX that wrote it, so it needs no stable format.
_CHECKS = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
logger = logging.getLogger("pallas_kernels")
MAX_WORKERS = 8  # a worker takes 0.4 GB of memory and 3 seconds to start


def cached_trace(*static: str, writes: bool = False) -> Callable[[Callable], Callable]:
    """Decorates a kernel's public function, so that a program traces it once for each set of shapes.

    Lowering a kernel takes seconds and a model has dozens of layers. The lowered module is also kept on disk. Under
    `jax.vmap` the calls run one after another: batched attention came out wrong on a GPU, with 32 requests.

    Args:
      static: names of the arguments, beside `interpret`, that are not arrays.
      writes: whether the function writes its arguments in place. Then `jax.vmap` does not take it.
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
            # XLA would fuse a slice of an operand with the call, and forget that the call writes in place.
            return on_arrays(*jax.lax.optimization_barrier(arrays))

        return jax.jit(call, static_argnames=(*static, "interpret"))

    return decorate


def _shapes(tree):
    """Returns a tree with ShapeDtypeStructs in place of its arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree)


def _call(on_arrays: Callable, function: Callable, args, kwargs, *arrays: jax.Array):
    """Calls a kernel's function on its arrays, in a form that is lowered only if no process has done so before.

    `args` and `kwargs` are all arguments of `function`, with shapes in place of the arrays.
    """
    folder = _folder()
    if folder is None or not _is_local(arrays):
        return on_arrays(*arrays)
    key = f"{_versions()} {function.__module__} {function.__qualname__} {jax.tree.flatten((args, kwargs))}"
    path = folder / hashlib.sha256(key.encode()).hexdigest()
    kept = _read(path)
    if kept is None:
        results = jax.eval_shape(on_arrays, *_shapes(arrays))  # refuses what the kernel does not take
        build = _build(path, function, args, kwargs)
    else:
        results = jax.tree.unflatten(kept.out_tree, kept.out_avals)
        build = functools.partial(lambda exported: exported, kept)
    # Within `jax.shard_map` types name the mesh, and the axes along which values differ.
    like = jax.typeof(arrays[0])
    mesh = jax.sharding.get_abstract_mesh()
    shards = [jax.NamedSharding(mesh, jax.P(*[None] * x.ndim)) for x in jax.tree.leaves(results)]
    types = tuple(
        like.update(x.shape, x.dtype, weak_type=False, sharding=shard)
        for x, shard in zip(jax.tree.leaves(results), shards, strict=True)
    )
    return jax.tree.unflatten(jax.tree.structure(results), _kernel_p.bind(*arrays, build=build, types=types))


def _run(*arrays, build, types):
    return jax.tree.leaves(build().call(*arrays))


# A call of a lowered kernel, whose module is needed only when the program is lowered.
_kernel_p = Primitive("lowered_kernel")
_kernel_p.multiple_results = True
_kernel_p.def_impl(_run)
_kernel_p.def_abstract_eval(lambda *arrays, build, types: types)
mlir.register_lowering(_kernel_p, mlir.lower_fun(_run, multiple_results=True))


def _build(path: Path, function: Callable, args, kwargs) -> Callable[[], export.Exported]:
    """Returns a function that returns the lowered kernel, which workers make meanwhile if there are any."""
    lower = functools.partial(_lower, path, function.__module__, function.__qualname__, args, kwargs)
    executors = _executors()
    if executors is None:
        return functools.cache(lambda: export.deserialize(bytearray(lower())))
    workers, compilers = executors
    try:
        lowering = workers.submit(lower)
    except Exception as error:  # the machine starts no processes, or has ended them
        lowering = Future()
        lowering.set_exception(error)
    return compilers.submit(_finish, lowering, lower).result


def _lower(path: Path, module: str, name: str, args, kwargs) -> bytes:
    """Lowers a kernel, of which `cached_trace` decorates the function, for a GPU; keeps and returns the module."""
    function = getattr(importlib.import_module(module), name).__wrapped__.__wrapped__
    on_arrays, shapes = on_leaves(function, args, kwargs, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    data = bytes(export.export(jax.jit(on_arrays), platforms=["cuda"], disabled_checks=_CHECKS)(*shapes).serialize())
    _write(path, data)
    return data


def _finish(lowering: Future[bytes], lower: Callable[[], bytes]) -> export.Exported:
    """Waits for a worker's kernel, and compiles it."""
    try:
        data = lowering.result()
    except Exception as error:
        logger.warning("a kernel is lowered without workers: %s", error)
        data = lower()
    exported = export.deserialize(bytearray(data))
    _compile(exported)
    return exported


def _compile(exported: export.Exported) -> None:
    """Compiles a kernel for the GPU in this process, in whose memory Mosaic keeps it."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    jax.jit(exported.call).lower(*shapes).compile()


@functools.cache
def _executors() -> tuple[Executor, Executor] | None:
    """Returns worker processes that lower, and threads that compile; None without a GPU or enough cores for them."""
    count = min(MAX_WORKERS, loky.cpu_count() // 2)
    if count < 2 or why_no_mosaic_gpu() is not None or not runs_all_blocks_at_once():
        return None
    # Idle workers end after a minute. loky warns when one ends just as a kernel is given to it, and starts another.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)
    workers = loky.ProcessPoolExecutor(count, timeout=60, env={"JAX_PLATFORMS": "cpu"})
    return workers, ThreadPoolExecutor(count, "compile-kernels")


def _folder() -> Path | None:
    """Returns the cache's folder, or None if JAX keeps no compiled programs in a local folder."""
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return Path(folder) / "kernels" if folder and "://" not in folder else None


def _is_local(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether the arrays lie on one device, or are its shards within `jax.shard_map`."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return all(mesh.empty or mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names) for mesh in meshes)


def _read(path: Path) -> export.Exported | None:
    """Returns the lowered kernel in the file, or None if the file is missing or incomplete."""
    try:
        data = path.read_bytes()
        digest = data[:32]
        data = data[32:]
        return export.deserialize(bytearray(data)) if digest == hashlib.sha256(data).digest() else None
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Writes the file atomically. If that fails, as in a read-only folder, the next process lowers the kernel again."""
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
