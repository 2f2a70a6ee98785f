"""CUDA's virtual memory management: maps physical memory of the GPU or of the host to virtual addresses of the GPU."""

import importlib
from pathlib import Path
from typing import Any

import jax


class CudaMemory:
    """The virtual memory of one GPU.

    The sizes of mappings are multiples of `page`. Any thread may call the methods. The memory does not come from JAX's
    allocator, which must leave room for it (XLA_PYTHON_CLIENT_PREALLOCATE=false). A failed call of the driver raises
    MemoryError if memory is missing, otherwise RuntimeError.

    Attributes:
      page: the smallest size of a mapping, in bytes.
    """

    def __init__(self, device: jax.Device):
        """Opens the driver for a device.

        Args:
          device: the GPU.

        Raises:
          ValueError: the device is not an NVIDIA GPU, the package cuda-bindings is missing, or the machine cannot map
            host memory for the GPU.
        """
        if device.platform != "gpu":
            raise ValueError(f"weights in host memory need an NVIDIA GPU; {device} is none")
        try:
            driver: Any = importlib.import_module("cuda.bindings.driver")  # installed only with the CUDA extras
        except ModuleNotFoundError as error:
            raise ValueError(
                "weights in host memory need NVIDIA's package cuda-bindings: pip install 'dsv4-jax[cuda13]'"
            ) from error
        self._driver = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device.local_hardware_id)
        # JAX uses the device's primary context, too, so its programs can read the mappings.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        location_types = driver.CUmemLocationType
        read_write = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        attribute = driver.CUdevice_attribute
        numa_node = self._call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, self._device)
        # `locations` maps False (GPU memory) and True (host memory) to (type of the location, its number).
        locations = {
            False: (location_types.CU_MEM_LOCATION_TYPE_DEVICE, int(self._device)),
            True: (location_types.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(int(numa_node), 0)),
        }
        self._properties = {}
        self._access = {}
        for on_host, (location_type, location_id) in locations.items():
            properties = driver.CUmemAllocationProp()
            rights = driver.CUmemAccessDesc()
            properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = location_type
            properties.location.id = location_id
            rights.location.type = location_type
            rights.location.id = location_id
            rights.flags = read_write
            self._properties[on_host] = properties
            self._access[on_host] = rights
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        sizes = [self._run("cuMemGetAllocationGranularity", x, smallest) for x in self._properties.values()]
        self._stream = self._run("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.page = max(map(int, sizes))
        # Allocate a page of host memory and free it again, because some sandboxes and containers forbid such pages.
        try:
            self.release(self.create(self.page, on_host=True))
        except MemoryError as error:
            raise ValueError(
                f"this machine's driver makes no pages of host memory for {device} ({error}): keep all experts on the "
                "GPU, shard the model over more GPUs, or run outside of the sandbox or container that forbids it"
            ) from error

    def free_bytes(self) -> int:
        """Returns the free bytes of the GPU. Memory that JAX's allocator holds does not count as free."""
        return int(self._run("cuMemGetInfo")[0])

    def free_host_bytes(self) -> int:
        """Returns the bytes of host memory that Linux can give to a process without swapping."""
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024

    def reserve(self, nbytes: int) -> int:
        """Reserves a range of `nbytes` addresses, to which nothing is mapped yet. Returns the first address."""
        return int(self._run("cuMemAddressReserve", nbytes, self.page, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Frees a range of addresses that `reserve` returned and to which nothing is mapped."""
        self._run("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int, *, on_host: bool) -> Any:
        """Allocates physical memory of the host or of the GPU, and returns its handle.

        Raises MemoryError if there is not enough memory.
        """
        return self._run("cuMemCreate", nbytes, self._properties[on_host], 0)

    def release(self, handle: Any) -> None:
        """Frees physical memory as soon as it is mapped to no address."""
        self._run("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any, *, for_cpu: bool = False) -> None:
        """Maps physical memory to reserved addresses, so that the GPU may read and write it.

        Args:
          address: first address of the mapping.
          nbytes: size of the mapping and of the physical memory.
          handle: handle of the physical memory, which may be mapped to other addresses, too.
          for_cpu: whether the CPU may read and write it, too, which only host memory allows. Mapping then takes three
            times as long.
        """
        self._run("cuMemMap", address, nbytes, 0, handle, 0)
        rights = [self._access[False], *([self._access[True]] if for_cpu else [])]
        try:
            self._run("cuMemSetAccess", address, nbytes, rights, len(rights))
        except BaseException:
            self._run("cuMemUnmap", address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Removes a mapping that `map` made. No program that could read it may be running."""
        self._run("cuMemUnmap", address, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies bytes between addresses of the GPU or the host, on a CUDA stream of its own, and waits for the copy.

        Programs on other streams keep running.

        Args:
          target: first address to write.
          source: first address to read.
          nbytes: number of bytes.
        """
        self._run("cuMemcpyAsync", target, source, nbytes, self._stream)
        self._run("cuStreamSynchronize", self._stream)

    def synchronize(self) -> None:
        """Waits until the GPU is idle."""
        self._run("cuCtxSynchronize")

    def _run(self, name, *args) -> Any:
        """Calls a function of the driver like `_call`, with the GPU's context current for this thread meanwhile."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(name, *args)
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name, *args) -> Any:
        """Calls a function of the driver. Returns its result, or a list if it has several results or none.

        If the call fails, raises MemoryError for missing memory, otherwise RuntimeError, with the driver's error name.
        """
        code, *results = getattr(self._driver, name)(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            kind = MemoryError if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
            raise kind(f"{name}: {code.name}")
        return results[0] if len(results) == 1 else results
