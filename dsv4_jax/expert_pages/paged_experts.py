"""Experts' matrices of equal layers in one range of GPU addresses, each expert in memory of the GPU or of the host."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, UInt8

from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.dlpack import array_over


# One thread clears 2 GB/s of new host memory.
THREADS = 8


@dataclasses.dataclass
class Mapping:
    """Physical memory and the range of addresses that it is mapped to."""

    address: int
    nbytes: int
    handle: Any
    on_host: bool  # whether it is memory of the host
    is_mapped: bool = False
    for_cpu: bool = False  # whether the CPU can read and write it
    is_stale: bool = False  # of spare memory: its addresses still map the memory that took an expert's place


@dataclasses.dataclass
class ExpertPages:
    """One matrix of all experts of one layer of an `ExpertStack`, each expert in memory of the GPU or of the host.

    Attributes:
      memory: the memory of the GPU and its host.
      nbytes: number of bytes of an expert.
      mappings: the memory of each expert.
      array: the array of the stack, which keeps the memory mapped.
    """

    memory: CudaMemory
    nbytes: int
    mappings: list[Mapping]
    array: UInt8[Array, "..."]

    @property
    def on_host(self) -> Bool[np.ndarray, "E"]:
        """The experts whose memory is the host's."""
        return np.array([mapping.on_host for mapping in self.mappings])

    def write(self, expert: int, data: np.ndarray | int, piece: int = 0, pieces: int = 1) -> None:
        """Sets the bytes of an expert. No program that reads them may be running.

        Args:
          expert: number of the expert.
          data: contiguous bytes in the host's memory, for instance of a memory-mapped file; or an address on the GPU.
          piece: number of the piece of the expert that is written.
          pieces: number of equal pieces of an expert.
        """
        nbytes = self.nbytes // pieces
        mapping = self.mappings[expert]
        target = mapping.address + piece * nbytes
        if isinstance(data, int):
            self.memory.copy(target, data, nbytes)
        elif data.nbytes != nbytes or not data.flags.c_contiguous:
            raise ValueError(f"data must hold {nbytes} contiguous bytes, got {data.nbytes}")
        elif mapping.for_cpu:
            ctypes.memmove(target, data.ctypes.data, nbytes)  # the CPU's own copies are six times as fast as the GPU's
        else:
            self.memory.copy(target, data.ctypes.data, nbytes)


