"""The choice between the implementations of an op.

"xla"         the jnp reference; runs everywhere.
"mosaic_gpu"  the kernel in `pallas_kernels`; runs on GPUs of compute capability 9.x (Hopper).
"interpret"   the same kernel body, interpreted; runs everywhere, slowly; for tests.
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
import numpy as np
from jax.sharding import AxisType

from dsv4_jax.quant import LayerSlice, layer_value
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


KNOWN = ("xla", "mosaic_gpu", "interpret")
REQUIRE_KERNELS = "DSV4_JAX_REQUIRE_KERNELS"
logger = logging.getLogger("dsv4_jax.ops")
# Part of the key of each of JAX's caches: a function traced for one implementation is traced again for another.
_default = jax.make_user_context(default_value=None)


class PreferXla(NotImplementedError):
    """Raised by a kernel for arguments with which XLA is faster; the fallback is not reported."""


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Makes `name` the implementation of ops that are called with `implementation=None` and whose arguments it takes.

    It is "xla", "mosaic_gpu", "interpret", or None for the best one that the device and the arguments allow; another
    name raises ValueError. The choice is part of the key of jit's cache: a jitted function that was traced outside is
    traced again inside. It holds for the current thread.
    """
    _check(name)
    with _default(name):
        yield


def default_implementation() -> str | None:
    """Returns the name that `use_implementation` chose here, or None."""
    return _default.value


def dispatch(
    op: str, implementation: str | None, *args: Any, xla: Callable[..., Any], kernel: Callable[..., Any], **options: Any
) -> Any:
    """Calls an op's reference or its kernel, as `xla(*args, **options)` or `kernel(*args, interpret=.., **options)`.

    The gradient is the reference's, whichever computes the values. With `implementation=None` an op whose kernel
    refuses the device or the arguments runs as "xla". The logger "dsv4_jax.ops" reports it once for each reason: at
    level INFO, or DEBUG where the device runs no kernels at all. The environment variable DSV4_JAX_REQUIRE_KERNELS=1
    turns such a fallback into an error.

    Args:
      op: the op's public name, for messages.
      implementation: None for the best one that takes the device and the arguments, or the name of exactly one.
      args: pytrees of arrays, in which a weight may be a `LayerSlice`. A kernel takes arrays of one device only, see
        `why_not_local`.
      xla: the reference, which gets the values of each `LayerSlice`.
      kernel: the kernel, with the additional argument `interpret`. Before anything is launched it raises
        NotImplementedError for what it does not take, and PreferXla where XLA is the better choice. A result that the
        reference returns as None has no gradient.
      options: static arguments of both.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation does not take the device or the arguments.
    """
    _check(implementation)
    default = _default.value
    name = implementation or default or "mosaic_gpu"
    if name == "xla":
        return xla(*layer_value(args), **options)
    # Within use_implementation("mosaic_gpu") a program may be compiled for a GPU that is not here.
    ask = name == "mosaic_gpu" and (implementation is not None or default is None)
    unsupported = why_no_mosaic_gpu() if ask else None
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


def with_kernel[**P, R](kernel: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates an op: its body is the reference, and its argument `implementation` chooses, see `dispatch`.

    Arguments that hold arrays are the `args` of `dispatch`, and all others its options. Both functions get them by
    name. The body is called with `implementation="xla"`, which it passes on to other ops.
    """

    def decorate(reference):
        signature = inspect.signature(reference)

        @functools.wraps(reference)
        def op(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            implementation = options.pop("implementation")
            arrays = {name: options.pop(name) for name in list(options) if _holds_arrays(options[name])}

            def named(function, *values, **options):
                return function(**dict(zip(arrays, values, strict=True)), **options)

            xla = functools.partial(named, reference, implementation="xla")
            run_kernel = functools.partial(named, kernel)
            return dispatch(reference.__name__, implementation, *arrays.values(), xla=xla, kernel=run_kernel, **options)

        return op

    return decorate


def _holds_arrays(tree):
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(tree))


def _with_gradient_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the values of `kernel` and the gradient of `reference`, both of the same pytrees."""

    @jax.custom_vjp
    def call(*args):
        return kernel(*args)

    def backward(args, cotangents):
        values, pull = jax.vjp(reference, *layer_value(args))
        present = functools.partial(jax.tree.map, is_leaf=lambda value: value is None)
        pulled = pull(present(lambda value, cotangent: None if value is None else cotangent, values, cotangents))
        # A stack has no gradient: that of its layer is the gradient of the slice's value.
        return jax.tree.map(
            lambda arg, cotangent: LayerSlice(cotangent, None, None) if isinstance(arg, LayerSlice) else cotangent,
            args,
            pulled,
            is_leaf=lambda arg: isinstance(arg, LayerSlice),
        )

    call.defvjp(lambda *args: (kernel(*args), args), backward)
    return call


def why_not_local(args: Any) -> str | None:
    """Returns None if all arrays lie on one device or are shards within `jax.shard_map`; else the reason why not.

    XLA cannot partition a kernel: in a program over several devices each would gather and compute everything. While a
    function is traced, an array's type has the mesh of the arguments that it is computed from. It lacks the
    `in_shardings` of `jit`: put the arguments on the mesh before the call.
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
    """The number of devices over which XLA partitions a program on a mesh: the product of the axes not manual."""
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in sizes if kind != AxisType.Manual)


@functools.cache
def _report(op, reason, level):
    logger.log(level, "%s runs as 'xla': %s", op, reason)


def _check(name):
    if name is not None and name not in KNOWN:
        raise ValueError(f"implementation={name!r} is not known; choose None or one of {KNOWN}")
