"""Runs an engine's steps on the device, in programs of fixed shapes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import GREEDY, LogprobRows, SamplingRows, TopLogprobs
from dsv4_jax.engine.requests import Request
from dsv4_jax.host import KVCacheManager, PrefixCache, offload, resume


class StepResults(NamedTuple):
    """What a step found, on the device or the host.

    Attributes:
      tokens: [decode_size] int32, drawn or given.
      logprobs: [decode_size] float32 their log-probabilities.
      top: the likeliest tokens [decode_size, max_logprobs]; None = not wanted.
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

    They have `decode_size` tokens, which are also the most that any step draws, and `token_budget`. Where `uniform`,
    decode steps run in the second one too. Where `drafts` is not 0, each makes that many drafts a slot for the next.
    Where `max_logprobs` is not 0, each can find so many of the likeliest tokens, and log-probabilities of known tokens.
    """

    def __init__(
        self,
        model: CompiledModel,
        manager: KVCacheManager,
        decode_size: int,
        token_budget: int,
        *,
        uniform: bool,
        drafts: int = 0,
        max_logprobs: int = 0,
    ):
        """Compiles nothing yet."""
        self._model, self._manager = model, manager
        self.decode_size, self.token_budget, self.uniform, self.drafts = decode_size, token_budget, uniform, drafts
        self.max_logprobs = max_logprobs
        self._before = model.compilations

    @property
    def compilations(self) -> int:
        """Programs compiled since this runner was made."""
        return self._model.compilations - self._before

    def __call__(
        self,
        cache: KVCache,
        tokens: Mapping[int, np.ndarray],
        sampled_rows: Sequence[int],
        sampling: SamplingRows,
        seeds: np.ndarray,
        given: Sequence[int] = (),
        top: bool = False,
    ) -> tuple[Batch, StepResults, KVCache]:
        """Prepares a batch and launches its step; does not wait for it.

        Each slot brings `tokens` [n]. A token is drawn after each of the batch's tokens at the indices `sampled_rows`,
        as `sampling` and `seeds` say of its slot, or `given` has the one that is known to follow (otherwise -1). `top`
        says whether the likeliest tokens are wanted. The cache is donated.

        Returns:
          (the batch; what the step found, in the order of `sampled_rows` and padded; the cache).
        """
        sizes = dict(prefill_size=self.token_budget, decode_size=0 if self.uniform else self.decode_size)
        batch = self._manager.prepare_forward(tokens, **sizes)
        rows = np.full((self.decode_size,), -1, np.int32)
        rows[: len(sampled_rows)] = sampled_rows
        args = rows, sampling, seeds
        if self.max_logprobs:
            known = np.full_like(rows, -1)
            known[: len(given)] = given
            args += (LogprobRows(known, np.bool_(top), self.max_logprobs),)
        inputs = self._manager.requests.put(args)
        if self.drafts:
            tokens, logprobs, *found, drafts, cache = self._model.draft_step(cache, batch, *inputs, drafts=self.drafts)
        else:
            (tokens, logprobs, *found, cache), drafts = self._model.sample_step(cache, batch, *inputs), None
        return batch, StepResults(tokens, logprobs, found[0] if top else None, drafts), cache

    def sampling_rows(self, requests: Sequence[Request]) -> tuple[SamplingRows, np.ndarray, dict[Request, Exception]]:
        """How each slot's tokens are drawn, their seeds [slots] uint32, and what is wrong with a request, if anything.

        Slots of other requests draw greedily.
        """
        slots, failed = self._manager.schema.max_requests, {}
        sampling, seeds = SamplingRows.of([GREEDY] * slots), np.zeros((slots,), np.uint32)
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
            batch, _, cache = self(cache, {slot: np.zeros((count,), np.int32)}, [count - 1], sampling, seeds)
            sizes["mixed" if batch.prefill else "decode"] = len(batch.slots)
            if count == 1:
                offloaded, cache = offload(manager, cache, slot)
                slot, cache = resume(manager, cache, offloaded)
                if prefix is not None:
                    cache = prefix.warm_up(cache, slot)
                if manager.free_slots and manager.free_blocks:  # otherwise no request can ever be forked
                    (child,), cache = manager.fork(cache, slot, 1)
                    manager.release(child)
            manager.release(slot)
        return sizes, cache