class ExpertStack:
    """One matrix of all experts of equal layers, in one range of addresses: uint8 [layers, E, ...].

    Each expert of each layer lies in memory of the GPU or of the host. To kernels, XLA and CUDA graphs the stack is an
    array of the GPU. Moving an expert changes neither an address nor a value, so a program is not compiled again and
    computes the same bits. The memory is freed when this object, its layers, the array and the programs that read the
    array are gone.

    Attributes:
      array: [layers, E, ...] uint8 on the device. It must not be donated.
      layers: pages of each layer.
    """

    def __init__(
        self, memory: CudaMemory, shape: tuple[int, ...], on_host: Bool[np.ndarray, "L E"], device: jax.Device
    ):
        """Maps memory for the array, without setting its bytes.

        Raises ValueError if an expert is not a whole number of pages, and MemoryError if the GPU or the host is out of
        memory. Nothing stays behind.

        Args:
          memory: the memory of the GPU and its host.
          shape: shape of the array, [layers, E, ...]; a single layer may do without the axis of layers.
          on_host: whether each expert of each layer lies in memory of the host.
          device: the GPU.
        """
        nbytes = math.prod(shape) // on_host.size
        if nbytes % memory.page:
            raise ValueError(
                f"an expert of the matrices {list(shape)} has {nbytes} bytes; only whole pages of {memory.page} bytes "
                "can lie in host memory"
            )
        mappings = _map_pages(memory, nbytes, on_host.ravel().tolist(), for_cpu=True)
        self.array = _array_over_pages(memory, mappings, shape, np.uint8, device)
        experts = on_host.shape[1]
        starts = range(0, on_host.size, experts)
        self.layers = [ExpertPages(memory, nbytes, mappings[i : i + experts], self.array) for i in starts]

    def write(self, layer: int, matrices: Sequence[np.ndarray | int]) -> None:
        """Sets the bytes of all experts of a layer. No program that reads them may be running.

        Args:
          layer: index of the layer in the stack.
          matrices: the bytes of each expert, contiguous, or their address on the GPU. There may be several equal
            pieces of each expert, which follow one another.
        """
        pages = self.layers[layer]
        pieces = len(matrices) // len(pages.mappings)
        threads = 1 if isinstance(matrices[0], int) else THREADS  # copies on the GPU take less time than to share them
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: pages.write(i // pieces, matrices[i], i % pieces, pieces), range(len(matrices))))


def copy_to_host(memory: CudaMemory, x: Array) -> Array:
    """Returns a copy of an array of the GPU whose bytes lie in host memory, where the GPU reads them.

    It must not be donated. Raises MemoryError if the host is out of memory. Nothing stays behind.
    """
    whole_pages = -(-x.nbytes // memory.page) * memory.page
    mappings = _map_pages(memory, whole_pages, [True], for_cpu=True)
    copied = _array_over_pages(memory, mappings, x.shape, x.dtype, x.device)
    memory.copy(mappings[0].address, jax.block_until_ready(x).unsafe_buffer_pointer(), x.nbytes)
    return copied


def _map_pages(memory: CudaMemory, nbytes: int, on_host: Sequence[bool], *, for_cpu: bool) -> list[Mapping]:
    """Maps new memory, `nbytes` for each of `on_host`, to consecutive addresses. Nothing stays behind if that fails.

    Args:
      memory: the memory of the GPU and its host.
      nbytes: size of each mapping.
      on_host: whether each mapping is of host memory, otherwise of GPU memory.
      for_cpu: whether the CPU may read and write the mappings of host memory.
    """
    base = memory.reserve(nbytes * len(on_host))
    mappings = []
    try:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(memory.create, nbytes, on_host=host) for host in on_host]
        # Every handle that was made gets a mapping, so that `_free` releases it if another one failed.
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
    """Returns an array over consecutive mappings, which frees them in the end. They are freed at once if that fails."""
    base = mappings[0].address
    free = functools.partial(_free, memory, base, sum(mapping.nbytes for mapping in mappings), list(mappings))
    try:
        return array_over(base, shape, dtype, device, free)
    except BaseException:
        free()
        raise


def _free(memory, base, nbytes, mappings):
    """Unmaps and frees all memory of a range."""
    memory.synchronize()
    for mapping in mappings:
        if mapping.is_mapped:
            memory.unmap(mapping.address, mapping.nbytes)
    for mapping in mappings:  # an address of spare memory may have mapped what is another mapping's by now
        memory.release(mapping.handle)
    memory.unreserve(base, nbytes)


class Mover:
    """Moves experts between the GPU and the host, in two phases: copies beside steps, and remapping between them.

    A hot expert in host memory changes places with a cold one of its layer. Their bytes are copied to spare memory
    while programs read them. Then, while the GPU is idle, the spare memory is mapped in their places, and the memory
    that they leave becomes the spare one.

    Attributes:
      swaps: the copied swaps (layer, hot expert, cold expert) that wait to be remapped.
    """

    def __init__(self, memory: CudaMemory, layers: Sequence[Sequence[ExpertPages]], batch: int = 4):
        """Makes the spare memory for `batch` swaps between two remappings. The sizes are the same in all layers.

        Raises MemoryError if the GPU or the host is out of memory. Nothing stays behind.
        """
        self.swaps: list[tuple[int, int, int]] = []
        self._memory = memory
        self._layers = layers
        self._copies: list[tuple[Mapping, Mapping]] = []  # memory of an expert, and spare memory with a copy of it
        self._spares: list[list[Mapping]] = []  # of each matrix, for each swap one of the GPU and one of the host
        try:
            for pages in layers[0]:
                self._spares.append(_map_pages(memory, pages.nbytes, [False, True] * batch, for_cpu=False))
        except BaseException:
            self.close()
            raise

    def copy(self, swaps: Sequence[tuple[int, int, int]]) -> None:
        """Copies the experts of at most `batch` swaps to spare memory.

        Raises ValueError if an expert is not where its swap would move it from, or if earlier swaps wait for `remap`.

        Args:
          swaps: for each, number of the layer among those of the pages, expert in host memory that moves to the GPU,
            and expert on the GPU that moves to the host.
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
        """Finishes the swaps that are copied. The GPU is idle meanwhile."""
        self._memory.synchronize()
        for mapping, spare in self._copies:
            self._exchange(mapping, spare)
        self._copies = []
        self.swaps = []

    def close(self) -> None:
        """Frees the spare memory. Swaps that are copied are dropped."""
        for spares in self._spares:
            _free(self._memory, spares[0].address, spares[0].nbytes * len(spares), spares)
        self._spares = []

    def _exchange(self, mapping, spare):
        """Maps the spare memory in place of an expert's, which becomes the spare one. The GPU is idle meanwhile."""
        self._move(mapping, spare.handle)
        mapping.for_cpu = False
        mapping.handle, spare.handle = spare.handle, mapping.handle
        mapping.on_host, spare.on_host = spare.on_host, mapping.on_host
        spare.is_stale = True

    def _fill(self, spare, mapping):
        """Copies an expert to spare memory, which is first mapped to the spare addresses."""
        if spare.is_stale:
            self._move(spare, spare.handle)
            spare.is_stale = False
        self._memory.copy(spare.address, mapping.address, mapping.nbytes)

    def _move(self, mapping, handle):
        """Maps other memory to the addresses of a mapping."""
        self._memory.unmap(mapping.address, mapping.nbytes)
        mapping.is_mapped = False
        self._memory.map(mapping.address, mapping.nbytes, handle)
        mapping.is_mapped = True
