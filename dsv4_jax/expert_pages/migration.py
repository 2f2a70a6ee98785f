"""Moves routed experts between GPU and host memory while steps run, so that frequently selected ones lie on the GPU."""

import concurrent.futures
import dataclasses
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.paged_experts import ExpertPages, Mover
from dsv4_jax.expert_pages.placement_file import write_frequencies
from dsv4_jax.expert_pages.policy import PlacementPolicy
from dsv4_jax.expert_pages.token_cost import BUS_RATE


# Of the time between the launches of two steps, at most this much counts as time of steps. The rest counts as a pause
# without requests.
_MAX_STEP_SECONDS = 1.0
_SECONDS_BETWEEN_SAVES = 60.0
_HISTORY_HALF_LIFE = float(1 << 16)  # in tokens, see `PlacementPolicy.half_life`
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class ExpertMetrics:
    """Counters of a model's experts since the model was loaded.

    Attributes:
      hits: number of selections, of an expert by a token, in which the expert was on the GPU.
      misses: number of selections in which the expert was in host memory.
      bus_bytes: number of bytes that steps read from host memory.
      moved_bytes: number of bytes that were copied between the GPU and the host to move experts.
      swaps: number of pairs of experts that changed places.
      remap_seconds: seconds for which moves kept the GPU idle.
      seconds: seconds of all steps. The time between two steps counts as at most one second.
    """

    hits: int = 0
    misses: int = 0
    bus_bytes: int = 0
    moved_bytes: int = 0
    swaps: int = 0
    remap_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def bus_seconds(self) -> float:
        """The estimated seconds that steps took to read `bus_bytes` from host memory, at `token_cost.BUS_RATE`."""
        return self.bus_bytes / BUS_RATE

    @property
    def hit_rate(self) -> float:
        """The fraction of selections in which the expert was on the GPU; 0 before the first selection."""
        return self.hits / max(self.hits + self.misses, 1)


