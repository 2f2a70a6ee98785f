"""Launches of kernels, and primitives, which are functions with separate code for a GPU and for the interpreter.

Pallas interprets kernels on the CPU, but cannot interpret code that is written in MLIR. A function that needs MLIR is
made a primitive. The decorated function is written in jax.numpy, for the interpreter. The function that is registered
with `mosaic` is the code for the GPU:

    @primitive
    def sync_warp() -> None:
        '''Waits for the warp's threads.'''

    sync_warp.mosaic(lambda: mlir.inline(mgpu.utils.warp_barrier))

The body of a kernel made by `kernel` calls the primitive as `sync_warp()`. A value in JAX's trace context says whether
the kernel is interpreted, so that JAX keeps separate traces for the interpreter and for the GPU. Outside of kernels, a
primitive is the function in jax.numpy.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.runtime.jax_compat import apply_patches


_interpreting = jax.make_user_context(True)


def kernel(
    body: Callable[..., None],
    *,
    interpret: bool,
    grid: Mapping[str, int] | None = None,
    cluster: Mapping[str, int] | None = None,
    waits_in_body: bool = False,
    **options,
) -> Callable:
    """Makes a kernel with `plgpu.kernel`. The body may call primitives.

    The launch is a programmatic dependent launch: blocks may start while blocks of the preceding kernel still run.

    Args:
      body: the kernel's code, a function of references to the operands and the outputs, and of keyword arguments for
        scratch.
      interpret: whether to interpret the kernel on the CPU, with the race detector on.
      grid, cluster: {name of an axis: its size}; None for one block.
      waits_in_body: whether the body calls `wait_for_inputs` itself. Until it does, the body may only read memory that
        no kernel writes, such as weights. If False, `wait_for_inputs` is called before the body.
      options: arguments of `plgpu.kernel`. If `num_threads`, the number of warpgroups of a block, is given, the body
        gets the index of its warpgroup from `axis_indices("warpgroup")`.

    Returns:
      A function of the operands, which may be pytrees. The body gets pytrees of references with the same structure.
    """

    if not interpret:
        apply_patches()

    def traced(*refs, **scratch):
        with _interpreting(interpret):
            if not interpret:
                plgpu.griddepcontrol_launch_dependents()
            if not waits_in_body:
                wait_for_inputs()
            body(*refs, **scratch)

    for name, axes in ("grid", grid or {}), ("cluster", cluster or {}):
        options |= {name: tuple(axes.values()), f"{name}_names": tuple(axes)}
    if "num_threads" in options:
        options["thread_name"] = "warpgroup"
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else False
    return plgpu.kernel(traced, interpret=params, **options)


def axis_indices(*names: str) -> tuple[jax.Array, ...]:
    """Returns the index of this block or warpgroup on each of the named axes of the launch, as int32 scalars."""
    return tuple(jax.lax.axis_index(name) for name in names)


def wait_for_inputs() -> None:
    """Waits until the preceding kernels have ended and their writes are visible. Does nothing if interpreted."""
    if not interpreting():
        plgpu.griddepcontrol_wait()


def interpreting() -> bool:
    """Returns whether primitives are computed by jax.numpy: in a kernel that is interpreted, and outside of kernels."""
    return _interpreting.value


class Primitive[**P, R]:
    """A function with two implementations: one for the interpreter, in jax.numpy, and one for the GPU."""

    def __init__(self, interpreted: Callable[P, R]):
        self._interpreted = interpreted
        self._mosaic: Callable[P, R] | None = None
        functools.update_wrapper(self, interpreted)

    def mosaic(self, function: Callable[P, R]) -> Callable[P, R]:
        """Registers the implementation for the GPU, a function of the primitive's arguments. Returns this function."""
        self._mosaic = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self._interpreted if interpreting() else self._mosaic
        assert chosen is not None, f"{self._interpreted.__name__} has no implementation for the GPU"
        return chosen(*args, **kwargs)


primitive = Primitive
