"""A cache of lowered kernels on disk, beside JAX's cache of compiled programs.

JAX finds a compiled program (in `jax_compilation_cache_dir`) by its lowered text. Lowering the kernels of one decode
step takes 20 to 30 seconds of Python, most of it Mosaic's search for register layouts. The text also depends on which
kernels the process lowered before, because Mosaic numbers them. So this cache keeps each kernel's lowered module, as
`jax.export` writes it. The file's name is a hash of all that the module depends on: the arguments' types, static
arguments, the kernels' sources, and the versions of JAX.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export


# A lowered kernel is read only by the version of JAX that wrote it, so it needs no stable format.
_CHECKS = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]


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
            leaves, structure = jax.tree.flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

            def on_arrays(*arrays):
                merged = list(leaves)
                for i, array in zip(places, arrays, strict=True):
                    merged[i] = array
                args, kwargs = jax.tree.unflatten(structure, merged)
                return function(*args, interpret=interpret, **kwargs)

            arrays = [leaves[i] for i in places]
            if not interpret:
                others = [leaf for i, leaf in enumerate(leaves) if i not in places]
                key = f"{function.__module__} {function.__qualname__} {structure} {others}"
                on_arrays = _cached_lowering(on_arrays, key)
            if not writes:
                return jax.custom_batching.sequential_vmap(on_arrays)(*arrays)
            # XLA would fuse a slice of an operand with the call, and forget that the call writes in place.
            return on_arrays(*jax.lax.optimization_barrier(arrays))

        return jax.jit(call, static_argnames=(*static, "interpret"))

    return decorate


def _cached_lowering(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Returns a function from arrays to a pytree in a form that is lowered only if no process has done so before.

    `key` identifies the function and its static arguments.
    """

    def call(*arrays):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        folder = _folder()
        if folder is None or not _is_local(arrays):
            return function(*arrays)
        structure = jax.tree.structure(jax.eval_shape(function, *shapes))

        def flat(*arrays):
            return tuple(jax.tree.leaves(function(*arrays)))

        path = folder / hashlib.sha256(f"{_versions()} {key} {shapes}".encode()).hexdigest()
        exported = _read(path)
        if exported is None:
            exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=_CHECKS)(*shapes)
            _write(path, bytes(exported.serialize()))
        return jax.tree.unflatten(structure, exported.call(*arrays))

    return call


def _folder() -> Path | None:
    """Returns the cache's folder, or None if JAX keeps no compiled programs in a local folder."""
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return Path(folder) / "kernels" if folder and "://" not in folder else None


def _is_local(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether the program is for one device: an exported function loses the types within `jax.shard_map`."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return all(mesh.empty or (mesh.size == 1 and not mesh.manual_axes) for mesh in meshes)


def _read(path: Path) -> export.Exported | None:
    """Returns the lowered kernel in the file, or None if the file is missing or incomplete."""
    try:
        data = path.read_bytes()
        digest, data = data[:32], data[32:]
        return export.deserialize(bytearray(data)) if digest == hashlib.sha256(data).digest() else None
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Writes the file atomically. If that fails, as in a read-only folder, the next process lowers the kernel again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, path)


@functools.cache
def _versions() -> str:
    """Returns the versions of JAX and a hash of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return " ".join([*(importlib.metadata.version(name) for name in ("jax", "jaxlib")), digest.hexdigest()])
