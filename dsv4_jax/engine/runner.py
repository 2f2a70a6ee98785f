"""Runs an engine's steps on the device, in programs of fixed shapes."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.loop import LoopOutput
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import GREEDY, BatchedSamplingParams, LogprobOptions
from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.requests import Request
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.host.forward import first_tokens


class StepRunner:
    """Runs batches in two programs: one for decode steps (last tokens and their drafts), one for all others.

    The first has `decode_size` tokens, which is also the most that any step draws, the second `token_budget`; both
    sizes are per shard of a mesh's axis "data". With `batch_invariant` decode steps run in the second one too. With
    `num_scheduler_steps` a third program runs several decode steps.

    Attributes:
      decode_size: number of tokens of a decode step.
    """

    def __init__(self, model: CompiledModel, manager: KVCacheManager, config: EngineConfig, *, device_drafts: int = 0):
        """Makes a runner; compiles nothing. Each step makes `device_drafts` drafts per slot for the next one."""
        self._model, self._manager, self._config, self._device_drafts = model, manager, config, device_drafts
        self.decode_size = config.decode_size(manager.requests.slots_per_shard)
        self._compilations_before = model.compilations

    @property
    def compilations(self) -> int:
        """Number of programs compiled since this runner was made."""
        return self._model.compilations - self._compilations_before

    def __call__(
        self,
        cache: KVCache,
        tokens: Mapping[int, np.ndarray],
        forced_tokens: Mapping[int, Sequence[int]],
        sampling: BatchedSamplingParams,
        seeds: np.ndarray,
        wants_top: bool = False,
    ) -> tuple[Batch, StepOutput, dict[int, slice], KVCache]:
        """Prepares a batch and launches its step, without waiting for it.

        Args:
          cache: the cache; donated.
          tokens: {slot: [n] tokens that follow those in the cache}.
          forced_tokens: {slot: [m] tokens that follow the last m of `tokens`; -1 = draw one}.
          sampling: [slots] sampling parameters.
          seeds: [slots] one seed per slot.
          wants_top: whether any request asks for its likeliest tokens.

        Returns:
          (batch, output on the device, {slot: its rows of the output}, cache).
        """
        config, table = self._config, self._manager.requests
        decode_size = 0 if config.batch_invariant else self.decode_size
        batch = self._manager.prepare_forward(tokens, prefill_size=config.token_budget, decode_size=decode_size)
        shard_size = len(batch.slots) // table.num_shards
        starts = first_tokens(table, {slot: len(new) for slot, new in tokens.items()}, shard_size)
        first_rows = first_tokens(table, {slot: len(forced_tokens[slot]) for slot in tokens}, self.decode_size)
        rows = {slot: slice(row, row + len(forced_tokens[slot])) for slot, row in first_rows.items()}
        logits_indices, forced = np.full((2, table.num_shards * self.decode_size), -1, np.int32)
        for slot, new in tokens.items():
            end = starts[slot] % shard_size + len(new)  # within its shard
            logits_indices[rows[slot]] = range(end - len(forced_tokens[slot]), end)
            forced[rows[slot]] = forced_tokens[slot]
        args = logits_indices, sampling, seeds
        if config.max_logprobs:
            args += (LogprobOptions(forced, np.bool_(wants_top), config.max_logprobs),)
        args = table.put(args, "tokens")
        output, cache = self._model.sample_step(cache, batch, *args, drafts=self._device_drafts)
        return batch, output if wants_top else dataclasses.replace(output, top_logprobs=None), rows, cache

    def run_steps(
        self,
        cache: KVCache,
        tokens: Mapping[int, np.ndarray],
        max_tokens: Mapping[int, int],
        sampling: BatchedSamplingParams,
        seeds: np.ndarray,
    ) -> tuple[LoopOutput, KVCache]:
        """Runs up to `num_scheduler_steps` decode steps at once.

        Args:
          cache: the cache; donated.
          tokens: {slot: its last token, as an array [1]}.
          max_tokens: {slot: number of tokens it gets}.
          sampling: [slots] sampling parameters.
          seeds: [slots] one seed per slot.

        Returns:
          (output [slots, num_scheduler_steps] on the host, cache).

        Raises:
          CacheFullError: not enough blocks are free for so many steps; nothing has changed.
        """
        steps, table = self._config.num_scheduler_steps, self._manager.requests
        batch = self._manager.prepare_forward(tokens, reserve=steps - 1)
        limits = np.asarray([max_tokens.get(slot, 0) for slot in range(len(seeds))], np.int32)
        args = table.put((seeds, dataclasses.replace(sampling, max_tokens=limits)), "tokens")
        output, cache = self._model.decode_loop(cache, batch, *args, steps=steps, top_logprobs=0)
        return table.get(output), cache

    def batched_sampling(
        self, requests: Sequence[Request]
    ) -> tuple[BatchedSamplingParams, np.ndarray, dict[Request, Exception]]:
        """Gathers the requests' sampling parameters by slot; slots of other requests draw greedily.

        Returns:
          (parameters [slots], seeds [slots] uint32, {request whose parameters are invalid: the error}).
        """
        slots, failed = self._manager.schema.max_requests, {}
        sampling, seeds = BatchedSamplingParams.of([GREEDY] * slots), np.zeros((slots,), np.uint32)
        for request in requests:
            try:
                for name in ("temperature", "top_k", "top_p"):
                    getattr(sampling, name)[request.slot] = getattr(request.params.sampling, name)
                seeds[request.slot] = request.params.seed
            except Exception as error:  # fails this request only
                failed[request] = error
        return sampling, seeds, failed

    def warm_up(self, cache: KVCache, prefix: PrefixCache | None) -> tuple[dict[str, int], KVCache]:
        """Runs each program once: the steps, and those that offload, resume, fork and restore requests.

        The cache is donated; no request is left in it.

        Returns:
          ({name of a step's program: its number of tokens}, cache).
        """
        config, manager, sizes = self._config, self._manager, {}
        max_context = manager.schema.max_context
        sampling, seeds, _ = self.batched_sampling([])
        for count in (min(manager.schema.max_query_tokens + 1, config.token_budget, max_context), 1):
            slot = manager.admit(num_tokens=count)
            batch, _, _, cache = self(cache, {slot: np.zeros((count,), np.int32)}, {slot: [-1]}, sampling, seeds)
            sizes["mixed" if batch.prefill else "decode"] = len(batch.slots)
            if count == 1:
                if 1 < config.num_scheduler_steps < max_context:
                    last_token = {slot: np.zeros((1,), np.int32)}
                    with contextlib.suppress(CacheFullError):  # in so small a cache steps always run alone
                        _, cache = self.run_steps(cache, last_token, {slot: 1}, sampling, seeds)
                        sizes["several"] = config.num_scheduler_steps
                offloaded, cache = offload(manager, cache, slot)
                slot, cache = resume(manager, cache, offloaded)
                if prefix is not None:
                    cache = prefix.warm_up(cache, slot)
                table, shard = manager.requests, manager.requests.shard(slot)
                if table.free_slots(shard) and table.room(shard):  # otherwise no request can ever be forked
                    (child,), cache = manager.fork(cache, slot, 1)
                    manager.release(child)
            manager.release(slot)
        return sizes, cache
