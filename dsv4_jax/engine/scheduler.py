"""Decides which requests run: admission, what each brings to a step, and preemption."""

import bisect
import dataclasses
import operator
from collections.abc import Hashable, Sequence

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.engine.requests import FinishReason, Request
from dsv4_jax.host import CacheCorruptionError, CacheFullError, KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.host.offload import capture
from dsv4_jax.host.shard_placement import fits


@dataclasses.dataclass(frozen=True)
class ScheduledRequest:
    """What one request brings to a step: the tokens [n] int32 that follow what the cache holds of it."""

    request: Request
    tokens: np.ndarray
    is_prefill: bool = False  # of its prompt, or read again after a restart; not the one drawn last
    num_drafts: int = 0  # how many of them, the last ones, are drafts
    # What follows each of the last ones, for which something is to be found: a token of the prompt, or -1 = draw one.
    given: Sequence[int] = (-1,)

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after them."""
        return bool(self.given) and self.given[-1] < 0

    @property
    def num_scored(self) -> int:
        """How many of `given` are tokens of the prompt."""
        return sum(token >= 0 for token in self.given)


class Scheduler:
    """The requests of an engine and their cache.

    A request waits until there is a slot, and blocks for its tokens and one block more. It then takes blocks as it
    grows. When none is left, the youngest request of the lowest priority is preempted, of those in its part of the
    cache: its bytes move to host memory and come back unchanged, to any part, so its output does not depend on that.
    Running its tokens again would need no host memory, but a token that was decoded alone and is then read in a chunk
    may differ in a last bit.

    Attributes:
      requests: unfinished requests by id. From these alone `restart` finds the two lists again.
      running: those with a slot, in the order in which they are served.
      waiting: those without, in the same order.
      pending_outputs: requests that may have new tokens, or failed, since `Engine.step` last returned, with the number
        of tokens they had then.
      current: requests that the newest step is about: the one it admits, then those that may run, then those that do.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        cache: KVCache,
        metrics: EngineMetrics,
        *,
        token_budget: int,
        drafter: Drafter | None,
        draft_tokens: int,
        prefix: PrefixCache | None,
    ):
        """A scheduler without requests; arguments as for `Engine`, but without a drafter for drafts of the device."""
        self.manager, self.cache, self.metrics = manager, cache, metrics
        self.token_budget, self.drafter, self.draft_tokens, self.prefix = token_budget, drafter, draft_tokens, prefix
        self.requests: dict[Hashable, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.pending_outputs: dict[Request, int] = {}
        self.current: tuple[Request, ...] = ()
        # Where a new cache belongs. Arrays that nobody placed stay so: placed ones are arguments of another program.
        self._shardings = jax.tree.map(lambda x: x.sharding if x.committed else None, cache)

    def add(self, *requests: Request) -> None:
        """Queues requests, with or without a slot."""
        for request in requests:
            self._list(request)
        self.requests.update({request.id: request for request in requests})

    def fork(self, request: Request, children: list[Request]) -> None:
        """Queues requests that hold the same tokens as another; those for which there is room run at once.

        Full blocks are shared. The bytes of children without room wait in host memory, as those of preempted requests.
        """
        offloaded, slots = request.offloaded, []
        if request.slot >= 0 and self.manager.length(request.slot):
            table = self.manager.requests
            room = min(len(children), len(table.free_slots(table.shard(request.slot))))
            if room < len(children):
                offloaded = capture(self.manager, self.cache, request.slot)
            try:
                slots, self.cache = self.manager.fork(self.cache, request.slot, room) if room else ([], self.cache)
            except CacheFullError:
                offloaded = offloaded or capture(self.manager, self.cache, request.slot)
        for child, slot in zip(children, slots, strict=False):
            child.slot = slot
        for child in children[len(slots) :]:
            child.offloaded = offloaded
        self.add(*children)

    def finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends a request, running or waiting; its slot and blocks are free."""
        if error is not None:
            self.pending_outputs.setdefault(request, len(request.tokens))
        request.finish_reason, request.error, request.offloaded = reason, error, None
        if request.slot >= 0:
            self.manager.release(request.slot)
        self._unlist(request)
        request.slot = -1
        self.requests.pop(request.id, None)
        if error is not None:
            self.metrics.failed += 1
        elif reason == "cancelled":
            self.metrics.cancelled += 1
        else:
            self.metrics.finished += 1

    def restart(self) -> None:
        """After an error: frees all slots; unfinished requests wait, and will read the tokens they have again."""
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
            self.cache = jax.device_put(self.manager.init_cache(), self._shardings)

    def admit(self) -> None:
        """Gives slots to waiting requests, in order; the first one that does not fit holds up those behind it."""
        while self.waiting and self.manager.free_slots:
            request = self.waiting[0]
            self.current = (request,)
            # With one block to spare: otherwise it might be preempted again at once.
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

    def schedule(self, *, decode: bool = True) -> list[ScheduledRequest]:
        """Chooses what the next step runs: newest tokens with drafts, then unread tokens within the budget.

        Blocks are reserved for all of it, and requests preempted where necessary. `decode` is that of `Engine.step`.
        """
        self.current = tuple(self.running)
        unread = {request: len(request.tokens) - self.manager.length(request.slot) for request in self.running}
        newest = [request for request, count in unread.items() if count == 1]
        scheduled = [item for request in newest if decode and (item := self._schedule_decode(request))]
        readers = [request for request, count in unread.items() if count > 1 and request.slot >= 0]
        table = self.manager.requests
        # What is left in each part of the tokens, and of the places where a step finds some, when each may draw one.
        budget = [self.token_budget] * table.num_shards
        rows = [table.slots_per_shard * (1 + self.draft_tokens)] * table.num_shards
        for item in scheduled:
            budget[table.shard(item.request.slot)] -= len(item.tokens)
            rows[table.shard(item.request.slot)] -= len(item.given)
        for request in readers:
            rows[table.shard(request.slot)] -= 1
        for request in readers:
            start, known, part = self.manager.length(request.slot), len(request.tokens), table.shard(request.slot)
            most = min(budget[part], rows[part] + 1) if request.scores_prompt else budget[part]
            end = min(start + most, self._chunk_end(start, known - (not decode)))
            if end > start:
                given = request.tokens[start + 1 : end + 1].tolist() if request.scores_prompt else []
                given += [-1] if end == known else []
                rows[part] -= max(len(given) - 1, 0)
                scheduled.append(ScheduledRequest(request, request.tokens[start:end], is_prefill=True, given=given))
                budget[part] -= end - start
        self.current = tuple(item.request for item in scheduled)
        return scheduled

    def schedule_steps(self, most: int) -> dict[Request, int]:
        """How many steps each running request may take before the host has to look; none where a step is better alone.

        All bring their newest token. Nobody waits, and no request reaches its limit, or the end of a block that is kept
        for others, before its last step.
        """
        counts = {}
        for request in self.running:
            length, schema = self.manager.length(request.slot), self.manager.schema
            unread = len(request.tokens) - length
            if self.waiting or unread != 1 or request.num_top_logprobs or length + most > schema.max_context:
                return {}
            to_boundary = most if self.prefix is None else schema.block_tokens - length % schema.block_tokens
            counts[request] = min(most, request.remaining, to_boundary)
        self.current = tuple(counts)
        return counts if max(counts.values(), default=0) > 1 else {}

    def _fits(self, request, num_tokens):
        if self.prefix is not None and request.offloaded is None and not request.scores_prompt:
            return self.prefix.fits(request.tokens, num_tokens)
        table = self.manager.requests
        return any(fits(table, part, num_tokens) for part in range(table.num_shards))

    def _admit(self, request, num_tokens):
        """A slot for a request, which holds what is still known of it in the cache or in host memory."""
        room = dict(num_tokens=num_tokens)
        if request.offloaded is not None:
            slot, self.cache = resume(self.manager, self.cache, request.offloaded, **room)
        elif self.prefix is not None and not request.scores_prompt:  # what it scores must run
            slot, hit_tokens, self.cache = self.prefix.admit(self.cache, request.tokens, **room)
            if not request.generated:
                request.cached_tokens = hit_tokens
        else:
            slot = self.manager.admit(request.tokens, **room)
        return slot

    def _schedule_decode(self, request):
        """The newest token and drafts of a request; None if it was preempted meanwhile or its drafter fails."""
        if request.slot < 0:
            return None
        try:
            drafts = self._draft(request)
        except Exception as error:  # a drafter is the caller's code, and concerns this request only
            return self.finish(request, "error", error)
        while request.slot >= 0:
            try:
                self.manager.allocate(request.slot, 1 + len(drafts))
                tokens = np.concatenate([request.tokens[-1:], drafts])
                is_prefill, num_drafts = not request.generated, len(drafts)
                return ScheduledRequest(request, tokens, is_prefill, num_drafts, given=[-1] * (1 + num_drafts))
            except CacheFullError:
                if len(drafts):
                    drafts = drafts[:0]  # no request is preempted for the sake of drafts
                else:
                    part = self.manager.requests.shard
                    self._preempt([r for r in self.running if part(r.slot) == part(request.slot)][-1])
        return None

    def _draft(self, request):
        """[n] int32 drafts, as many as may be verified at most."""
        count = min(request.draft_tokens, request.remaining - 1)
        if self.drafter is None or not count:
            return request.predicted[:count]
        drafts = self.drafter.draft(request.tokens, count)
        if len(drafts) > count:
            raise ValueError(f"the drafter guessed {len(drafts)} tokens, at most {count} were asked for")
        return self.manager.check_ids(drafts, "drafts") if len(drafts) else np.zeros((0,), np.int32)

    def _chunk_end(self, start, end):
        """Where a chunk from `start` may end: no further than the next boundary whose snapshot is to be kept."""
        if self.prefix is None:
            return end
        block = self.manager.schema.block_tokens
        if self.prefix.every is None:
            last = end // block * block
            return last if last > start else end
        stride = self.prefix.every * block
        return min(end, (start // stride + 1) * stride)

    def _preempt(self, request):
        """Moves a request out of the cache, to be resumed later."""
        if self.manager.length(request.slot):
            try:
                request.offloaded, self.cache = offload(self.manager, self.cache, request.slot)
            except CacheCorruptionError as error:
                return self.finish(request, "error", error)
        else:  # those before it took each step's tokens so far
            self.manager.release(request.slot)
        self._move(request, -1)
        self.metrics.preemptions += 1

    def _list(self, request):
        bisect.insort(self.waiting if request.slot < 0 else self.running, request, key=_rank)

    def _unlist(self, request):
        (self.waiting if request.slot < 0 else self.running).remove(request)

    def _move(self, request, slot):
        """Gives a waiting request a slot, or a running one none (-1)."""
        self._unlist(request)
        request.slot = slot
        self._list(request)


_rank = operator.attrgetter("rank")


def _is_lost(cache):
    """Whether a failed step has consumed the donated cache."""
    try:
        jax.block_until_ready(cache)
    except Exception:
        return True
    return any(x.is_deleted() for x in jax.tree.leaves(cache))
