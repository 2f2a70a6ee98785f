"""Memory in which the GPUs of a mesh leave each other what `ops.all_reduce` adds up.

A GPU's mailbox is an array that no program takes as an argument: so XLA never moves, copies or frees it. Programs know
its address alone, from a small table that is an argument like any other.
"""

import ctypes
import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from dsv4_jax.ops.all_reduce import MODEL_AXIS
from pallas_kernels.mgpu.mailbox import mailbox_bytes
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


logger = logging.getLogger(__name__)


def make_mailboxes(mesh: Mesh) -> UInt32[Array, "..."] | None:
    """The table whose rows `ops.with_mailboxes` takes, or None where devices add up by XLA's collectives.

    GPUs that stand along the "model" axis have one mailbox each, which all meshes of the process share.

    Args:
      mesh: of any axes.

    Returns:
      [*mesh.shape, 4] uint32, cut over all axes: each device has a row, low and high halves of its number on the
      "model" axis and of its mailbox's address. None where the mesh has no "model" axis of several devices, where these
      are no GPUs of this process that kernels run on, and, which is logged as a warning, where they do not reach each
      other's memory.
    """
    devices = list(mesh.devices.flat)
    if mesh.shape.get(MODEL_AXIS, 1) == 1 or why_no_mosaic_gpu():
        return None
    if any(device.process_index != jax.process_index() for device in devices):
        return None
    axis = mesh.axis_names.index(MODEL_AXIS)
    rows = {}
    for group in np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[MODEL_AXIS]):
        addresses = _addresses(tuple(group))
        if addresses is None:
            return None
        for rank, device in enumerate(group):
            words = np.asarray([rank, addresses[rank]], np.uint64).view(np.uint32)
            rows[device] = jax.device_put(words.reshape(*[1] * mesh.devices.ndim, -1), device)
    ordered = [rows[device] for device in devices]
    return jax.make_array_from_single_device_arrays((*mesh.devices.shape, 4), mailbox_sharding(mesh), ordered)


def mailbox_sharding(mesh: Mesh) -> NamedSharding:
    """How the table lies on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names, None))


@functools.cache
def _addresses(group):
    """The address of each GPU's mailbox; None if one cannot reach another's."""
    if pairs := [pair for pair in itertools.permutations(group, 2) if not _reaches(*pair)]:
        logger.warning("%s and %s cannot reach each other's memory: sums over a mesh are left to XLA", *pairs[0])
        return None
    size = mailbox_bytes(len(group)) // 4
    _mailboxes[group] = [jax.block_until_ready(jnp.zeros(size, jnp.uint32, device=device)) for device in group]
    return tuple(mailbox.unsafe_buffer_pointer() for mailbox in _mailboxes[group])


_mailboxes = {}  # they live as long as the process


def _reaches(device, peer):
    answer = ctypes.c_int(0)
    cuda = ctypes.CDLL("libcuda.so.1")
    error = cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), device.local_hardware_id, peer.local_hardware_id)
    return error == 0 and bool(answer.value)
