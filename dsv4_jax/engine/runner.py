"""Runs an engine's steps on the device, in programs of fixed shapes."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.drafts import DraftOptions
from dsv4_jax.decode.loop import LoopOutput
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import GREEDY, BatchedSamplingParams, LogprobOptions
from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.requests import Request, RequestParams
from dsv4_jax.engine.scheduler import ScheduledRequest
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

    def __init__(
        self, model: CompiledModel, manager: KVCacheManager, config: EngineConfig, *, device_drafts: DraftOptions
    ):
        """Makes a runner; compiles nothing. Each step makes drafts for the next one as `device_drafts` says."""
        self._model, self._manager, self._config, self._device_drafts = model, manager, config, device_drafts
        self.decode_size = config.decode_size(manager.requests.slots_per_shard)
        self._compilations_before = model.compilations

    @property
    def compilations(self) -> int:
        """Number of programs compiled since this runner was made."""
        return self._model.compilations - self._compilations_before

    def __call__(
        self, cache: KVCache, scheduled: Sequence[ScheduledRequest]
    ) -> tuple[Batch, StepOutput, dict[int, slice], KVCache]:
        """Prepares a batch and launches its step, without waiting for it; the cache is donated.

        Returns the batch, the output on the device, {slot: its rows of the output} and the cache.
        """
        config, table = self._config, self._manager.requests
        decode_size = 0 if config.batch_invariant else self.decode_size
        tokens = {item.request.slot: item.tokens for item in scheduled}
        batch = self._manager.prepare_forward(tokens, prefill_size=config.token_budget, decode_size=decode_size)
        shard_size = len(batch.slots) // table.num_shards
        starts = first_tokens(table, {slot: len(new) for slot, new in tokens.items()}, shard_size)
        counts = {item.request.slot: len(item.forced_tokens) for item in scheduled}
        rows = {
            slot: slice(at, at + counts[slot]) for slot, at in first_tokens(table, counts, self.decode_size).items()
        }
        logits_indices, forced = np.full((2, table.num_shards * self.decode_size), -1, np.int32)
        for item in scheduled:
            slot = item.request.slot
            end = starts[slot] % shard_size + len(item.tokens)  # within its shard
            logits_indices[rows[slot]] = range(end - counts[slot], end)
            forced[rows[slot]] = item.forced_tokens
        wants_top = any(item.forced_tokens and item.request.params.top_logprobs for item in scheduled)
        args = logits_indices, *self._sampling([item.request for item in scheduled])
        if config.max_logprobs:
            args += (LogprobOptions(forced, np.bool_(wants_top), config.max_logprobs),)
        args = table.put(args, "tokens")
        output, cache = self._model.sample_step(cache, batch, *args, drafts=self._device_drafts)
        return batch, output if wants_top else dataclasses.replace(output, top_logprobs=None), rows, cache

    def run_steps(self, cache: KVCache, counts: Mapping[Request, int]) -> tuple[LoopOutput, KVCache]:
        """Runs up to `num_scheduler_steps` decode steps at once, `counts[request]` of each request; see `__call__`.

        Returns the output [slots, num_scheduler_steps] on the host and the cache. Raises CacheFullError, without
        effect, if not enough blocks are free for so many steps.
        """
        steps, table = self._config.num_scheduler_steps, self._manager.requests
        tokens = {request.slot: request.tokens[-1:] for request in counts}
        batch = self._manager.prepare_forward(tokens, reserve=steps - 1)
        sampling, seeds = self._sampling(list(counts))
        limits = np.zeros((len(seeds),), np.int32)
        for request, count in counts.items():
            limits[request.slot] = count
        args = table.put((seeds, dataclasses.replace(sampling, max_tokens=limits)), "tokens")
        output, cache = self._model.decode_loop(cache, batch, *args, steps=steps, top_logprobs=0)
        return table.get(output), cache

    def _sampling(self, requests: Sequence[Request]) -> tuple[BatchedSamplingParams, np.ndarray]:
        """Returns the sampling parameters [slots] and the seeds [slots]; slots of other requests draw greedily."""
        slots = self._manager.schema.max_requests
        sampling, seeds = [GREEDY] * slots, np.zeros((slots,), np.uint32)
        for request in requests:
            sampling[request.slot], seeds[request.slot] = request.params.sampling, request.params.seed
        return BatchedSamplingParams.of(sampling), seeds

    def warm_up(self, cache: KVCache, prefix: PrefixCache | None) -> tuple[dict[str, int], KVCache]:
        """Runs each program once: the steps, and those that offload, resume, fork and restore requests.

        Returns {name of a step's program: its number of tokens} and the cache, in which no request is left.
        """
        config, manager, sizes = self._config, self._manager, {}
        max_context = manager.schema.max_context
        for count in (min(manager.schema.max_query_tokens + 1, config.token_budget, max_context), 1):
            request = Request(None, np.zeros((count,), np.int32), RequestParams(1), order=0)
            request.slot = slot = manager.admit(num_tokens=count)
            batch, _, _, cache = self(cache, [ScheduledRequest(request, request.tokens)])
            sizes["mixed" if batch.prefill else "decode"] = len(batch.slots)
            if count == 1:
                if 1 < config.num_scheduler_steps < max_context:
                    with contextlib.suppress(CacheFullError):  # in so small a cache steps always run alone
                        _, cache = self.run_steps(cache, {request: 1})
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
