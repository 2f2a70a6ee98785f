"""The placement of a model's routed experts: as many as fit lie on the GPU, and the rest in host memory."""

import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.host_tables import HostTables
from dsv4_jax.expert_pages.migration import ExpertMigration
from dsv4_jax.expert_pages.paged_experts import ExpertPages, ExpertStack
from dsv4_jax.expert_pages.placement_file import read_frequencies


# FP4 codes take this number of bytes for each byte of scales. All scales stay on the GPU.
CODES_PER_SCALE = 16
_log = logging.getLogger(__name__)


def program_bytes(tokens: int = 8192, config: DSV4Config | None = None) -> int:
    """Estimates the bytes of GPU memory that programs take: temporary buffers, CUDA graphs and code.

    V4-Flash on an H200 took 0.2 GB for decode steps of one request, and 4.2 GB with prompts of 8,192 tokens.

    Args:
      tokens: number of tokens of the largest step.
      config: configuration of the model; None to leave out the head. While XLA tunes the product of the head, it needs
        a buffer of the size of the head in bfloat16.
    """
    head = 2 * config.vocab_size * config.hidden_size if config else 0
    return (1 << 29) + (tokens << 19) + head


@dataclasses.dataclass
class ExpertMemory:
    """Decides which routed experts of a model lie on the GPU and which in host memory, and maps memory for them.

    Give it to `checkpoint.load_checkpoint` as `expert_memory=`. Every layer has the same number of experts on the GPU.
    The placement of an expert changes the speed only, never a result.

    Attributes:
      device_bytes: bytes of the GPU that the experts' codes may take. None = all bytes that are free when `plan` is
        called, except the experts' scales and `reserved_bytes`.
      reserved_bytes: bytes of the GPU that stay free for the cache and for programs, if `device_bytes` is None.
      memory: virtual memory of the GPU; by default that of JAX's first device.
      frequencies: {name of a layer: [E] how often each expert is selected}. The most frequent experts lie on the GPU.
        Among equally frequent ones, and in a layer that is missing here, the experts on the GPU are spread evenly over
        the expert numbers.
      placement_file: file in which `migration` keeps the frequencies for later processes. `plan` reads those of earlier
        processes from it, unless the file is missing or invalid. None for no file.
      layers: {name of a layer: expert pages of each of its matrices that is placed}, in the order of `plan`.

    Raises:
      ValueError: the device cannot map host memory, see `CudaMemory`.
    """

    device_bytes: int | None = None
    reserved_bytes: int = dataclasses.field(default_factory=program_bytes)
    memory: CudaMemory = dataclasses.field(default_factory=lambda: CudaMemory(jax.devices()[0]))
    frequencies: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    placement_file: Path | None = None
    layers: dict[str, list[ExpertPages]] = dataclasses.field(default_factory=dict)
    _experts: int = dataclasses.field(default=0, repr=False)
    _on_device: int = dataclasses.field(default=0, repr=False)

    @functools.cached_property
    def migration(self) -> ExpertMigration | None:
        """The object that moves experts between GPU and host memory while steps run.

        None if all experts lie on the GPU, or if no memory is left for moving them, which is logged.
        """
        if not self.host_bytes:
            return None
        try:
            return ExpertMigration(self.memory, self.layers, self.frequencies, self.placement_file)
        except MemoryError as error:
            _log.warning("experts stay where they are: no memory is left to move them (%s)", error)
            return None

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that experts take. Counts only experts whose memory is mapped already."""
        return sum(int(matrix.on_host.sum()) * matrix.nbytes for pages in self.layers.values() for matrix in pages)

    def plan(self, layers: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        """Decides how many experts of each layer lie on the GPU, and logs it. No memory is allocated yet.

        Args:
          layers: names of all layers with experts, in the order of the rows of `KVCache.expert_counts`.
          shapes: for each of a layer's matrices, the shape [E, ...] of its uint8 codes. Layers have equal shapes.

        Raises:
          ValueError: the GPU or the host has too little free memory.
        """
        experts = shapes[0][0]
        # `expert_bytes` is the size of one expert of each layer, summed over all layers.
        expert_bytes = len(layers) * sum(math.prod(shape[1:]) for shape in shapes)
        total_bytes = experts * expert_bytes
        free = self.memory.free_bytes()
        scale_bytes = total_bytes // CODES_PER_SCALE
        room = free - scale_bytes - self.reserved_bytes if self.device_bytes is None else self.device_bytes
        if self.device_bytes is not None and min(room, total_bytes) > free:
            raise ValueError(f"experts may take {_gb(room)} of the GPU, of which {_gb(free)} are free. {_PREALLOCATED}")
        device_experts = min(experts, max(room, 0) // expert_bytes)
        host_experts = experts - device_experts
        host_bytes = host_experts * expert_bytes
        if host_bytes > (available := self.memory.free_host_bytes()):
            raise ValueError(
                f"{host_experts} of {experts} experts a layer ({_gb(host_bytes)}) would have to lie in host memory, of "
                f"which {_gb(available)} are free; the GPU has {_gb(max(room, 0))} for the others. {_PREALLOCATED}"
            )
        self._experts = experts
        self._on_device = device_experts
        self.layers = {layer: [] for layer in layers}
        if self.placement_file is not None:
            self.frequencies |= read_frequencies(self.placement_file, experts)
        if host_experts:
            _log.info("%d of %d experts a layer stay in host memory (%s)", host_experts, experts, _gb(host_bytes))
        else:
            _log.info("all %d experts a layer fit the GPU (%s)", experts, _gb(total_bytes))

    def place_stack(self, layers: Sequence[str], shape: tuple[int, ...]) -> ExpertStack:
        """Maps memory for the codes of one of the experts' matrices in some layers, without setting its bytes.

        Call `plan` first.

        Args:
          layers: names of the layers, in the order of the stack.
          shape: shape of the codes, [layers, E, ...], or [E, ...] for a single layer.

        Returns:
          The stack, whose array has this shape. Write each layer before a program reads it.

        Raises:
          ValueError: a layer is not among those of `plan`; the shape does not fit the numbers of layers and experts; or
            an expert that lies in host memory is not a whole number of pages.
          MemoryError: the GPU or the host is out of memory.
        """
        if unknown := [layer for layer in layers if layer not in self.layers]:
            raise ValueError(f"layers {unknown} are not among the planned ones: {list(self.layers)}")
        if shape[:2] != (len(layers), self._experts) and (len(layers), shape[0]) != (1, self._experts):
            raise ValueError(
                f"the codes of {len(layers)} layers of {self._experts} experts must have the shape [layers, experts, "
                f"...], or [experts, ...] for a single layer; got {list(shape)}"
            )
        on_host = np.stack([self._is_on_host(layer) for layer in layers])
        stack = ExpertStack(self.memory, shape, on_host, jax.devices()[0])
        for layer, pages in zip(layers, stack.layers, strict=True):
            self.layers[layer].append(pages)
        return stack

    @functools.cached_property
    def tables(self) -> HostTables:
        """The allocator of tables in host memory, such as the embedding, so that experts get more GPU memory."""
        return HostTables(lambda _: self.memory)

    def _is_on_host(self, layer):
        """Returns [E] bool, whether each expert of a layer is to lie in host memory."""
        on_host = np.ones(self._experts, bool)
        frequencies = self.frequencies.get(layer, np.zeros(self._experts))
        # A prompt's tiles are computed in the order of experts. If the experts in host memory are spread over this
        # order, the GPU reads them while it computes with other experts. The fractional parts of multiples of the
        # golden ratio are spread evenly for any number of experts.
        spread = np.arange(self._experts) * (5**0.5 - 1) / 2 % 1
        on_host[np.lexsort((spread, -frequencies))[: self._on_device]] = False
        return on_host


_PREALLOCATED = (
    "JAX takes most of a GPU when it starts, unless XLA_PYTHON_CLIENT_PREALLOCATE=false and "
    "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async are set before."
)


def _gb(count):
    return f"{count / 1e9:.1f} GB"
