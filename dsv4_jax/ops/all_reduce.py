"""Collectives over the mesh axis "model", the devices that a model is sharded over."""

import contextlib
import contextvars
import functools
import math
import operator
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call
from jaxtyping import Array, Float, Shaped, UInt32

from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.quant import round_to
from pallas_kernels.all_reduce import MAX_VALUES, all_reduce as all_reduce_kernel


# The table of mailbox addresses for sums that are traced within `with_mailboxes` or `use_mailboxes`; None elsewhere.
_mailboxes: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("mailboxes", default=None)


def all_reduce(x: Float[Array, "..."], *, implementation: str | None = None) -> Float[Array, "..."]:
    """Returns the sum of x over the mesh axis "model", with the same bits on all devices.

    The sum is taken in float32 in the order of the devices, and rounded once to the dtype of x. The result is x itself
    outside of `jax.shard_map` over a mesh with this axis.

    Args:
      x: [...] this device's term of the sum, in any floating dtype.
      implementation: None, "xla" (`jax.lax.all_gather` or `all_to_all`) or "mosaic_gpu". The kernel takes up to 524,288
        values in bfloat16, on the GPUs of one process, within `with_mailboxes`.
    """
    if not _is_sharded():
        return x
    return dispatch("all_reduce", implementation, x, _mailboxes.get(), xla=_all_reduce_xla, kernel=_all_reduce_kernel)


@contextlib.contextmanager
def with_mailboxes(row: UInt32[Array, "..."] | None) -> Iterator[None]:
    """Lets kernels in a program that is traced within this context exchange values through mailboxes.

    A mailbox is a buffer on each GPU that the other GPUs can write, see `pallas_kernels.mgpu.mailbox`. The program
    gathers the addresses of all mailboxes first. This also synchronizes the devices before the first sum, which is
    necessary: CUDA cannot load a program's kernels on a device on which a kernel waits for another device.

    Args:
      row: this device's row of `parallel.mailboxes.make_mailboxes`. None: XLA computes the sums.
    """
    table = None
    if row is not None:
        # This device's index, its mailbox's address and all mailboxes' addresses, each as two uint32 halves.
        row = row.reshape(2, 2)
        table = jnp.concatenate([row, jax.lax.all_gather(row[1], MODEL_AXIS)]).reshape(-1)
    with use_mailboxes(table):
        yield


@contextlib.contextmanager
def use_mailboxes(table: UInt32[Array, "n"] | None) -> Iterator[None]:
    """Makes sums that are traced within this context use the given table of mailboxes.

    This is for functions whose traces are reused by several programs. Such a function takes the result of `mailboxes`
    as an argument, and traces its body within this context. Otherwise its trace would hold the table of the first
    program.
    """
    token = _mailboxes.set(table)
    try:
        yield
    finally:
        _mailboxes.reset(token)


def mailboxes() -> UInt32[Array, "n"] | None:
    """Returns the table of mailboxes with which a kernel can sum over devices; None if XLA has to compute the sum."""
    return _mailboxes.get() if _is_sharded() else None


def reduce_scatter(x: Float[Array, "T ..."]) -> Float[Array, "S ..."]:
    """Returns this device's share of the rows of `all_reduce(x)`.

    Args:
      x: [T, ...] this device's term of the sum. T is a multiple of the number of devices on the mesh axis "model".

    Returns:
      [T / devices, ...], the rows that `local_rows` chooses; x itself if there is no such mesh axis.
    """
    if not _is_sharded():
        return x
    # Devices send terms in the dtype of x and add them in float32. `jax.lax.psum_scatter` would either send float32 or
    # add in the dtype of x.
    terms = x.reshape(jax.lax.axis_size(MODEL_AXIS), -1, *x.shape[1:])
    return _add_terms(jax.lax.all_to_all(terms, MODEL_AXIS, split_axis=0, concat_axis=0))


def all_gather(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Concatenates x of all devices on the mesh axis "model" along an axis. Without this mesh axis, returns x."""
    if not _is_sharded():
        return x
    axis %= x.ndim

    def gather(_, x):
        return jax.lax.all_gather(x, MODEL_AXIS, axis=axis, tiled=True)

    def transpose(_, x):
        return jnp.moveaxis(reduce_scatter(jnp.moveaxis(x, axis, 0)), 0, axis)

    return linear_call(gather, transpose, (), x)  # JAX's own transpose would add cotangents in the dtype of x


def local_rows(x: Shaped[Array, "T ..."]) -> Shaped[Array, "S ..."]:
    """Returns this device's share of the rows of x, which all devices on the mesh axis "model" hold.

    Args:
      x: [T, ...]. T is a multiple of the number of devices.

    Returns:
      [T / devices, ...]. The first device gets the first T / devices rows, and so on. x itself if there is no such mesh
      axis.
    """
    if not _is_sharded():
        return x
    rows = len(x) // jax.lax.axis_size(MODEL_AXIS)
    return jax.lax.dynamic_slice_in_dim(x, rows * model_index(), rows)


def scatters_rows(shape: Sequence[int]) -> bool:
    """Returns whether a sum of arrays of this shape is best computed as `all_gather` of `reduce_scatter`.

    This is the case if the array has more values than the kernel of `all_reduce` takes, and the number of devices
    divides the length of axis 0. A caller can then do the work between `reduce_scatter` and `all_gather` for this
    device's share of the rows only.
    """
    return _is_sharded() and math.prod(shape) > MAX_VALUES and shape[0] % jax.lax.axis_size(MODEL_AXIS) == 0


def model_index() -> jax.Array | int:
    """Returns this device's index on the mesh axis "model"; 0 if there is no such axis."""
    return jax.lax.axis_index(MODEL_AXIS) if _is_sharded() else 0


def _is_sharded():
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().manual_axes


def _all_reduce_xla(x, table):
    return all_gather(reduce_scatter(x), axis=0) if scatters_rows(x.shape) else _add_terms(all_gather(x[None], axis=0))


def _add_terms(terms):
    """Adds up the terms [devices, ...] of a sum in their order, in float32."""
    return round_to(functools.reduce(operator.add, terms.astype(jnp.float32)), terms.dtype)


def _all_reduce_kernel(x, table, *, interpret):
    if interpret:
        raise PreferXla("the kernel stores into other GPUs' memory, which has no interpreter")
    if table is None:
        raise PreferXla("no mailboxes: the devices are not GPUs of one process that reach each other's memory")
    if x.size > MAX_VALUES:
        raise PreferXla(f"{x.size} values are added up faster by XLA; the kernel takes up to {MAX_VALUES}")
    return all_reduce_kernel(x, table)
