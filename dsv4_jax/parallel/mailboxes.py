"""Peer-writable buffers ("mailboxes") through which the GPUs of a mesh exchange the terms of `ops.all_reduce`.

A GPU's mailbox is an array that no program takes as an argument, so XLA never moves, copies or frees it. Programs get
the mailbox's address from a small table, which is an ordinary argument.
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

from dsv4_jax.common.mesh_axes import MODEL_AXIS
from pallas_kernels.mgpu.mailbox import mailbox_bytes
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


logger = logging.getLogger(__name__)


def make_mailboxes(mesh: Mesh) -> UInt32[Array, "..."] | None:
    """Makes the table of mailboxes for `ops.with_mailboxes`.

    Each GPU along the "model" axis has one mailbox. Meshes of a process with the same GPUs along this axis use the same
    mailboxes.

    Returns:
      [*sizes of the mesh's axes, 4] uint32, sharded over all axes. A device's row holds two 64-bit numbers, each as
      its low and its high half: the device's index on the "model" axis, and the address of its mailbox.

      None if the sums must use XLA's collectives. This is the case if the "model" axis has one device, if kernels do
      not run on the devices, if some devices belong to another process, or if a GPU cannot access another GPU's memory.
      The last case is logged as a warning.
    """
    devices = list(mesh.devices.flat)
    is_local = all(device.process_index == jax.process_index() for device in devices)
    if mesh.shape.get(MODEL_AXIS, 1) == 1 or why_no_mosaic_gpu() or not is_local:
        return None
    rows = {}
    # A group is the devices that differ only in their index on the "model" axis.
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index(MODEL_AXIS), -1)
    for group in by_rank.reshape(-1, mesh.shape[MODEL_AXIS]):
        addresses = _addresses(tuple(group))
        if addresses is None:
            return None
        for rank, device in enumerate(group):
            words = np.asarray([rank, addresses[rank]], np.uint64).view(np.uint32)
            rows[device] = jax.device_put(words.reshape(*[1] * mesh.devices.ndim, -1), device)
    return jax.make_array_from_single_device_arrays(
        (*mesh.devices.shape, 4), mailbox_sharding(mesh), [rows[device] for device in devices]
    )


def mailbox_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the table of `make_mailboxes` on a mesh: one row for each device."""
    return NamedSharding(mesh, PartitionSpec(*mesh.axis_names, None))


@functools.cache
def _addresses(group):
    """Allocates a mailbox on each GPU of a tuple of devices, once for each tuple, and returns the addresses.

    Returns None, and logs a warning, if one GPU cannot access another's memory.
    """
    if pairs := [pair for pair in itertools.permutations(group, 2) if not _reaches(*pair)]:
        logger.warning("%s and %s cannot access each other's memory: all-reduce falls back to XLA", *pairs[0])
        return None
    size = mailbox_bytes(len(group)) // 4
    _mailboxes[group] = [jax.block_until_ready(jnp.zeros(size, jnp.uint32, device=device)) for device in group]
    return tuple(mailbox.unsafe_buffer_pointer() for mailbox in _mailboxes[group])


_mailboxes = {}  # {tuple of GPUs: their mailboxes}, which keeps the arrays alive until the process ends


def _reaches(device, peer):
    """Returns whether a GPU can access the memory of another GPU."""
    answer = ctypes.c_int(0)
    cuda = ctypes.CDLL("libcuda.so.1")
    error = cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), device.local_hardware_id, peer.local_hardware_id)
    return error == 0 and bool(answer.value)
