"""Decides which requests run: admission, the tokens that each brings to a step, and preemption."""

import bisect
import operator
from collections.abc import Hashable, Mapping

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.engine.requests import FinishReason, Request
from dsv4_jax.engine.steps import UNKNOWN, LaunchedStep, ScheduledRequest
from dsv4_jax.host import CacheCorruptionError, CacheFullError, KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.host.offload import capture
from dsv4_jax.host.shard_placement import fits


class Scheduler:
    """Holds the requests of an engine and their cache.

    A request waits until a slot is free, and blocks for its tokens and one block more. It then takes blocks as it
    grows. When a shard of the cache has none left, the youngest of its requests with the lowest priority is preempted.
    The request's bytes move to host memory and later come back unchanged, to any shard. Running its tokens again would
    need no host memory, but a token that was decoded alone and is then read in a chunk may differ in the last bit.

    Attributes:
      requests: {id: unfinished request}. `restart` rebuilds the two lists from it.
      running: requests with a slot, in the order in which they are served.
      waiting: requests without a slot, in the same order.
      pending_outputs: {request that may have new tokens or failed since `Engine.step` last returned: number of tokens
        it had then}.
      current: the requests that the current step is about: the one it admits, then those it may run, then those it
        does.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        cache: KVCache,
        metrics: EngineMetrics,
        config: EngineConfig,
        *,
        drafter: Drafter | None,
        prefix: PrefixCache | None,
    ):
        """Makes a scheduler without requests; arguments as for `Engine`, but no drafter for drafts on the device."""
        self.manager, self.cache, self.metrics, self.config = manager, cache, metrics, config
        self.drafter, self.prefix = drafter, prefix
        self.requests: dict[Hashable, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.pending_outputs: dict[Request, int] = {}
        self.current: tuple[Request, ...] = ()
        # A new cache gets the same shardings. Uncommitted arrays stay so: committed ones would need another program.
        self._shardings = jax.tree.map(lambda x: x.sharding if x.committed else None, cache)

    def add(self, *requests: Request) -> None:
        """Queues requests, with or without a slot."""
        for request in requests:
            bisect.insort(self._list_of(request), request, key=_rank)
        self.requests.update({request.id: request for request in requests})

    def fork(self, request: Request, children: list[Request]) -> None:
        """Queues copies of a request. Those for which there is room run at once.

        Full blocks are shared. The bytes of children without room wait in host memory, as after preemption. If a step
        that was launched already runs the request's last token, the children run it again, to draw with their seeds.
        """
        offloaded, slots, slot = request.offloaded, [], request.slot
        if slot >= 0 and (length := min(self.manager.length(slot), len(request.tokens) - 1)):
            table = self.manager.requests
            room = min(len(children), len(table.free_slots(table.shard(slot))))
            if room < len(children):
                offloaded = capture(self.manager, self.cache, slot, length=length)
            try:
                if room:
                    slots, self.cache = self.manager.fork(self.cache, slot, room, length=length)
            except CacheFullError:
                offloaded = offloaded or capture(self.manager, self.cache, slot, length=length)
        for child, slot in zip(children, slots, strict=False):
            child.slot = slot
        for child in children[len(slots) :]:
            child.offloaded = offloaded
        self.add(*children)

    def finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends a running or waiting request and frees its slot and blocks."""
        if error is not None:
            self.pending_outputs.setdefault(request, len(request.tokens))
        request.finish_reason, request.error, request.offloaded = reason, error, None
        if request.slot >= 0:
            self.manager.release(request.slot)
        self._list_of(request).remove(request)
        request.slot = -1
        self.requests.pop(request.id, None)
        counter = dict(error="failed", cancelled="cancelled").get(reason, "finished")
        setattr(self.metrics, counter, getattr(self.metrics, counter) + 1)

    def restart(self) -> None:
        """Recovers from an error: frees all slots and queues the unfinished requests, which read their tokens again."""
        self.manager.release_all()
        for request in self.requests.values():
            request.slot = -1
        self.running, self.waiting = [], sorted(self.requests.values(), key=_rank)
        for request in list(self.waiting):
            if request.finish_reason is not None:  # the error came while it finished
                self.finish(request, request.finish_reason, request.error)
        if _is_lost(self.cache):
            if self.prefix is not None:
                self.prefix.evict(self.manager.schema.num_blocks)
            cache = self.manager.init_cache()
            cache = cache if self.cache.expert_counts is None else cache.with_expert_counts()
            self.cache = jax.device_put(cache, self._shardings)

    def admit(self) -> None:
        """Gives slots to waiting requests in order, up to the first one that does not fit, and counts the others."""
        self._admit_all()
        self.metrics.waits += len(self.waiting)

    def _admit_all(self):
        while self.waiting and self.manager.free_slots:
            request = self.waiting[0]
            self.current = (request,)
            # One block is spare: without it the request might be preempted again at once.
            num_tokens = len(request.tokens) + min(request.remaining - 1, self.manager.schema.block_tokens)
            if self.running and not self._fits(request, num_tokens):
                return
            try:
                slot = self._admit(request, num_tokens)
            except CacheCorruptionError as error:
                self.finish(request, "error", error)
                continue
            self.manager.allocate(slot, num_tokens - self.manager.length(slot))
            self._move(request, slot)
            request.offloaded = None

    def take_snapshots(self, launched: LaunchedStep) -> None:
        """Reads the rows of requests that a launched step brings to a block boundary, since the next one may lose them.

        `update` gives them to the prefix cache once the step's output is known.
        """
        if self.prefix is None:
            return
        block = self.manager.schema.block_tokens
        for item in launched.scheduled:
            if item.end // block > item.start // block and item.request.finish_reason is None:
                launched.snapshots[item.request] = self.prefix.snapshot(self.cache, item.request.slot)

    def schedule(
        self, *, decode: bool = True, in_flight: Mapping[Request, int] | None = None
    ) -> list[ScheduledRequest]:
        """Chooses the tokens of the next step: last tokens with drafts, then unread tokens within the budget.

        Reserves their blocks, and preempts requests if necessary.

        Args:
          decode: as for `Engine.step`.
          in_flight: if the step before was launched and not read, {request for which it draws a token: the row of its
            output with that token}. No request is preempted then, since its tokens are not known.

        Raises:
          CacheFullError: a request has to be preempted, and `in_flight` is given.
        """
        self.current = tuple(self.running)
        drawn = in_flight or {}
        unread = {r: len(r.tokens) + (r in drawn) - self.manager.length(r.slot) for r in self.running}
        decoding = [request for request, count in unread.items() if decode and count == 1]
        if in_flight is None:
            scheduled = [item for request in decoding if (item := self._schedule_decode(request))]
        else:
            scheduled = [self._schedule_ahead(r, drawn.get(r, -1)) for r in decoding if r.remaining > (r in drawn)]
        readers = [request for request, count in unread.items() if count > 1 and request.slot >= 0]
        table = self.manager.requests
        # Each shard's remaining tokens, and its remaining rows of output after one row for each reader.
        budget = [self.config.token_budget] * table.num_shards
        rows = [self.config.decode_size(table.slots_per_shard)] * table.num_shards
        for item in scheduled:
            budget[table.shard(item.request.slot)] -= len(item.tokens)
            rows[table.shard(item.request.slot)] -= len(item.forced_tokens)
        for request in readers:
            rows[table.shard(request.slot)] -= 1
        for request in readers:
            start, known, shard = self.manager.length(request.slot), len(request.tokens), table.shard(request.slot)
            limit = min(budget[shard], rows[shard] + 1) if request.scores_prompt else budget[shard]
            end = min(start + limit, self._chunk_end(start, known - (not decode)))
            if end > start:
                forced = request.tokens[start + 1 : end + 1].tolist() if request.scores_prompt else []
                forced += [-1] if end == known else []
                rows[shard] -= max(len(forced) - 1, 0)
                tokens = request.tokens[start:end]
                scheduled.append(ScheduledRequest(request, tokens, start, is_prefill=True, forced_tokens=forced))
                budget[shard] -= end - start
        self.current = tuple(item.request for item in scheduled)
        return scheduled

    def schedule_steps(self) -> dict[Request, int]:
        """Returns the number of decode steps that each running request can take without the host; {} for a single step.

        Several steps need that no request waits and all decode. A request takes no step beyond its limit, or beyond the
        end of a block that the prefix cache keeps.
        """
        most = self.config.num_scheduler_steps
        if most == 1:
            return {}
        counts = {}
        for request in self.running:
            length, schema = self.manager.length(request.slot), self.manager.schema
            unread = len(request.tokens) - length
            if self.waiting or unread != 1 or request.params.top_logprobs or length + most > schema.max_context:
                return {}
            to_boundary = most if self.prefix is None else schema.block_tokens - length % schema.block_tokens
            counts[request] = min(most, request.remaining, to_boundary)
        self.current = tuple(counts)
        return counts if max(counts.values(), default=0) > 1 else {}

    def _fits(self, request, num_tokens):
        if self.prefix is not None and request.offloaded is None and not request.scores_prompt:
            return self.prefix.fits(request.tokens, num_tokens)
        table = self.manager.requests
        return any(fits(table, shard, num_tokens) for shard in range(table.num_shards))

    def _admit(self, request, num_tokens):
        """Returns a slot for a request, with the tokens that the prefix cache or host memory still holds of it."""
        room = dict(num_tokens=num_tokens)
        if request.offloaded is not None:
            slot, self.cache = resume(self.manager, self.cache, request.offloaded, **room)
        elif self.prefix is not None and not request.scores_prompt:  # scored tokens must run
            slot, hit_tokens, self.cache = self.prefix.admit(self.cache, request.tokens, **room)
            if not request.generated:
                request.cached_tokens = hit_tokens
        else:
            slot = self.manager.admit(request.tokens, **room)
        return slot

    def _schedule_decode(self, request):
        """Returns the last token and drafts of a request; None if it is preempted meanwhile or its drafter fails."""
        if request.slot < 0:
            return None
        try:
            drafts = self._draft(request)
        except Exception as error:  # a drafter is the caller's code, and concerns this request only
            return self.finish(request, "error", error)
        while request.slot >= 0:
            try:
                self.manager.allocate(request.slot, 1 + len(drafts))
                tokens, start = np.concatenate([request.tokens[-1:], drafts]), len(request.tokens) - 1
                return ScheduledRequest(request, tokens, start, not request.generated, len(drafts), [-1] * len(tokens))
            except CacheFullError:
                if len(drafts):
                    drafts = drafts[:0]  # no request is preempted for the sake of drafts
                else:
                    shard = self.manager.requests.shard
                    self._preempt([r for r in self.running if shard(r.slot) == shard(request.slot)][-1])
        return None

    def _schedule_ahead(self, request, source):
        """Returns the last token of a request, which is row `source` of a step that the host has not read; -1 = known.

        Raises CacheFullError if no block is free for it.
        """
        self.manager.allocate(request.slot, 1)
        tokens = request.tokens[-1:] if source < 0 else UNKNOWN
        is_prefill = source < 0 and not request.generated
        return ScheduledRequest(request, tokens, self.manager.length(request.slot), is_prefill, source=source)

    def _draft(self, request):
        """Returns [n] int32 drafts, no more than a step may verify."""
        count = min(request.params.draft_tokens or 0, request.remaining - 1)
        if self.drafter is None or not count:
            return request.device_drafts[:count]
        drafts = self.drafter.draft(request.tokens, count)
        if len(drafts) > count:
            raise ValueError(f"the drafter guessed {len(drafts)} tokens, at most {count} were asked for")
        return self.manager.check_ids(drafts, "drafts") if len(drafts) else np.zeros((0,), np.int32)

    def _chunk_end(self, start, end):
        """Limits the end of a chunk to the next block boundary whose snapshot the prefix cache keeps."""
        if self.prefix is None:
            return end
        block = self.manager.schema.block_tokens
        if self.prefix.every is None:
            last = end // block * block
            return last if last > start else end
        stride = self.prefix.every * block
        return min(end, (start // stride + 1) * stride)

    def _preempt(self, request):
        """Moves a request's bytes to host memory; admission brings them back."""
        if self.manager.length(request.slot):
            try:
                request.offloaded, self.cache = offload(self.manager, self.cache, request.slot)
            except CacheCorruptionError as error:
                return self.finish(request, "error", error)
        else:  # it has run no token yet
            self.manager.release(request.slot)
        self._move(request, -1)
        self.metrics.preemptions += 1

    def _list_of(self, request):
        return self.waiting if request.slot < 0 else self.running

    def _move(self, request, slot):
        """Gives a waiting request a slot, or a running one none (-1)."""
        self._list_of(request).remove(request)
        request.slot = slot
        bisect.insort(self._list_of(request), request, key=_rank)


_rank = operator.attrgetter("rank")


def _is_lost(cache):
    """Whether a failed step has consumed the donated cache."""
    try:
        jax.block_until_ready(cache)
    except Exception:
        return True
    return any(x.is_deleted() for x in jax.tree.leaves(cache))
