"""Tables in host memory: arrays from which a step on a GPU reads a few rows over the bus."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.paged_experts import empty_on_host


class HostTables:
    """Allocates arrays in host memory. On a mesh, the shards of all devices lie in host memory."""

    def __init__(self, open_memory: Callable[[jax.Device], CudaMemory] = CudaMemory):
        """Takes the function that opens the virtual memory of a device. It is called once for each device."""
        self._memory_of = functools.cache(open_memory)

    def empty(
        self, shape: tuple[int, ...], dtype: DTypeLike, where: NamedSharding | None
    ) -> tuple[Array, list[tuple[tuple[slice, ...], np.ndarray]]]:
        """Allocates an array without setting its bytes, see `paged_experts.empty_on_host`.

        Args:
          shape, dtype: shape and dtype of the array.
          where: sharding of the array; None = the default device.

        Returns:
          (the array, the shard of each device of this process). A shard is (its index in the array, a view of its bytes
          for the CPU to write before a program reads the array). Replicated shards are allocated for each device.

        Raises:
          ValueError: a device cannot map host memory, see `CudaMemory`.
          MemoryError: the host is out of memory.
        """
        sharding = where or SingleDeviceSharding(jax.devices()[0])
        arrays = []
        shards = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            array, view = empty_on_host(self._memory_of(device), sharding.shard_shape(shape), dtype, device)
            arrays.append(array)
            shards.append((index, view))
        whole = arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)
        return whole, shards