class ExpertMigration:
    """Moves the experts of one model between GPU and host memory, by how often tokens select them, while steps run.

    Steps count selections on the GPU. Every few steps, a thread reads a copy of the counts, asks the policy for swaps
    and copies the experts of the swaps to spare memory. Meanwhile further steps run. When the copies are done, the GPU
    is made idle between two steps, and the spare memory is mapped to the experts' addresses. The placement does not
    change results, so no step waits for a copy.

    Attributes:
      policy: the rule that proposes swaps.
      history: a PlacementPolicy whose counts decay slowly. The next process places experts by these counts.
      metrics: the counters.
      interval: minimum number of steps between two readings of the counts.
      remap_share: maximum fraction of the time for which moves keep the GPU idle.
    """

    interval = 8
    remap_share = 0.01

    def __init__(
        self,
        memory: CudaMemory,
        layers: Mapping[str, Sequence[ExpertPages]],
        frequencies: Mapping[str, np.ndarray],
        file: Path | None,
        *,
        batch: int = 8,
    ):
        """Allocates the spare memory and starts the thread.

        Args:
          memory: virtual memory of the GPU, from which the pages come.
          layers: {name of a layer: expert pages of each of its matrices}, in the order of the layers.
          frequencies: {name of a layer: [E] counts of earlier processes}.
          file: file that keeps the counts for later processes; None for no file.
          batch: maximum number of swaps between two remappings, which decides the size of the spare memory.

        Raises:
          MemoryError: the GPU or the host has no room for the spare memory.
        """
        self.metrics = ExpertMetrics()
        self._memory = memory
        self._layers = dict(layers)
        self._file = file
        self._batch = batch
        self._stored = dict(frequencies)  # content of the file
        layer_pages = list(self._layers.values())
        self._on_host = np.stack([pages[0].on_host for pages in layer_pages])
        self._was_on_host = self._on_host.copy()  # the placement since the preceding snapshot of the counts
        self._expert_bytes = sum(pages.nbytes for pages in layer_pages[0])
        self.policy = PlacementPolicy(np.zeros(self._on_host.shape))
        self.history = PlacementPolicy(np.zeros(self._on_host.shape), _HISTORY_HALF_LIFE)
        for row, name in zip(self.history.frequencies, self._layers, strict=True):
            row[:] = self._stored.get(name, 0)
        self._mover: Mover | None = None
        if self._on_host.any() and not self._on_host.all():
            self._mover = Mover(memory, layer_pages, batch)
            close: Any = weakref.finalize(self, self._mover.close)
            close.atexit = False  # the driver frees the memory of a process that ends
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "expert-migration")
        self._job = self._thread.submit(lambda: None)
        self._debt = 0.0  # seconds for which moves kept the GPU idle, minus `remap_share` of the time since
        self._last = time.perf_counter()
        self._saved = time.perf_counter()
        self._steps = 0
        self._before = np.zeros(0, np.uint32)  # counts of the preceding snapshot
        self._experts_per_token = 1

    def start(self, counts: Int[Array, "2 L E"], experts_per_token: int) -> None:
        """Begins to count selections with a new cache.

        Args:
          counts: `KVCache.expert_counts` of the cache. They are the starting point: only later increments count.
          experts_per_token: number of experts that a token selects in a layer.

        Raises:
          ValueError: the number of layers or experts is not the number that was placed.
        """
        if counts.shape != (2, *self._on_host.shape):
            raise ValueError(
                f"the cache counts [layers, experts] {list(counts.shape[1:])}, but {list(self._on_host.shape)} were "
                "placed: make the manager with the configuration that the checkpoint was loaded with"
            )
        self.wait()
        if not self.policy.frequencies.any():
            # Counts of earlier processes matter only at the beginning, so they are scaled down to about one half-life.
            factors = self.policy.half_life * experts_per_token / np.maximum(self.history.frequencies.sum(1), 1.0)
            self.policy.frequencies += self.history.frequencies * np.minimum(factors, 1.0)[:, None]
        self._experts_per_token = experts_per_token
        self._steps = 0
        self._last = time.perf_counter()
        self._was_on_host = self._on_host.copy()
        self._before = np.asarray(_snapshot(counts)).view(np.uint32)

    def between_steps(self, counts: Int[Array, "2 L E"]) -> None:
        """Remaps experts whose copies are done. After that, or after `interval` steps, starts to read the counts.

        Call it after each step is launched, before the cache is donated to the next step.

        Args:
          counts: `KVCache.expert_counts` of the newest cache.
        """
        now = time.perf_counter()
        passed = min(now - self._last, _MAX_STEP_SECONDS)
        self._last = now
        self.metrics.seconds += passed
        self._debt = max(self._debt - self.remap_share * passed, 0.0)
        self._steps += 1
        if not self._job.done():
            return
        if (error := self._job.exception()) is not None:  # steps can go on with any placement
            _log.error("experts do not move any longer: %s", error)
            self._mover = None
        if self._mover is not None and self._mover.swaps:
            if self._debt:  # earlier moves have kept the GPU idle for too long; wait until `remap_share` allows more
                return
            self._remap(self._mover, counts)
        elif self._steps < self.interval:
            return
        self._steps = 0
        self._job = self._thread.submit(self._work, _snapshot(counts))

    def wait(self) -> None:
        """Waits until the thread, which reads counts and copies experts, has nothing to do."""
        concurrent.futures.wait([self._job])

    def finish(self, counts: Int[Array, "2 L E"] | None = None) -> None:
        """Reads the counts a final time, and writes the file.

        Args:
          counts: `KVCache.expert_counts` of the newest cache; None if the cache is lost.
        """
        self.wait()
        if counts is not None and not counts.is_deleted():
            self._count(_snapshot(counts))
        self._save()

    def _work(self, snapshot):
        """Runs on the thread: reads a copy of the counts, chooses swaps, and copies their experts to spare memory."""
        self._count(snapshot)
        if self._mover is not None:
            swaps = self.policy.swaps(self._on_host, self._batch)
            self._mover.copy(swaps)
            self.metrics.moved_bytes += 2 * self._expert_bytes * len(swaps)
        if time.perf_counter() - self._saved > _SECONDS_BETWEEN_SAVES:
            self._save()

    def _count(self, snapshot):
        """Adds the selections since the preceding snapshot to the metrics and to the policies.

        Experts are remapped only right before a snapshot is taken, after the steps that it counts. So the placement
        since the preceding snapshot, `_was_on_host`, decides whether a selection was a hit or a miss.

        Args:
          snapshot: [2, layers, E] int32 on the GPU, a copy of `KVCache.expert_counts`.
        """
        counts = np.asarray(snapshot).view(np.uint32)
        added = counts - self._before
        if added.max(initial=0) > np.iinfo(np.int32).max:  # the difference is negative: a new cache counts from 0
            added = counts
        self._before = counts
        tokens, reads = added.astype(np.int64)
        self.metrics.misses += int(tokens[self._was_on_host].sum())
        self.metrics.hits += int(tokens[~self._was_on_host].sum())
        self.metrics.bus_bytes += int(reads[self._was_on_host].sum()) * self._expert_bytes
        self._was_on_host = self._on_host.copy()
        # A token selects `_experts_per_token` experts in a layer. The number of tokens follows from the layer with the
        # most selections.
        for policy in (self.policy, self.history):
            policy.count(tokens, int(tokens.sum(1).max()) // self._experts_per_token)

    def _remap(self, mover, counts):
        """Waits until the GPU is idle, and remaps the experts whose copies are done."""
        jax.block_until_ready(counts)  # JAX may not have passed the newest step to the driver yet
        self._memory.synchronize()
        swaps = mover.swaps
        begin = time.perf_counter()
        mover.remap()
        self.metrics.swaps += len(swaps)
        for layer, hot, cold in swaps:
            self._on_host[layer, hot] = False
            self._on_host[layer, cold] = True
        seconds = time.perf_counter() - begin
        self.metrics.remap_seconds += seconds
        self._debt += seconds

    def _save(self):
        if self._file is not None:
            self._stored |= dict(zip(self._layers, self.history.frequencies, strict=True))
            write_frequencies(self._file, self._stored)
        self._saved = time.perf_counter()


def _snapshot(counts):
    """Returns a copy of the counts that the next step does not overwrite, and starts its transfer to the host."""
    copy = jnp.copy(counts)
    copy.copy_to_host_async()
    return copy
