"""The choice between the implementations of an op.

"xla"         the reference, a jnp function; runs everywhere.
"mosaic_gpu"  the kernel in `pallas_kernels`; runs on GPUs of compute capability 9.x (Hopper).
"interpret"   the same kernel in Pallas's interpreter, for tests; runs everywhere, but slowly.
"""

import contextlib
import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike

from dsv4_jax.quant import LayerSlice, layer_value
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


KNOWN = ("xla", "mosaic_gpu", "interpret")
REQUIRE_KERNELS = "DSV4_JAX_REQUIRE_KERNELS"
logger = logging.getLogger("dsv4_jax.ops")
# This holds the name that `use_implementation` set. As a JAX user context, the name is part of the key by which jit
# finds a trace, so a function that was traced for one implementation is traced again for another.
_default = jax.make_user_context(default_value=None)


class PreferXla(NotImplementedError):
    """Raised by a kernel for arguments with which XLA is faster. `dispatch` then runs "xla" without reporting it."""


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Chooses the implementation of ops that are called with `implementation=None` within this context.

    An op runs as "xla" if this implementation does not take its arguments. The choice holds for the current thread. A
    jitted function that was traced outside of the context is traced again inside.

    Args:
      name: "xla", "mosaic_gpu", "interpret", or None for the best one that the device and the arguments allow.

    Raises:
      ValueError: the name is unknown.
    """
    _check(name)
    with _default(name):
        yield


def default_implementation() -> str | None:
    """Returns the name that the innermost `use_implementation` context chose, or None."""
    return _default.value


def dispatch(
    op: str, implementation: str | None, *args: Any, xla: Callable[..., Any], kernel: Callable[..., Any], **options: Any
) -> Any:
    """Calls an op's reference or its kernel, as `xla(*args, **options)` or `kernel(*args, interpret=.., **options)`.

    Gradients always come from the reference.

    With `implementation=None`, an op falls back to "xla" if its kernel does not take the device or the arguments. The
    logger "dsv4_jax.ops" reports a fallback once for each reason, at level INFO, or at level DEBUG if the device runs
    no kernels at all. With the environment variable DSV4_JAX_REQUIRE_KERNELS=1, a fallback is an error. If the kernel
    raises PreferXla, the fallback is neither reported nor an error.

    Args:
      op: the op's public name, for messages.
      implementation: name of the implementation to run; None = the best one that takes the device and the arguments.
      args: pytrees of arrays, in which a weight may be a `LayerSlice`. A kernel takes arrays of one device only, see
        `why_not_local`.
      xla: the reference, which gets `LayerSlice.value` in the place of each `LayerSlice`.
      kernel: the kernel, with the additional argument `interpret`. Before it launches anything, it raises
        NotImplementedError for arguments that it does not take, and PreferXla for arguments with which XLA is faster. A
        kernel's result has no gradient if the reference returns None in its place.
      options: static arguments of both functions.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the implementation that `implementation` names does not take the device or the arguments, or
        a fallback is an error.
    """
    _check(implementation)
    default = _default.value
    name = implementation or default or "mosaic_gpu"
    if name == "xla":
        return xla(*layer_value(args), **options)
    # The device is not checked if use_implementation("mosaic_gpu") chose the kernel, because a program may be compiled
    # for a GPU on a machine that has none.
    checks_device = name == "mosaic_gpu" and (implementation is not None or default is None)
    unsupported = why_no_mosaic_gpu() if checks_device else None
    try:
        if reason := unsupported or why_not_local(args):
            raise NotImplementedError(reason)
        run_kernel = functools.partial(kernel, interpret=name == "interpret", **options)
        return _with_gradient_of(functools.partial(xla, **options), run_kernel)(*args)
    except NotImplementedError as error:
        if implementation is not None:
            raise NotImplementedError(f"{op} cannot run as {name!r}: {error}") from error
        if not isinstance(error, PreferXla):
            if os.environ.get(REQUIRE_KERNELS, "0") not in ("", "0"):
                raise NotImplementedError(f"{op} would run as 'xla', but {REQUIRE_KERNELS} is set: {error}") from error
            _report(op, str(error), logging.DEBUG if unsupported else logging.INFO)
    return xla(*layer_value(args), **options)


def check_bfloat16(dtype: DTypeLike) -> None:
    """Raises NotImplementedError unless a kernel's result is to have the dtype bfloat16."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise NotImplementedError(f"the kernel writes bfloat16, not dtype={jnp.dtype(dtype).name}")


