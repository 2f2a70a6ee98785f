"""Physical memory of the GPU or of the host under addresses of the GPU: CUDA's virtual memory management."""

import importlib
from pathlib import Path
from typing import Any

import jax


class CudaMemory:
    """Virtual memory of one GPU. All sizes are bytes, and multiples of `page`.

    The methods may be called by any thread. Memory that is mapped here is not JAX's: JAX must leave room for it
    (XLA_PYTHON_CLIENT_PREALLOCATE=false).

    Attributes:
      page: smallest size of a mapping.
    """

    def __init__(self, device: jax.Device):
        """Raises ValueError if the device, its driver or the machine cannot map memory of the host."""
        if device.platform != "gpu":
            raise ValueError(f"experts in host memory need an NVIDIA GPU; {device} is none")
        try:
            driver: Any = importlib.import_module("cuda.bindings.driver")  # not there without the CUDA extras
        except ModuleNotFoundError as error:
            raise ValueError(
                "experts in host memory need NVIDIA's package cuda-bindings: pip install 'dsv4-jax[cuda13]'"
            ) from error
        self._driver = driver
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device.local_hardware_id)
        # JAX uses the primary context, too.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        kinds = driver.CUmemLocationType
        access = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        attribute = driver.CUdevice_attribute
        numa = self._call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, self._device)
        places = {
            False: (kinds.CU_MEM_LOCATION_TYPE_DEVICE, int(self._device)),
            True: (kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, max(int(numa), 0)),
        }
        self._properties = {}
        self._access = {}
        for on_host, (kind, number) in places.items():
            properties = driver.CUmemAllocationProp()
            rights = driver.CUmemAccessDesc()
            properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = kind
            properties.location.id = number
            rights.location.type = kind
            rights.location.id = number
            rights.flags = access
            self._properties[on_host] = properties
            self._access[on_host] = rights
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        sizes = [self._run("cuMemGetAllocationGranularity", x, smallest) for x in self._properties.values()]
        self._stream = self._run("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.page = max(map(int, sizes))
        try:
            self.release(self.create(self.page, on_host=True))
        except MemoryError as error:
            raise ValueError(
                f"this machine's driver makes no pages of host memory for {device} ({error}): keep all experts on the "
                "GPU, shard the model over more GPUs, or run outside of the sandbox or container that forbids it"
            ) from error

    def free_bytes(self) -> int:
        """Returns the free memory of the GPU, of which JAX's allocator may already have taken a part."""
        return int(self._run("cuMemGetInfo")[0])

    def free_host_bytes(self) -> int:
        """Returns the memory that Linux can give to a process without swapping."""
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024

    def reserve(self, nbytes: int) -> int:
        """Returns the first of `nbytes` addresses that nothing is mapped to yet."""
        return int(self._run("cuMemAddressReserve", nbytes, self.page, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Gives addresses back, to which nothing is mapped."""
        self._run("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int, *, on_host: bool) -> Any:
        """Returns a handle of new physical memory; raises MemoryError if there is none."""
        return self._run("cuMemCreate", nbytes, self._properties[on_host], 0)

    def release(self, handle: Any) -> None:
        """Frees physical memory, as soon as it is mapped nowhere."""
        self._run("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any, *, for_cpu: bool = False) -> None:
        """Maps physical memory to reserved addresses, for the GPU and, if it is the host's memory, for the CPU.

        Args:
          address: first address.
          nbytes: size of the mapping.
          handle: the physical memory, which may be mapped elsewhere, too.
          for_cpu: whether the CPU may read and write it, which triples the time.
        """
        self._run("cuMemMap", address, nbytes, 0, handle, 0)
        rights = [self._access[False], *([self._access[True]] if for_cpu else [])]
        try:
            self._run("cuMemSetAccess", address, nbytes, rights, len(rights))
        except BaseException:
            self._run("cuMemUnmap", address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps what `map` mapped. No program that could read it may be running."""
        self._run("cuMemUnmap", address, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copies between addresses of the GPU and the host, beside running programs, and waits for the copy alone.

        Args:
          target, source, nbytes: first addresses to write and to read, and number of bytes.
        """
        self._run("cuMemcpyAsync", target, source, nbytes, self._stream)
        self._run("cuStreamSynchronize", self._stream)

    def synchronize(self) -> None:
        """Waits until the GPU is idle."""
        self._run("cuCtxSynchronize")

    def _run(self, name: str, *args: Any) -> Any:
        """Calls the driver, see `_call`, in the context of the GPU."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            return self._call(name, *args)
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *args: Any) -> Any:
        """Calls the driver and returns its result; raises MemoryError or RuntimeError with the driver's own words."""
        code, *results = getattr(self._driver, name)(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            kind = MemoryError if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else RuntimeError
            raise kind(f"{name}: {code.name}")
        return results[0] if len(results) == 1 else results
