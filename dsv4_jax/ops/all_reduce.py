"""Collectives over the devices that a model is sharded over."""

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


# The table of addresses that `with_mailboxes` gathered, while a program is traced.
_mailboxes: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("mailboxes", default=None)


def all_reduce(x: Float[Array, "..."], *, implementation: str | None = None) -> Float[Array, "..."]:
    """Returns the sum of x over the "model" axis: in float32, rounded once to x's dtype, the same bits on all devices.

    Outside of `jax.shard_map` over a mesh with that axis it returns x.

    Args:
      x: [...] of each device, any floating dtype.
      implementation: None, "xla" (`jax.lax.psum`) or "mosaic_gpu", which adds up in the order of the devices (up to
        524,288 values in bfloat16, on the GPUs of one process, within `with_mailboxes`).
    """
    if not _is_sharded():
        return x
    return dispatch("all_reduce", implementation, x, _mailboxes.get(), xla=_all_reduce_xla, kernel=_all_reduce_kernel)


@contextlib.contextmanager
def with_mailboxes(row: UInt32[Array, "..."] | None) -> Iterator[None]:
    """Lets the program that is traced within it exchange values through mailboxes, see `pallas_kernels.mgpu.mailbox`.

    `row` is this device's row of `parallel.mailboxes.make_mailboxes`; None: XLA adds up. The devices gather each
    other's addresses, also because they have to meet before the first sum: CUDA cannot load a program's kernels on a
    device that waits in one for another device.
    """
    with use_mailboxes(None if row is None else _table(row.reshape(2, 2))):
        yield


@contextlib.contextmanager
def use_mailboxes(table: UInt32[Array, "n"] | None) -> Iterator[None]:
    """Has sums within it use a table that `mailboxes` returned outside.

    A function whose trace is kept takes the table as an argument: without this it would keep the one of its first call.
    """
    token = _mailboxes.set(table)
    try:
        yield
    finally:
        _mailboxes.reset(token)


def mailboxes() -> UInt32[Array, "n"] | None:
    """Returns the table with which a kernel adds up by itself, or None if XLA has to."""
    return _mailboxes.get() if _is_sharded() else None


def all_gather(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """Concatenates x over the "model" axis on its last axis; returns x if there is no such axis."""
    return jax.lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True) if _is_sharded() else x


def model_index() -> jax.Array | int:
    """Returns this device's index on the "model" axis; 0 if there is no such axis."""
    return jax.lax.axis_index(MODEL_AXIS) if _is_sharded() else 0


def _is_sharded():
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().manual_axes


def _table(row):
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
