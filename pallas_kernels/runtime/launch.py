"""Kernels and their primitives: one body for the GPU and for the interpreter.

Pallas interprets kernels on the CPU, but not code that is written in MLIR. A function that needs such code is a
primitive: the decorated function is its meaning in jax.numpy, which the interpreter runs and whose docstring holds for
both, and the one below it, registered with `mosaic`, is what runs on a GPU:

    @primitive
    def divide_one(x: jax.Array) -> jax.Array:
        '''1 / x of [size] float32, correctly rounded.'''
        return 1 / x

    @divide_one.mosaic
    def _(x):
        def emit(x):
            return [ptx("rcp.rn.f32 $0, $1;", value, results=f32_type(), pure=True) for value in values(x)]

        return inline(emit, x, layout=layout, returns=x)

A kernel made by `kernel` calls it as `divide_one(x)`. Whether the kernel is interpreted is part of JAX's trace
context, so that nothing traced for one is taken for the other.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.runtime.jax_compat import apply_patches


_interpreting = jax.make_user_context(False)


def kernel(body: Callable[..., None], *, interpret: bool, waits_in_body: bool = False, **options) -> Callable:
    """`plgpu.kernel`, with primitives in the body, whose operands have the tree structure that they are passed in.

    Its blocks may start while those of the kernel before it end: programmatic dependent launch.

    Args:
      body: of the kernel.
      interpret: run on the CPU, interpreted, with the race detector on.
      waits_in_body: the body calls `wait_for_inputs` itself, before anything but reading what no kernel writes.
      options: as for `plgpu.kernel`.
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

    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else False
    return plgpu.kernel(traced, interpret=params, **options)


def wait_for_inputs() -> None:
    """Waits until the kernels before have ended; then what they wrote is visible to this thread."""
    if not interpreting():
        plgpu.griddepcontrol_wait()


def interpreting() -> bool:
    """Whether the kernel that is being traced is interpreted."""
    return _interpreting.value


class Primitive[**P, R]:
    """A function with an implementation for the interpreter and one for the GPU.

    As a decorator, `@primitive`, it takes the former, which has to be valid jax.numpy; see the module's docstring.
    """

    def __init__(self, interpreted: Callable[P, R]):
        self._interpreted = interpreted
        self._mosaic: Callable[P, R] | None = None
        functools.update_wrapper(self, interpreted)

    def mosaic(self, function: Callable[P, R]) -> Callable[P, R]:
        """Registers the implementation for the GPU; it has the same arguments."""
        self._mosaic = function
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = self._interpreted if interpreting() else self._mosaic
        assert chosen is not None, f"{self._interpreted.__name__} has no implementation for the GPU"
        return chosen(*args, **kwargs)


primitive = Primitive
