"""Arrays of experts' matrices in which each expert lies in memory of the GPU or of the host.

The virtual addresses of an array are contiguous addresses of the GPU. Physical memory is mapped to them expert by
expert, see `CudaMemory`.
"""

import concurrent.futures
import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, UInt8

from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.dlpack import array_over


# This number of threads allocates and writes memory, since one thread clears only 2 GB/s of new host memory.
THREADS = 8


@dataclasses.dataclass
class Mapping:
    """Physical memory and the range of addresses that it is mapped to."""

    address: int
    nbytes: int
    handle: Any
    on_host: bool  # True = host memory, False = GPU memory
    is_mapped: bool = False
    for_cpu: bool = False  # whether the CPU can read and write it
    # Whether `address` still maps memory that now belongs to an expert. Then the address must be mapped to `handle`
    # before its next use. This happens only to spare memory, see `Mover`.
    is_stale: bool = False


@dataclasses.dataclass
class ExpertPages:
    """One layer of an `ExpertStack`. Each expert's matrix lies in memory of the GPU or of the host.

    Attributes:
      memory: virtual memory of the GPU.
      nbytes: number of bytes of an expert's matrix.
      mappings: the memory of each expert's matrix.
      array: the array of the stack, which keeps the memory mapped.
    """

    memory: CudaMemory
    nbytes: int
    mappings: list[Mapping]
    array: UInt8[Array, "..."]

    @property
    def on_host(self) -> Bool[np.ndarray, "E"]:
        """Whether each expert lies in host memory."""
        return np.array([mapping.on_host for mapping in self.mappings])

    def write(self, expert: int, data: np.ndarray | int, piece: int = 0, pieces: int = 1) -> None:
        """Writes the bytes of an expert's matrix, or of one of several equal pieces of it.

        No program that reads the matrix may be running.

        Args:
          expert: number of the expert.
          data: contiguous bytes in host memory, for instance of a memory-mapped file; or an address on the GPU.
          piece: number of the piece that is written.
          pieces: number of pieces of the matrix.

        Raises:
          ValueError: `data` in host memory is not contiguous or has another number of bytes.
        """
        nbytes = self.nbytes // pieces
        mapping = self.mappings[expert]
        target = mapping.address + piece * nbytes
        if isinstance(data, int):
            self.memory.copy(target, data, nbytes)
        elif data.nbytes != nbytes or not data.flags.c_contiguous:
            raise ValueError(f"data must hold {nbytes} contiguous bytes, got {data.nbytes}")
        elif mapping.for_cpu:
            ctypes.memmove(target, data.ctypes.data, nbytes)  # a copy by the CPU is six times as fast as by the GPU
        else:
            self.memory.copy(target, data.ctypes.data, nbytes)


