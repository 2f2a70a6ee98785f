"""Runs an engine's steps on the device, in programs of fixed shapes."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import GREEDY, BatchedSamplingParams, LogprobRows, TopLogprobs
from dsv4_jax.engine.requests import Request
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.host.forward import first_tokens


class StepResults(NamedTuple):
    """What a step found, on the device or the host.

    Attributes:
      tokens: [rows] int32, drawn or given; `decode_size` rows, in each part of a mesh's axis "data".
      logprobs: [rows] float32 their log-probabilities.
      top: the likeliest tokens [rows, max_logprobs]; None = not wanted.
      drafts: [slots, drafts] int32; None without drafts on the device.
    """

    tokens: Any
    logprobs: Any
    top: TopLogprobs | None
    drafts: Any

    def rows(self, here: slice) -> "StepResults":
        """What it found for some rows; `drafts` of all slots."""
        top = None if self.top is None else self.top[here]
        return StepResults(self.tokens[here], self.logprobs[here], top, self.drafts)


class StepRunner:
    """Runs batches in two programs: one for decode steps (newest tokens and their drafts), one for all others.

    They have `decode_size` tokens, which are also the most that any step draws, and `token_budget`; on a mesh with an
    axis "data" in each part of it. Where `batch_invariant`,
    decode steps run in the second one too. Where `drafts` is not 0, each makes that many drafts a slot for the next.
    Where `max_logprobs` is not 0, each can find so many of the likeliest tokens, and log-probabilities of known tokens.
    A third one runs several decode steps, `steps`, if that is more than one.
    """

    def __init__(
        self,
        model: CompiledModel,
        manager: KVCacheManager,
        decode_size: int,
        token_budget: int,
        *,
        batch_invariant: bool,
        drafts: int = 0,
        max_logprobs: int = 0,
        steps: int = 1,
    ):
        """Compiles nothing yet."""
        self._model, self._manager = model, manager
        self.decode_size, self.token_budget, self.batch_invariant, self.drafts = (
            decode_size,
            token_budget,
            batch_invariant,
            drafts,
        )
        self.max_logprobs, self.steps = max_logprobs, steps
        self._before = model.compilations

    @property
    def compilations(self) -> int:
        """Programs compiled since this runner was made."""
        return self._model.compilations - self._before

    def __call__(
        self,
        cache: KVCache,
        tokens: Mapping[int, np.ndarray],
        given: Mapping[int, Sequence[int]],
        sampling: BatchedSamplingParams,
        seeds: np.ndarray,
        top: bool = False,
    ) -> tuple[Batch, StepResults, dict[int, slice], KVCache]:
        """Prepares a batch and launches its step; does not wait for it.

        Each slot brings `tokens` [n]. As `given` [m] says of the slot, something is found after the last m of them: -1
        = a token is drawn, as `sampling` and `seeds` say; else this one is known to follow. `top` says whether the
        likeliest tokens are wanted. The cache is donated.

        Returns:
          (the batch; what the step found; {slot: which of its rows are the slot's}; the cache).
        """
        sizes = dict(prefill_size=self.token_budget, decode_size=0 if self.batch_invariant else self.decode_size)
        table, batch = self._manager.requests, self._manager.prepare_forward(tokens, **sizes)
        size = len(batch.slots) // table.num_shards
        starts = first_tokens(table, {slot: len(new) for slot, new in tokens.items()}, size)
        places = first_tokens(table, {slot: len(given[slot]) for slot in tokens}, self.decode_size)
        where = {slot: slice(place, place + len(given[slot])) for slot, place in places.items()}
        rows, known = np.full((2, table.num_shards * self.decode_size), -1, np.int32)
        for slot, new in tokens.items():
            # Where a token stands within its part.
            end = starts[slot] % size + len(new)
            rows[where[slot]], known[where[slot]] = range(end - len(given[slot]), end), given[slot]
        args = rows, sampling, seeds
        if self.max_logprobs:
            args += (LogprobRows(known, np.bool_(top), self.max_logprobs),)
        inputs = table.put(args, "tokens")
        if self.drafts:
            ids, logprobs, *found, drafts, cache = self._model.draft_step(cache, batch, *inputs, drafts=self.drafts)
        else:
            (ids, logprobs, *found, cache), drafts = self._model.sample_step(cache, batch, *inputs), None
        return batch, StepResults(ids, logprobs, found[0] if top else None, drafts), where, cache

    def run_steps(
        self,
        cache: KVCache,
        tokens: Mapping[int, np.ndarray],
        counts: Mapping[int, int],
        sampling: BatchedSamplingParams,
        seeds: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, KVCache]:
        """Runs up to `steps` decode steps at once; each slot brings its newest token and gets as many as `counts` says.

        Returns ([slots, steps] tokens and log-probabilities, on the host; the cache). The cache is donated.

        Raises:
          CacheFullError: not enough blocks are free for so many steps; nothing was done.
        """
        table = self._manager.requests
        batch = self._manager.prepare_forward(tokens, reserve=self.steps - 1)
        args = np.asarray([counts.get(slot, 0) for slot in range(len(seeds))], np.int32), sampling, seeds
        *found, cache = self._model.sample_loop(cache, batch, *table.put(args, "tokens"), steps=self.steps)
        return *table.get(found), cache

    def sampling_rows(
        self, requests: Sequence[Request]
    ) -> tuple[BatchedSamplingParams, np.ndarray, dict[Request, Exception]]:
        """How each slot's tokens are drawn, their seeds [slots] uint32, and what is wrong with a request, if anything.

        Slots of other requests draw greedily.
        """
        slots, failed = self._manager.schema.max_requests, {}
        sampling, seeds = BatchedSamplingParams.of([GREEDY] * slots), np.zeros((slots,), np.uint32)
        for request in requests:
            try:
                for name, column in vars(sampling).items():
                    column[request.slot] = getattr(request.sampling, name)
                seeds[request.slot] = request.seed
            except Exception as error:  # of this request only
                failed[request] = error
        return sampling, seeds, failed

    def warm_up(self, cache: KVCache, prefix: PrefixCache | None) -> tuple[dict[str, int], KVCache]:
        """Runs each program once: the steps, and those that offload, resume, fork and restore requests.

        Returns ({name of a step's program: its number of tokens}, the cache); the cache is donated. No request is left.
        """
        schema, sizes, manager = self._manager.schema, {}, self._manager
        sampling, seeds, _ = self.sampling_rows([])
        for count in (min(schema.max_query_tokens + 1, self.token_budget, schema.max_context), 1):
            slot = manager.admit(num_tokens=count)
            batch, _, _, cache = self(cache, {slot: np.zeros((count,), np.int32)}, {slot: [-1]}, sampling, seeds)
            sizes["mixed" if batch.prefill else "decode"] = len(batch.slots)
            if count == 1:
                if 1 < self.steps < schema.max_context:
                    newest = {slot: np.zeros((1,), np.int32)}
                    with contextlib.suppress(CacheFullError):  # in so small a cache steps always run alone
                        *_, cache = self.run_steps(cache, newest, {slot: 1}, sampling, seeds)
                        sizes["several"] = self.steps
                offloaded, cache = offload(manager, cache, slot)
                slot, cache = resume(manager, cache, offloaded)
                if prefix is not None:
                    cache = prefix.warm_up(cache, slot)
                table, part = manager.requests, manager.requests.shard(slot)
                if table.free_slots(part) and table.room(part):  # otherwise no request can ever be forked
                    (child,), cache = manager.fork(cache, slot, 1)
                    manager.release(child)
            manager.release(slot)
        return sizes, cache
