"""Kernels that were lowered once, kept for later processes beside JAX's compiled programs.

JAX keeps compiled programs (`jax_compilation_cache_dir`), but finds them by their lowered text. To lower the kernels of
one decode step takes 20 to 30 seconds of Python, most of it Mosaic's search for register layouts, and the text depends
on what else the process lowered before, because Mosaic numbers its kernels. So a kernel's lowered module is kept too,
as `jax.export` writes it. Its name is a hash of all that it follows from: the arguments' types, static arguments, the
kernels' sources, and the versions of JAX.
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


# Its text is Mosaic's own, of the same version of JAX: no stability across versions is needed.
_CHECKS = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]


def cached_trace(*static: str, writes: bool = False) -> Callable[[Callable], Callable]:
    """Decorates a kernel's public function: a program that calls it with the same shapes again traces it once.

    Lowering a kernel takes seconds and a model has dozens of layers; the lowered module is also kept on disk. Under
    `jax.vmap` calls run one after another: attention through a batched gather came out wrong on a GPU, with 32
    requests. `static` names the arguments, beside `interpret`, that are not arrays. `jax.vmap` does not take a function
    that `writes` in place.
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
                on_arrays = _cached_lowering(
                    on_arrays, f"{function.__module__} {function.__qualname__} {structure} {others}"
                )
            if not writes:
                return jax.custom_batching.sequential_vmap(on_arrays)(*arrays)
            # Keeps slices of operands out of the call: XLA fuses one with it and forgets that it writes in place.
            return on_arrays(*jax.lax.optimization_barrier(arrays))

        return jax.jit(call, static_argnames=(*static, "interpret"))

    return decorate


def _cached_lowering(function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """`function` of arrays, which calls kernels, in a program for one GPU; lowered only if no process has done so.

    Args:
      function: of arrays, to a pytree of arrays.
      key: says which function this is, static arguments included: equal keys, equal functions.
    """

    def call(*arrays):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        folder = _folder()
        if folder is None or not _is_local(arrays):
            return function(*arrays)
        structure = jax.tree.structure(jax.eval_shape(function, *shapes))

        def flat(*arrays):
            return tuple(jax.tree.leaves(function(*arrays)))

        name = hashlib.sha256(f"{_versions()} {key} {shapes}".encode()).hexdigest()
        path = folder / name
        exported = _read(path)
        if exported is None:
            exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=_CHECKS)(*shapes)
            _write(path, bytes(exported.serialize()))
        return jax.tree.unflatten(structure, exported.call(*arrays))

    return call


def _folder() -> Path | None:
    """Where lowered kernels are kept; None where JAX keeps no compiled programs either."""
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return Path(folder) / "kernels" if folder and "://" not in folder else None


def _is_local(arrays: Sequence[jax.Array]) -> bool:
    """Whether the program is for one device: within `jax.shard_map`, types say more than an exported function knows."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return all(mesh.empty or (mesh.size == 1 and not mesh.manual_axes) for mesh in meshes)


def _read(path: Path) -> export.Exported | None:
    """What the file holds; None where there is none, or not a whole one."""
    try:
        data = path.read_bytes()
        digest, data = data[:32], data[32:]
        return export.deserialize(bytearray(data)) if digest == hashlib.sha256(data).digest() else None
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """Writes the file in one piece; without it, as in a full or read-only folder, the next process lowers anew."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, path)


@functools.cache
def _versions() -> str:
    """Of JAX, and of the sources of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return " ".join([*(importlib.metadata.version(name) for name in ("jax", "jaxlib")), digest.hexdigest()])
