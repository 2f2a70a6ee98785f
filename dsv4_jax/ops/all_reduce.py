"""Collectives over the mesh axis "model", the devices that a model is sharded over."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.quant import round_to
from pallas_kernels.all_reduce import MAX_VALUES, all_reduce as all_reduce_kernel


# The table of mailbox addresses for sums that are traced within `with_mailboxes` or `use_mailboxes`; None elsewhere.
_mailboxes: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("mailboxes", default=None)


def all_reduce(x: Float[Array, "..."], *, implementation: str | None = None) -> Float[Array, "..."]:
    """Returns the sum of x over the mesh axis "model", with the same bits on all devices.

    The sum is taken in float32 and rounded once to the dtype of x. The result is x itself outside of `jax.shard_map`
    over a mesh with this axis.

    Args:
      x: [...] this device's term of the sum, in any floating dtype.
      implementation: None, "xla" (`jax.lax.psum`) or "mosaic_gpu", a kernel that adds up in the order of the devices.
        The kernel takes up to 524,288 values in bfloat16, on the GPUs of one process, within `with_mailboxes`.
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
    with use_mailboxes(None if row is None else _table(row.reshape(2, 2))):
        yield


@contextlib.contextmanager
def use_mailboxes(table: UInt32[Array, "n"] | None) -> Iterator[None]:
    """Makes sums that are traced within this context use the given table of mailboxes.

    A function whose trace is reused takes the result of `mailboxes` as an argument and traces its body within this
    context. Otherwise its trace would hold the table of the program that called it first.
    """
    token = _mailboxes.set(table)
    try:
        yield
    finally:
        _mailboxes.reset(token)


def mailboxes() -> UInt32[Array, "n"] | None:
    """Returns the table of mailboxes with which a kernel can sum over devices; None if XLA has to compute the sum."""
    return _mailboxes.get() if _is_sharded() else None


def all_gather(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """Concatenates x of all devices on the mesh axis "model" along the last axis. Without this axis, returns x."""
    return jax.lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True) if _is_sharded() else x


def model_index() -> jax.Array | int:
    """Returns this device's index on the mesh axis "model"; 0 if there is no such axis."""
    return jax.lax.axis_index(MODEL_AXIS) if _is_sharded() else 0


def _is_sharded():
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().manual_axes


def _table(row):
    """Returns this device's index, its mailbox's address and all mailboxes' addresses, each as two uint32 halves."""
    return jnp.concatenate([row, jax.lax.all_gather(row[1], MODEL_AXIS)]).reshape(-1)


def _all_reduce_xla(x, table):
    return round_to(jax.lax.psum(x.astype(jnp.float32), MODEL_AXIS), x.dtype)


def _all_reduce_kernel(x, table, *, interpret):
    if interpret:
        raise PreferXla("the kernel stores into other GPUs' memory, which has no interpreter")
    if table is None:
        raise PreferXla("no mailboxes: the devices are not GPUs of one process that reach each other's memory")
    if x.size > MAX_VALUES:
        raise PreferXla(f"{x.size} values are added up faster by XLA; the kernel takes up to {MAX_VALUES}")
    return all_reduce_kernel(x, table)
