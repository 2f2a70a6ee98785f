"""Kernels and their primitives, whose bodies run on a GPU and in the interpreter.

Pallas interprets kernels on the CPU, but not code that is written in MLIR. A function that needs such code is a
primitive. The decorated function states its meaning in jax.numpy, for the interpreter; the function registered with
`mosaic` is the code for the GPU:

    @primitive
    def sync_warp() -> None:
        '''Waits for the warp's threads.'''

    sync_warp.mosaic(lambda: mlir.inline(mgpu.utils.warp_barrier))

A kernel made by `kernel` calls it as `sync_warp()`. JAX's trace context holds whether the kernel is interpreted, so
that JAX does not reuse a trace made for the other case.
"""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.runtime.jax_compat import apply_patches


_interpreting = jax.make_user_context(False)


def kernel(
    body: Callable[..., None],
    *,
    interpret: bool,
    grid: Mapping[str, int] | None = None,
    cluster: Mapping[str, int] | None = None,
    waits_in_body: bool = False,
    **options,
) -> Callable:
    """Returns `plgpu.kernel` of a body that may call primitives, with programmatic dependent launch.

    Its blocks may start while those of the previous kernel end. Operands may be pytrees; the body gets references in
    the same structure. With `num_threads`, the warpgroups of a block are the axis "warpgroup".

    Args:
      body: the kernel's code, a function of references.
      interpret: whether to interpret the kernel on the CPU, with the race detector on.
      grid, cluster: the size of each axis by its name; None for one block.
      waits_in_body: whether the body calls `wait_for_inputs` itself, and before that only reads memory that no kernel
        writes, such as weights.
      options: arguments of `plgpu.kernel`.
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
    """Returns this block's, or warpgroup's, index on each axis of the launch, int32 scalars."""
    return tuple(jax.lax.axis_index(name) for name in names)


def wait_for_inputs() -> None:
    """Waits until the previous kernels have ended and their writes are visible to this thread."""
    if not interpreting():
        plgpu.griddepcontrol_wait()


def interpreting() -> bool:
    """Returns whether the kernel that is being traced is interpreted."""
    return _interpreting.value


class Primitive[**P, R]:
    """A function with an implementation in jax.numpy for the interpreter and one for the GPU; see the module."""

    def __init__(self, interpreted: Callable[P, R]):
        self._interpreted = interpreted
        self._mosaic: Callable[P, R] | None = None
        functools.update_wrapper(self, interpreted)

    def mosaic(self, function: Callable[P, R]) -> Callable[P, R]:
        """Registers the implementation for the GPU, which takes the same arguments."""
        self._mosaic = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self._interpreted if interpreting() else self._mosaic
        assert chosen is not None, f"{self._interpreted.__name__} has no implementation for the GPU"
        return chosen(*args, **kwargs)


primitive = Primitive
