"""Experts' matrices of equal layers in one range of GPU addresses, each expert in memory of the GPU or of the host."""

import concurrent.futures
import contextlib
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
        self.array, mappings = _array_of_pages(memory, nbytes, on_host.ravel(), shape, np.uint8, device)
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
    copied, (mapping,) = _array_of_pages(memory, whole_pages, np.ones(1, bool), x.shape, x.dtype, x.device)
    memory.copy(mapping.address, jax.block_until_ready(x).unsafe_buffer_pointer(), x.nbytes)
    return copied


def _array_of_pages(memory, nbytes, on_host, shape, dtype, device):
    """Returns an array, and the mappings of `nbytes` each that hold its bytes, one after another."""
    total = nbytes * len(on_host)
    mappings = []
    base = memory.reserve(total)
    free = functools.partial(_free, memory, base, total, mappings)
    try:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            handles = [pool.submit(memory.create, nbytes, on_host=bool(host)) for host in on_host]
        _map(memory, base, nbytes, zip(handles, on_host, strict=True), mappings)
        return array_over(base, shape, dtype, device, free), mappings
    except BaseException:
        free()
        raise


def _map(memory, base, nbytes, handles, mappings):
    """Maps every handle that was made, so that a failure of one leaves none without an owner."""
    errors = []
    for number, (future, host) in enumerate(handles):
        if error := future.exception():
            errors.append(error)
            continue
        address = base + number * nbytes
        handle = future.result()
        host = bool(host)
        try:
            memory.map(address, nbytes, handle, for_cpu=host)
        except BaseException as error:
            memory.release(handle)
            errors.append(error)
        else:
            mappings.append(Mapping(address, nbytes, handle, host, for_cpu=host))
    if errors:
        raise errors[0]


def _free(memory, base, nbytes, mappings):
    """Unmaps and frees all memory of a range."""
    memory.synchronize()
    for mapping in mappings:
        memory.unmap(mapping.address, mapping.nbytes)
        memory.release(mapping.handle)
    mappings.clear()
    memory.unreserve(base, nbytes)


class Mover:
    """Moves experts between the GPU and the host, in two phases: copies beside steps, and remapping between them.

    A hot expert in host memory changes places with a cold one of its layer. Their bytes are copied to spare memory
    while programs read them. Then, while the GPU is idle, the spare memory is mapped in their places, and the memory
    that they leave becomes the spare one.
    """

    def __init__(self, memory: CudaMemory, layers: Sequence[Sequence[ExpertPages]], batch: int = 4):
        """Makes the spare memory for `batch` swaps between two remappings. The sizes are the same in all layers.

        Raises MemoryError if the GPU or the host is out of memory. Nothing stays behind.
        """
        self._memory = memory
        self._layers = layers
        self._staged = []
        self._free: list[list[list[Mapping]]] = []  # for each swap and matrix, spare memory (GPU, host)
        self._copies = concurrent.futures.ThreadPoolExecutor(1)
        self.batch = batch
        try:
            for _ in range(batch):
                self._free.append([[] for _ in layers[0]])
                for pages, spares in zip(layers[0], self._free[-1], strict=True):
                    for on_host in (False, True):
                        spares.append(self._spare(pages.nbytes, on_host))
        except BaseException:
            self.close()
            raise

    def stage(self, layer: int, hot: int, cold: int) -> bool:
        """Begins to copy a swap of two experts.

        Raises ValueError if the experts are not where the swap would move them from.

        Args:
          layer: number of the layer among those of the pages.
          hot: expert in host memory, which moves to the GPU.
          cold: expert on the GPU, which moves to the host.

        Returns:
          Whether there was spare memory for it; if not, `remap` makes room.
        """
        if not self._free:
            return False
        mappings = [(matrix.mappings[hot], matrix.mappings[cold]) for matrix in self._layers[layer]]
        moving = [mapping for pairs, _, _ in self._staged for pair in pairs for mapping in pair]
        for pair in mappings:
            if not pair[0].on_host or pair[1].on_host or any(one is other for one in pair for other in moving):
                raise ValueError(
                    f"layer {layer}: expert {hot} must be in host memory, expert {cold} must not, and neither may be "
                    "on its way"
                )
        spares = self._free.pop()
        copies = [
            self._copies.submit(self._fill, spare, mapping)
            for pair, spare_pair in zip(mappings, spares, strict=True)
            for mapping, spare in zip(pair, spare_pair, strict=True)
        ]
        self._staged.append((mappings, spares, copies))
        return True

    def wait(self) -> None:
        """Waits for the copies of all staged swaps; raises the error of one that failed."""
        for copy in concurrent.futures.wait(copy for _, _, copies in self._staged for copy in copies).done:
            copy.result()

    def remap(self) -> int:
        """Finishes the swaps whose copies are done, and returns their number. The GPU is idle meanwhile."""
        done = [swap for swap in self._staged if all(copy.done() for copy in swap[2])]
        if not done:
            return 0
        self._memory.synchronize()
        for mappings, spares, copies in done:
            for copy in copies:
                copy.result()
            for pair, spare_pair in zip(mappings, spares, strict=True):
                for mapping, spare in zip(pair, spare_pair, strict=True):
                    self._exchange(mapping, spare)
            # A spare of the GPU now has memory of the host, and the other way round.
            self._free.append([[host, device] for device, host in spares])
            self._staged.remove((mappings, spares, copies))
        return len(done)

    def close(self) -> None:
        """Waits for copies and frees the spare memory. Staged swaps are dropped."""
        self._copies.shutdown()
        for spares in [*self._free, *(spares for _, spares, _ in self._staged)]:
            for spare in (spare for pair in spares for spare in pair):
                _free(self._memory, spare.address, spare.nbytes, [spare])
        self._free = []
        self._staged = []

    def _spare(self, nbytes, on_host):
        with contextlib.ExitStack() as undo:
            address = self._memory.reserve(nbytes)
            undo.callback(self._memory.unreserve, address, nbytes)
            handle = self._memory.create(nbytes, on_host=on_host)
            undo.callback(self._memory.release, handle)
            self._memory.map(address, nbytes, handle)
            undo.pop_all()
        return Mapping(address, nbytes, handle, on_host)

    def _exchange(self, mapping, spare):
        """Maps the spare memory in place of an expert's, which becomes the spare one. The GPU is idle meanwhile."""
        self._memory.unmap(mapping.address, mapping.nbytes)
        self._memory.map(mapping.address, mapping.nbytes, spare.handle)
        mapping.for_cpu = False
        mapping.handle, spare.handle = spare.handle, mapping.handle
        mapping.on_host, spare.on_host = spare.on_host, mapping.on_host
        spare.is_stale = True

    def _fill(self, spare, mapping):
        """Copies an expert to spare memory, which is first mapped to the spare addresses."""
        if spare.is_stale:
            self._memory.unmap(spare.address, spare.nbytes)
            self._memory.map(spare.address, spare.nbytes, spare.handle)
            spare.is_stale = False
        self._memory.copy(spare.address, mapping.address, mapping.nbytes)
