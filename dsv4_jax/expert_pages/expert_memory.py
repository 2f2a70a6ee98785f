"""The placement of a model's routed experts: those that fit stay on the GPU, the others in host memory."""

import concurrent.futures
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, UInt8

from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.migration import ExpertMigration
from dsv4_jax.expert_pages.paged_experts import THREADS, ExpertPages, copy_to_host
from dsv4_jax.expert_pages.placement_file import read_frequencies


# Bytes of FP4 codes that share a byte of scales; all scales stay on the GPU.
CODES_PER_SCALE = 16
_log = logging.getLogger(__name__)


def program_bytes(tokens: int = 8192, config: DSV4Config | None = None) -> int:
    """Returns the bytes of the GPU that programs take: temporary buffers, CUDA graphs and code.

    V4-Flash on an H200 took 0.2 GB for decode steps of one request, and 4.2 GB with prompts of 8,192 tokens.

    Args:
      tokens: number of tokens of the largest step.
      config: the model's configuration. To choose a product of draft layers, XLA asks for as much as the bfloat16 head.
    """
    head = 2 * config.vocab_size * config.hidden_size if config and config.num_nextn_predict_layers else 0
    return (1 << 29) + (tokens << 19) + head


@dataclasses.dataclass
class ExpertMemory:
    """Places the experts of a model that `checkpoint.load_checkpoint` loads with `expert_memory=`.

    Every layer has the same number of experts on the GPU. Which ones is a matter of speed only, see `ExpertPages`.

    Attributes:
      device_bytes: bytes of the GPU that the experts' codes may take; None for all that is free when they are placed,
        but for `reserved_bytes`.
      reserved_bytes: bytes of the GPU that stay free for the cache and for programs, if `device_bytes` is None.
      memory: the GPU and its host; None for the default device.
      frequencies: for each layer by name, [E] how often its experts are selected: the most frequent ones stay on the
        GPU. Equally frequent ones, and all of a layer that is not there, are spread evenly over the expert numbers.
      placement_file: file that keeps how often experts were selected, so that the next process starts with the hot
        ones on the GPU; None for no file. One that is missing or not of this model is ignored.
      layers: expert pages of the matrices of each layer, once they are placed.
    """

    device_bytes: int | None = None
    reserved_bytes: int = dataclasses.field(default_factory=program_bytes)
    memory: CudaMemory | None = None
    frequencies: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    placement_file: Path | None = None
    layers: dict[str, list[ExpertPages]] = dataclasses.field(default_factory=dict)
    _on_device: int | None = dataclasses.field(default=None, repr=False)

    @property
    def is_planned(self) -> bool:
        """Whether `plan` has decided."""
        return self._on_device is not None

    @functools.cached_property
    def migration(self) -> ExpertMigration | None:
        """The object that moves the placed experts between steps; None if all of them lie on the GPU."""
        if self.memory is None or not self.host_bytes:
            return None
        options: dict[str, Any] = dict(frequencies=self.frequencies, file=self.placement_file)
        try:
            return ExpertMigration(self.memory, self.layers, **options)
        except MemoryError as error:
            _log.warning("experts stay where they are: no memory is left to move them (%s)", error)
            return None

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that the placed experts take."""
        return sum(int(matrix.on_host.sum()) * matrix.nbytes for pages in self.layers.values() for matrix in pages)

    def plan(self, num_layers: int, shapes: Sequence[tuple[int, ...]]) -> str:
        """Decides how many experts of each layer stay on the GPU, and returns a sentence about it. Places nothing yet.

        There are `num_layers` layers with experts, whose matrices have uint8 codes of the given shapes [E, ...].

        Raises ValueError if the GPU or the host has too little free memory, or the device is no such GPU, see
        `CudaMemory`.
        """
        memory, experts = self._opened_memory(), shapes[0][0]
        each = num_layers * sum(math.prod(shape[1:]) for shape in shapes)  # an expert in every layer
        free = memory.free_bytes()
        scales = experts * each // CODES_PER_SCALE
        room = free - scales - self.reserved_bytes if self.device_bytes is None else self.device_bytes
        if self.device_bytes is not None and min(room, experts * each) > free:
            raise ValueError(f"experts may take {_gb(room)} of the GPU, of which {_gb(free)} are free. {_PREALLOCATED}")
        on_device = min(experts, max(room, 0) // each)
        on_host = experts - on_device
        if on_host * each > (available := memory.free_host_bytes()):
            raise ValueError(
                f"{on_host} of {experts} experts a layer ({_gb(on_host * each)}) would have to lie in host memory, of "
                f"which {_gb(available)} are free; the GPU has {_gb(max(room, 0))} for the others. {_PREALLOCATED}"
            )
        self._on_device = on_device
        if self.placement_file is not None:
            self.frequencies |= read_frequencies(self.placement_file, experts)
        if not on_host:
            return f"all {experts} experts a layer fit the GPU ({_gb(experts * each)})"
        return f"{on_host} of {experts} experts a layer stay in host memory ({_gb(on_host * each)})"

    def place(self, layer: str, matrices: Sequence[np.ndarray | int], shape: tuple[int, ...]) -> UInt8[Array, "..."]:
        """Copies the codes of one matrix of all experts to where each expert lies, and returns them, uint8 of `shape`.

        Raises ValueError if an expert is not a whole number of pages, and MemoryError if the GPU or the host is out of
        memory.

        Args:
          layer: name of the layer.
          matrices: the bytes of each expert, contiguous, or their address on the GPU. There may be several pieces of
            each expert, which follow one another.
          shape: [E, ...] shape of the codes.
        """
        assert self.memory is not None and self._on_device is not None, "plan comes first"
        frequencies = self.frequencies.get(layer, np.zeros(shape[0]))
        on_host = np.ones(shape[0], bool)
        # A prompt's tiles run in the order of experts: if those in host memory are spread, the GPU computes with others
        # while they are read. Multiples of the golden ratio are spread evenly, however many are taken.
        spread = np.arange(shape[0]) * (5**0.5 - 1) / 2 % 1
        on_host[np.lexsort((spread, -frequencies))[: self._on_device]] = False
        pages = ExpertPages(self.memory, shape, on_host, jax.devices()[0])
        pieces = len(matrices) // shape[0]
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda i: pages.write(i // pieces, matrices[i], i % pieces, pieces), range(len(matrices))))
        self.layers.setdefault(layer, []).append(pages)
        return pages.array

    def place_on_host(self, x: Array) -> Array:
        """Returns a copy of an array of the GPU whose bytes lie in host memory, where the GPU reads them.

        It is for a weight of which a step reads little, such as the embedding: on the GPU, its place is worth more for
        experts. The copy must not be donated.

        Raises ValueError if the device is no such GPU, and MemoryError if the host is out of memory.
        """
        return copy_to_host(self._opened_memory(), x)

    def _opened_memory(self):
        """Returns `memory`, by default the first device's."""
        if self.memory is None:
            self.memory = CudaMemory(jax.devices()[0])
        return self.memory


_PREALLOCATED = (
    "JAX takes most of a GPU when it starts, unless XLA_PYTHON_CLIENT_PREALLOCATE=false and "
    "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async are set before."
)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
