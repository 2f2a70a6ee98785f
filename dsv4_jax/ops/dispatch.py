"""Which implementation of an op runs.

"xla"         the jnp reference: runs everywhere.
"mosaic_gpu"  the kernel in `pallas_kernels`: on GPUs of compute capability 9.x (Hopper).
"interpret"   the same kernel body, interpreted: runs everywhere, slowly; for tests.
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AxisType

from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


KNOWN = ("xla", "mosaic_gpu", "interpret")
REQUIRE_KERNELS = "DSV4_JAX_REQUIRE_KERNELS"
logger = logging.getLogger("dsv4_jax.ops")
# A part of the key of every cache of JAX's: what was traced for one choice is not used for another.
_default = jax.make_user_context(default_value=None)


class PreferXla(NotImplementedError):
    """Raised by a kernel where XLA is the better choice: unlike a kernel that is missing, no user needs to know."""


@contextlib.contextmanager
def use_implementation(name: str | None) -> Iterator[None]:
    """Within it, ops called with `implementation=None` take `name` where they have it and it takes the arguments.

    The choice is part of the key of jit's cache: a jitted function that was traced outside is traced again inside. It
    holds for the current thread.

    Args:
      name: "xla", "mosaic_gpu", "interpret", or None for the best one that the device and the arguments allow.

    Raises:
      ValueError: the name is unknown.
    """
    _check(name)
    with _default(name):
        yield


def implementations(xla: Callable, kernel: Callable) -> dict[str, Callable]:
    """What `run` chooses from, of an op whose kernel takes `interpret=` beside the op's arguments."""
    kernels = {"mosaic_gpu": False, "interpret": True}
    return {"xla": xla} | {name: functools.partial(kernel, interpret=value) for name, value in kernels.items()}


def run(op: str, implementations: Mapping[str, Callable], implementation: str | None, *args) -> Any:
    """Calls an op's implementation.

    With `implementation=None` an op whose kernel does not take the device or the arguments runs as "xla". It says so
    once for each reason, in the logger "dsv4_jax.ops": at level INFO, or DEBUG where the device has no kernels at all.
    With the environment variable DSV4_JAX_REQUIRE_KERNELS=1 it raises the reason instead.

    Args:
      op: the op's public name, for messages.
      implementations: name -> function of `args`. A kernel raises NotImplementedError, before anything is launched,
        for shapes, dtypes or formats that it does not take, and PreferXla where XLA is the better choice.
      implementation: None for the best one that takes the device and the arguments, or the name of exactly one.
      args: the op's arguments. A kernel takes arrays of one device only, see `why_not_local`.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation is missing or does not take the device or the arguments.
    """
    _check(implementation)
    if implementation is not None and implementation not in implementations:
        raise NotImplementedError(f"{op} has no implementation {implementation!r}; it has {sorted(implementations)}")
    default = _default.value
    name = implementation or default or "mosaic_gpu"
    if name == "xla" or name not in implementations:
        return implementations["xla"](*args)
    # Within use_implementation("mosaic_gpu") a program may be compiled for a GPU that is not here.
    ask = name == "mosaic_gpu" and (implementation is not None or default is None)
    unsupported = why_no_mosaic_gpu() if ask else None
    try:
        if reason := unsupported or why_not_local(args):
            raise NotImplementedError(reason)
        return implementations[name](*args)
    except NotImplementedError as error:
        if implementation is not None:
            raise NotImplementedError(f"{op} cannot run as {name!r}: {error}") from error
        if not isinstance(error, PreferXla):
            if os.environ.get(REQUIRE_KERNELS, "0") not in ("", "0"):
                raise NotImplementedError(f"{op} would run as 'xla', but {REQUIRE_KERNELS} is set: {error}") from error
            _report(op, str(error), logging.DEBUG if unsupported else logging.INFO)
    return implementations["xla"](*args)


def with_gradient_of(reference: Callable, kernel: Callable) -> Callable:
    """A function that computes what `kernel` does and has the gradient of `reference`, both of the same arrays.

    What a kernel returns behind the results that the reference has has no gradient.
    """

    @jax.custom_vjp
    def call(*arrays):
        return kernel(*arrays)

    def backward(arrays, cotangents):
        values, pull = jax.vjp(reference, *arrays)
        return pull(cotangents[: len(values)] if isinstance(values, tuple) else cotangents)

    call.defvjp(lambda *arrays: (kernel(*arrays), arrays), backward)
    return call


def why_not_local(args: Any) -> str | None:
    """None where the arrays lie on one device, or are one device's parts under `jax.shard_map`; else the reason.

    XLA cannot partition a kernel: in a program over several devices each would gather and compute everything. While a
    function is traced, an array's type knows the mesh of the arguments that it comes from. Of `jit`'s own
    `in_shardings` it knows nothing: put the arguments on the mesh before the call.

    Args:
      args: a pytree; leaves that are no arrays say nothing.
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
    """Devices over which XLA partitions a program on a mesh: those along axes that are not manual."""
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return math.prod(size for size, kind in sizes if kind != AxisType.Manual)


@functools.cache
def _report(op, reason, level):
    logger.log(level, "%s runs as 'xla': %s", op, reason)


def _check(name):
    if name is not None and name not in KNOWN:
        raise ValueError(f"implementation={name!r} is not known; choose None or one of {KNOWN}")