def with_kernel[**P, R](kernel: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a reference to make it an op, whose argument `implementation` chooses the reference or the kernel.

    Calls go through `dispatch`, which gets arguments that hold arrays as `args`, and all other arguments as options.
    The reference and the kernel get all arguments by name. The reference is called with `implementation="xla"`, which
    it passes on to the ops that it calls.

    Args:
      kernel: function with the reference's arguments, but with `interpret` in the place of `implementation`.
    """

    def decorate(reference):
        signature = inspect.signature(reference)

        @functools.wraps(reference)
        def op(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            implementation = options.pop("implementation")
            arrays = {
                name: options.pop(name)
                for name, tree in list(options.items())
                if any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(tree))
            }

            def call_by_name(function, *values, **options):
                """Calls a function with the arrays by name."""
                return function(**dict(zip(arrays, values, strict=True)), **options)

            xla = functools.partial(call_by_name, reference, implementation="xla")
            run_kernel = functools.partial(call_by_name, kernel)
            return dispatch(reference.__name__, implementation, *arrays.values(), xla=xla, kernel=run_kernel, **options)

        return op

    return decorate


def _with_gradient_of(reference, kernel):
    """Returns a function with the values of `kernel` and the gradient of `reference`, which take the same arguments."""

    @jax.custom_vjp
    def call(*args):
        return kernel(*args)

    def backward(args, cotangents):
        """Returns the reference's gradients with respect to `args`."""
        values, gradient_function = jax.vjp(reference, *layer_value(args))
        # Where the reference returns None, the result of the kernel has no cotangent.
        cotangents = jax.tree.map(
            lambda value, cotangent: None if value is None else cotangent,
            values,
            cotangents,
            is_leaf=lambda value: value is None,
        )
        gradients = gradient_function(cotangents)
        # The cotangent of a LayerSlice belongs to its `value`. Its `stack` and `layer` have no cotangents.
        return jax.tree.map(
            lambda arg, cotangent: LayerSlice(cotangent, None, None) if isinstance(arg, LayerSlice) else cotangent,
            args,
            gradients,
            is_leaf=lambda arg: isinstance(arg, LayerSlice),
        )

    call.defvjp(lambda *args: (kernel(*args), args), backward)
    return call


def why_not_local(args: Any) -> str | None:
    """Returns the reason why a kernel cannot take arrays. None: the arrays lie on one device or are local shards.

    Local shards are the arrays of a function under `jax.shard_map`. In any other program over several devices, each
    device would gather all arrays and compute everything, because XLA cannot partition a kernel.

    While a function is traced, an array's mesh is that of the arguments of `jit` from which the array is computed. The
    option `in_shardings` of `jit` does not count, so put the arguments on the mesh before the call.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.axis_types and all(kind == AxisType.Manual for kind in context.axis_types):
        return None
    arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    devices = [_partitioned(mesh) for mesh in (context, *(jax.typeof(array).sharding.mesh for array in arrays))]
    devices += [array.sharding.num_devices for array in arrays if not isinstance(array, jax.core.Tracer)]
    if max(devices) > 1:
        return f"the program runs on {max(devices)} devices and XLA cannot partition a kernel; call it in jax.shard_map"
    return None


def _partitioned(mesh):
    """Returns the number of devices over which XLA partitions a program, those along mesh axes that are not manual."""
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in sizes if kind != AxisType.Manual)


@functools.cache
def _report(op, reason, level):
    logger.log(level, "%s runs as 'xla': %s", op, reason)


def _check(name):
    if name is not None and name not in KNOWN:
        raise ValueError(f"implementation={name!r} is not known; choose None or one of {KNOWN}")