class ExpertStack:
    """One matrix of all experts of several layers, as an array [layers, E, ...] uint8 of the GPU.

    Each expert of each layer lies in memory of the GPU or of the host. To kernels, XLA and CUDA graphs, the array is
    like any other array of the GPU. Moving an expert changes neither an address nor a value, so programs are not
    compiled again and compute the same bits. The memory is freed when this object, its layers, the array and the
    programs that read the array are gone.

    Attributes:
      array: [layers, E, ...] uint8 on the device. It must not be donated.
      layers: pages of each layer.
    """

    def __init__(
        self, memory: CudaMemory, shape: tuple[int, ...], on_host: Bool[np.ndarray, "L E"], device: jax.Device
    ):
        """Maps memory for the array, without setting its bytes. If that fails, all memory is freed.

        Args:
          memory: virtual memory of the GPU.
          shape: shape of the array, [layers, E, ...], or [E, ...] for a single layer.
          on_host: whether each expert of each layer lies in host memory.
          device: the GPU.

        Raises:
          ValueError: an expert's matrix is not a whole number of pages, and some experts lie in host memory.
          MemoryError: the GPU or the host is out of memory.
        """
        nbytes = math.prod(shape) // on_host.size
        host_flags = on_host.ravel().tolist()
        # `mapped` lists the memory that is freed with the array, `mappings` the memory of each expert.
        if nbytes % memory.page == 0:
            mappings = _map_pages(memory, nbytes, host_flags, for_cpu=True)
            mapped = mappings
        elif not any(host_flags):
            mapped = _map_pages(memory, _whole_pages(memory, math.prod(shape)), [False], for_cpu=False)
            whole = mapped[0]
            mappings = [Mapping(whole.address + i * nbytes, nbytes, whole.handle, False) for i in range(on_host.size)]
        else:
            raise ValueError(
                f"an expert of the matrices {list(shape)} has {nbytes} bytes; only whole pages of {memory.page} bytes "
                "can lie in host memory"
            )
        self.array = _array_over_pages(memory, mapped, shape, np.uint8, device)
        experts = on_host.shape[1]
        first_mappings = range(0, on_host.size, experts)
        self.layers = [ExpertPages(memory, nbytes, mappings[i : i + experts], self.array) for i in first_mappings]

    def write(self, layer: int, matrices: Sequence[np.ndarray | int]) -> None:
        """Writes the matrices of all experts of a layer. No program that reads them may be running.

        Args:
          layer: index of the layer in the stack.
          matrices: the contiguous bytes, or an address on the GPU, of each expert's matrix. If a matrix consists of
            several equal pieces, they are consecutive elements.
        """
        pages = self.layers[layer]
        pieces = len(matrices) // len(pages.mappings)
        threads = 1 if isinstance(matrices[0], int) else THREADS  # copies on the GPU are too short for several threads
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: pages.write(i // pieces, matrices[i], i % pieces, pieces), range(len(matrices))))


def empty_on_host(
    memory: CudaMemory, shape: tuple[int, ...], dtype: DTypeLike, device: jax.Device
) -> tuple[Array, np.ndarray]:
    """Returns an array of a GPU whose bytes lie in host memory, and a view of these bytes through which to write them.

    Programs on the GPU read the bytes from host memory. No program may read the array before its bytes are written. The
    array must not be donated, and the view must not be used when the array is gone.

    Raises MemoryError if the host is out of memory.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    mappings = _map_pages(memory, _whole_pages(memory, nbytes), [True], for_cpu=True)
    array = _array_over_pages(memory, mappings, shape, dtype, device)
    view = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(mappings[0].address), dtype)
    return array, view.reshape(shape)


def _whole_pages(memory, nbytes):
    return -(-nbytes // memory.page) * memory.page


def _map_pages(memory, nbytes, on_host, *, for_cpu):
    """Allocates memory for several mappings and maps it to consecutive addresses. If that fails, all memory is freed.

    Args:
      memory: virtual memory of the GPU.
      nbytes: size of each mapping.
      on_host: for each mapping, True = host memory, False = GPU memory.
      for_cpu: whether the CPU may read and write the mappings of host memory.
    """
    base = memory.reserve(nbytes * len(on_host))
    mappings = []
    try:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(memory.create, nbytes, on_host=host) for host in on_host]
        # Every handle that was made gets a mapping, so that `_free` releases it if making another handle failed.
        for number, (future, host) in enumerate(zip(futures, on_host, strict=True)):
            if future.exception() is None:
                mappings.append(Mapping(base + number * nbytes, nbytes, future.result(), host))
        for future in futures:
            future.result()  # raises the error of a handle that was not made
        for mapping in mappings:
            mapping.for_cpu = for_cpu and mapping.on_host
            memory.map(mapping.address, nbytes, mapping.handle, for_cpu=mapping.for_cpu)
            mapping.is_mapped = True
    except BaseException:
        _free(memory, base, nbytes * len(on_host), mappings)
        raise
    return mappings


def _array_over_pages(memory, mappings, shape, dtype, device):
    """Returns an array over consecutive mappings, which are freed when the array is deleted, or at once on an error."""
    base = mappings[0].address
    free = functools.partial(_free, memory, base, sum(mapping.nbytes for mapping in mappings), list(mappings))
    try:
        return array_over(base, shape, dtype, device, free)
    except BaseException:
        free()
        raise


def _free(memory, base, nbytes, mappings):
    """Waits until the GPU is idle; then unmaps and frees the memory of all mappings in a range of addresses.

    Args:
      memory: virtual memory of the GPU.
      base: first address of the range.
      nbytes: size of the range.
      mappings: all mappings in the range.
    """
    memory.synchronize()
    for mapping in mappings:
        if mapping.is_mapped:
            memory.unmap(mapping.address, mapping.nbytes)
    for mapping in mappings:  # after all are unmapped, because a stale spare address maps another mapping's memory
        memory.release(mapping.handle)
    memory.unreserve(base, nbytes)


class Mover:
    """Swaps experts in host memory with experts on the GPU, in two phases: copies and remapping.

    In a swap, a hot expert in host memory changes places with a cold expert on the GPU of the same layer. First, the
    bytes of both are copied to spare memory, while steps may read the experts. Then, while the GPU is idle, the spare
    memory is mapped to the addresses of the experts. The memory that was mapped there becomes spare memory.

    Attributes:
      swaps: (layer, hot expert, cold expert) of each swap whose experts are copied and not yet remapped.
    """

    def __init__(self, memory: CudaMemory, layers: Sequence[Sequence[ExpertPages]], batch: int = 4):
        """Allocates the spare memory. If that fails, all of it is freed.

        Args:
          memory: virtual memory of the GPU.
          layers: expert pages of each matrix of each layer. The matrices have the same sizes in all layers.
          batch: maximum number of swaps between two remappings.

        Raises:
          MemoryError: the GPU or the host is out of memory.
        """
        self.swaps: list[tuple[int, int, int]] = []
        self._memory = memory
        self._layers = layers
        self._copies = []  # (memory of an expert, spare memory with a copy of it)
        # For each matrix of a layer, `_spares` lists spare memory for each swap, once on the GPU and once on the host.
        self._spares = []
        try:
            for pages in layers[0]:
                self._spares.append(_map_pages(memory, pages.nbytes, [False, True] * batch, for_cpu=False))
        except BaseException:
            self.close()
            raise

    def copy(self, swaps: Sequence[tuple[int, int, int]]) -> None:
        """Copies the experts of at most `batch` swaps to spare memory.

        Args:
          swaps: (index of the layer, hot expert in host memory, cold expert on the GPU) of each swap.

        Raises:
          ValueError: a hot expert is on the GPU, or a cold one in host memory; or earlier swaps wait for `remap`.
        """
        if self._copies:
            raise ValueError(f"{len(self.swaps)} swaps are copied already: remap them first")
        count = len(swaps)
        copies = []
        for matrix, spares in enumerate(self._spares):
            on_device = [spare for spare in spares if not spare.on_host]
            on_host = [spare for spare in spares if spare.on_host]
            for (layer, hot, cold), device, host in zip(swaps, on_device[:count], on_host[:count], strict=True):
                mappings = self._layers[layer][matrix].mappings
                if not mappings[hot].on_host or mappings[cold].on_host:
                    raise ValueError(f"layer {layer}: expert {hot} must be in host memory, expert {cold} must not")
                copies += [(mappings[hot], device), (mappings[cold], host)]
        self._copies = copies
        for mapping, spare in copies:
            self._fill(spare, mapping)
        self.swaps = list(swaps)

    def remap(self) -> None:
        """Completes the swaps of the last `copy`: maps the copies to the addresses of the experts.

        The method first waits until the GPU is idle. No step may be launched until it returns.
        """
        self._memory.synchronize()
        for mapping, spare in self._copies:
            self._exchange(mapping, spare)
        self._copies = []
        self.swaps = []

    def close(self) -> None:
        """Frees the spare memory. Swaps whose experts are copied but not remapped are dropped."""
        for spares in self._spares:
            _free(self._memory, spares[0].address, spares[0].nbytes * len(spares), spares)
        self._spares = []

    def _exchange(self, mapping, spare):
        """Maps spare memory to an expert's addresses. The memory that was mapped there becomes the spare memory."""
        self._move(mapping, spare.handle)
        mapping.for_cpu = False
        mapping.handle, spare.handle = spare.handle, mapping.handle
        mapping.on_host, spare.on_host = spare.on_host, mapping.on_host
        spare.is_stale = True

    def _fill(self, spare, mapping):
        """Copies an expert's bytes to spare memory. A stale mapping of the spare memory is renewed first."""
        if spare.is_stale:
            self._move(spare, spare.handle)
            spare.is_stale = False
        self._memory.copy(spare.address, mapping.address, mapping.nbytes)

    def _move(self, mapping, handle):
        """Maps the physical memory `handle` to the addresses of a mapping, in place of the memory mapped there."""
        self._memory.unmap(mapping.address, mapping.nbytes)
        mapping.is_mapped = False
        self._memory.map(mapping.address, mapping.nbytes, handle)
        mapping.is_mapped = True
