"""Sums and joins over the devices that cut a model between them."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from dsv4_jax.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.quant import round_to
from pallas_kernels.all_reduce import MAX_VALUES, all_reduce as all_reduce_kernel


# Of the program that is being traced: what `with_mailboxes` was given.
_mailboxes: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("mailboxes", default=None)


def all_reduce(x: Float[Array, "..."], *, implementation: str | None = None) -> Float[Array, "..."]:
    """The sum of what each device of the "model" axis has; x itself outside of `jax.shard_map` over such a mesh.

    The sum is taken in float32 and rounded once. All devices get the same bits.

    Args:
      x: [...] of each device, any floating dtype.
      implementation: None (best available), "xla" (`jax.lax.psum`) or "mosaic_gpu": the GPUs of one process store into
        each other's memory, within `with_mailboxes`; bfloat16, up to 524,288 values. Then the order of the sum is that
        of the devices.

    Returns:
      [...] in x's dtype.
    """
    if not _is_sharded():
        return x
    return dispatch("all_reduce", implementation, x, _mailboxes.get(), xla=_all_reduce_xla, kernel=_all_reduce_kernel)


@contextlib.contextmanager
def with_mailboxes(row: UInt32[Array, "..."] | None) -> Iterator[None]:
    """Within it, the program that is being traced adds up through mailboxes.

    The devices tell each other their addresses. They might know them, but have to meet before the first sum: until all
    have begun, CUDA cannot load the program's kernels where another device waits in one.

    Args:
      row: this device's row of `parallel.mailboxes.make_mailboxes`; None = there are none.
    """
    token = _mailboxes.set(None if row is None else _table(row.reshape(2, 2)))
    try:
        yield
    finally:
        _mailboxes.reset(token)


def mailboxes() -> UInt32[Array, "n"] | None:
    """What a kernel needs to add up by itself, see `pallas_kernels.mgpu.mailbox`; None where XLA has to."""
    return _mailboxes.get() if _is_sharded() else None


def all_gather(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """What the devices of the "model" axis have, side by side on the last axis; x itself where there is no such axis.

    Args:
      x: [..., n] of each device.

    Returns:
      [..., devices * n].
    """
    return jax.lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True) if _is_sharded() else x


def model_index() -> jax.Array | int:
    """Which device of the "model" axis this one is; 0 where there is no such axis."""
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
        raise PreferXla("the devices have no mailboxes: they are no GPUs of one process that reach each other's memory")
    if x.size > MAX_VALUES:
        raise PreferXla(f"{x.size} values are added up faster by XLA; the kernel takes up to {MAX_VALUES}")
    return all_reduce_kernel(x, table)
