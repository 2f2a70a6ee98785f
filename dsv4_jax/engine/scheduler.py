"""The scheduler of an engine: admits requests, chooses the tokens that each runs in a step, and preempts requests."""

import bisect
import dataclasses
import operator
from collections.abc import Hashable

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.decode import StepOutput
from dsv4_jax.engine.drafters import Drafter, accept
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.engine.requests import NO_DRAFTS, FinishReason, Request
from dsv4_jax.engine.steps import LaunchedStep, Schedule
from dsv4_jax.host import CacheCorruptionError, CacheFullError, KVCacheManager, PrefixCache, capture, offload, resume


@dataclasses.dataclass(eq=False, repr=False)
class Scheduler:
    """Holds the requests of an engine and their cache.

    A request waits until there is a free slot, and free blocks for its tokens and for one block of new tokens. It then
    takes more blocks as it grows. When a shard of the cache has no block left, a request of the shard is preempted: of
    those with the lowest priority, the one that was added last.

    The bytes of a preempted request move to host memory and later come back unchanged, to any shard. The request does
    not run its tokens again, because a token that was decoded alone may get other bits in a chunk.

    Attributes:
      manager, prefix: as for `Engine`.
      cache: the cache after the most recently launched step.
      metrics: the engine's counters, which the scheduler updates.
      config: the engine's configuration, from `EngineConfig.resolve`.
      drafter: the drafter on the host; None = no drafts, or drafts on the device.
      requests: {id: unfinished request}. `restart` rebuilds `running` and `waiting` from it.
      running: requests with a slot, in the order in which they are served.
      waiting: requests without a slot, in the order in which they are served.
      pending_outputs: {request: number of tokens that it had when `Engine.step` last returned}, for requests that may
        have got tokens or failed since.
      current: the requests that may be the cause if the current step fails: during admission the request being
        admitted, during scheduling all running requests, and after that the requests that the step runs.
    """

    manager: KVCacheManager
    cache: KVCache
    metrics: EngineMetrics
    config: EngineConfig
    drafter: Drafter | None
    prefix: PrefixCache | None

    def __post_init__(self):
        self.requests: dict[Hashable, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.pending_outputs: dict[Request, int] = {}
        self.current: tuple[Request, ...] = ()

    def add(self, *requests: Request) -> None:
        """Adds requests to `running` if they have a slot, else to `waiting`."""
        for request in requests:
            bisect.insort(self._list_of(request), request, key=_rank)
        self.requests.update({request.id: request for request in requests})

    def fork(self, request: Request, children: list[Request], *, in_flight: LaunchedStep | None) -> None:
        """Adds copies of a request.

        Copies for which the shard has slots and blocks run at once and share the request's full blocks. The other
        copies wait with their bytes in host memory, as after a preemption.

        If a step in flight runs the request's newest token, the copies run this token again, to draw with their own
        seeds. If the engine uses drafts, the copies run all tokens again, since drafts in this step may have
        overwritten rows that the newest token reads. They also run all tokens again if this step computes
        log-probabilities or decisions of earlier tokens, which only the request itself will get.

        Args:
          request: an unfinished request, which goes on too.
          children: the copies, from `Request.child`.
          in_flight: the step that was launched and not read, if any.
        """
        # Each child gets one of `slots`, or waits in host memory as `offloaded`. If `offloaded` is None, the child runs
        # all tokens again.
        offloaded = request.offloaded
        slots = []
        slot = request.slot
        num_launched = 0 if slot < 0 else self.manager.length(slot)  # includes the tokens of a step in flight
        length = min(num_launched, request.num_tokens - 1)  # number of tokens whose rows are copied
        is_overwritten = self.config.draft_tokens and num_launched > length
        is_unread = False
        if in_flight is not None and (request.scores_prompt or self.config.record_decisions):
            starts = dict(zip(in_flight.schedule.requests, in_flight.schedule.numbers["start"].tolist(), strict=True))
            is_unread = starts.get(request, length) < length
        if length and not is_overwritten and not is_unread:
            num_fitting = min(len(children), self.manager.free_slots_beside(slot))
            try:
                if num_fitting:
                    slots, self.cache = self.manager.fork(self.cache, slot, num_fitting, length=length)
                    for child_slot in slots:
                        self.manager.allocate(child_slot, request.num_tokens - length)
            except CacheFullError:
                while slots:
                    self.manager.release(slots.pop())
            if len(slots) < len(children):
                offloaded = capture(self.manager, self.cache, slot, length=length)
        for child, slot in zip(children, slots, strict=False):
            child.slot = slot
        for child in children[len(slots) :]:
            child.offloaded = offloaded
        self.add(*children)

    def finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        """Ends a running or waiting request and frees its slot and blocks."""
        if error is not None:
            self.pending_outputs.setdefault(request, request.num_tokens)
        request.finish_reason = reason
        request.error = error
        request.offloaded = None
        if request.slot >= 0:
            self.manager.release(request.slot)
        self._list_of(request).remove(request)
        request.slot = -1
        self.requests.pop(request.id, None)
        if reason == "error":
            self.metrics.failed += 1
        elif reason == "cancelled":
            self.metrics.cancelled += 1
        else:
            self.metrics.finished += 1

    def restart(self) -> None:
        """Frees all slots and queues all unfinished requests, as after an error.

        Requests run their tokens again, except those that wait with their bytes in host memory. If the cache was lost,
        makes a new one.
        """
        self.manager.release_all()
        for request in self.requests.values():
            request.slot = -1
            if request.matcher is not None:
                request.matcher.reset()
        self.waiting = sorted(self.requests.values(), key=_rank)
        self.running = []
        for request in list(self.waiting):
            if request.finish_reason is not None:  # the exception came between the final token and `finish`
                self.finish(request, request.finish_reason, request.error)
        if _is_lost(self.cache):
            cache = self.manager.init_cache()
            self.cache = cache if self.cache.expert_counts is None else cache.with_expert_counts()

    def recompute(self) -> None:
        """Queues all requests so that they run all their tokens again, after the model got other weights.

        Bytes of requests in the cache or in host memory are not reused.
        """
        for request in self.requests.values():
            request.offloaded = None
            request.recorded = {}
        self.restart()

    def admit(self) -> None:
        """Gives slots to waiting requests in order, up to the first request that does not fit.

        Adds the number of requests that still wait to `metrics.waits`.
        """
        while self.waiting and self.manager.free_slots:
            request = self.waiting[0]
            self.current = (request,)
            # Reserves room for one block of new tokens, without which the request might be preempted again at once.
            num_tokens = request.num_tokens + min(request.remaining - 1, self.manager.schema.block_tokens)
            if self.running and not self._fits(request, num_tokens):
                break
            try:
                slot = self._admit(request, num_tokens)
            except CacheCorruptionError as error:
                self.finish(request, "error", error)
                continue
            self.manager.allocate(slot, num_tokens - self.manager.length(slot))
            self._move(request, slot)
            request.offloaded = None
        self.metrics.waits += len(self.waiting)

    def take_snapshots(self, launched: LaunchedStep) -> None:
        """Reads a snapshot of each request that reaches a block boundary in a launched step, for the prefix cache.

        Call it before the next step is launched, which may overwrite the rows of a snapshot. `update` passes the
        snapshots to the prefix cache after the step's output is read.
        """
        if self.prefix is None:
            return
        block = self.manager.schema.block_tokens
        schedule = launched.schedule
        starts = schedule.numbers["start"]
        ends = starts + schedule.numbers["num_tokens"]  # all drafts included
        for i in np.flatnonzero(ends // block > starts // block):
            if (request := schedule.requests[i]).finish_reason is None:
                launched.snapshots[request] = self.prefix.snapshot(self.cache, request.slot)

    def schedule(self, *, decode: bool, in_flight: LaunchedStep | None) -> Schedule:
        """Chooses the tokens of the next step: newest tokens with drafts, then unread tokens within `token_budget`.

        A token is unread if it has not run. The tokens' blocks are reserved; requests are preempted if necessary.

        Args:
          decode: as for `Engine.step`.
          in_flight: the previous step, if it was launched and not read. No request is preempted then, since the host
            does not know all of its tokens.

        Raises:
          CacheFullError: a request has to be preempted, and `in_flight` is given.
        """
        running = tuple(self.running)
        self.current = running
        schedule = Schedule.of(running, [np.zeros((1,), np.int32)] * len(running))  # zeros for the newest tokens
        slots = schedule.numbers["slot"]
        known = np.array([request.num_tokens for request in running], int)
        limits = np.array([request.max_tokens for request in running], int)
        certain = known  # minimum number of tokens that will be known after the step in flight is read
        if in_flight is not None:
            newest, drawn = in_flight.newest_tokens(self.manager.schema.max_requests, self.config.draft_tokens or 0)
            schedule.numbers["source"] = newest[slots]
            certain = known + (newest[slots] >= 0)
            known = known + drawn[slots]  # counts all drafts as accepted
        # The first limit is the request's end, because drafts past the end never count as accepted. The second limit
        # keeps all drafts within `max_context`.
        max_drafts = np.minimum(limits - certain - 1, self.manager.schema.max_context - known)
        schedule.numbers["start"] = self.manager.lengths[slots]
        unread = known - schedule.numbers["start"]
        can_decode = (unread == 1) & (known < limits) & decode
        schedule = self._add_drafts(schedule.select(can_decode), max_drafts[can_decode], in_flight is not None)
        # `_add_drafts` may have preempted requests, which then have no slot.
        readers = [running[i] for i in np.flatnonzero(unread > 1).tolist() if running[i].slot >= 0]
        if readers:
            schedule += self._schedule_prefill(readers, schedule, decode)
        self.current = schedule.requests
        return schedule

    def update(self, launched: LaunchedStep, output: StepOutput, follower: LaunchedStep | None) -> None:
        """Gives requests the accepted tokens of a step, forgets rejected drafts, and ends requests that are done.

        Args:
          launched: the step. Its requests that have ended since its launch are left out.
          output: the step's output as NumPy arrays.
          follower: the next step, if it was launched already.
        """
        schedule = launched.schedule
        block_tokens = self.manager.schema.block_tokens
        bad_rows = np.flatnonzero(~np.isfinite(output.logprobs)).tolist()
        output = dataclasses.replace(output, tokens=output.tokens.tolist(), logprobs=output.logprobs.tolist())
        followed = set()
        if follower is not None and self.config.draft_tokens:
            followed = set(follower.schedule.select(follower.schedule.numbers["source"] >= 0).requests)
        places = launched.first_rows.tolist(), launched.begins.tolist()
        rows = zip(schedule.requests, schedule.tokens, schedule.numbers.tolist(), *places, strict=True)
        for request, tokens, numbers, first_row, begin in rows:
            if request.finish_reason is not None:  # it has ended since the launch
                continue
            self._extend(request, tokens, numbers, first_row, output, bad_rows)
            if request.error is not None:
                continue
            _, start, num_tokens, num_drafts, *_ = numbers
            if output.decisions is not None:
                request.keep_decisions(start, output.decisions, slice(begin, begin + num_tokens))
            length = start + num_tokens
            if num_drafts:
                # The cache holds all drafts, also rejected ones and accepted ones past the request's end. The request's
                # newest token has not run, so the cache does not hold it.
                self.metrics.accepted_tokens += request.accepted[-1]
                length = request.num_tokens - 1
                num_rejected = start + num_tokens - length
                self.manager.rewind(request.slot, num_rejected, is_followed=request in followed)
            if self.prefix is not None and length // block_tokens > start // block_tokens:
                self.prefix.observe(
                    self.cache,
                    request.slot,
                    request.tokens[:length],
                    length=length,
                    snapshot=launched.snapshots.get(request),
                    salt=request.params.prefix_salt,
                )
            if request.matcher is not None and (error := request.matcher.error):
                message = f"request {request.id!r}: its grammar cannot go on: {error}"
                self.finish(request, "error", ValueError(message))
            elif request.finish_reason is not None:
                self.finish(request, request.finish_reason)

    def _extend(self, request, tokens, numbers, first_row, output, bad_rows):
        """Gives a request its tokens of a step, with log-probabilities, and the drafts that the device made.

        Ends the request with FloatingPointError instead if one of these log-probabilities is not finite.

        Args:
          request: the request.
          tokens: the ids of its tokens in the step.
          numbers: tuple of its fields in `Schedule.numbers`.
          first_row: index of its first row in the output.
          output: the step's output, with lists of tokens and log-probabilities.
          bad_rows: indices of the output rows whose log-probabilities are not finite.
        """
        slot, start, num_tokens, num_drafts, num_scored, _source, samples, is_prefill = numbers
        tops = output.top_logprobs
        # The request's output rows: one for each scored token, then one for each drawn token.
        num_drawn = samples * (1 + num_drafts)
        first_drawn_row = first_row + num_scored
        drawn = output.tokens[first_drawn_row : first_drawn_row + num_drawn]
        if num_drafts:
            drawn = accept(tokens[-num_drafts:].tolist(), drawn)
        drawn_rows = slice(first_drawn_row, first_drawn_row + len(drawn))
        # The rows belong to the last tokens that the step ran. `first_position` is the position of the first of these.
        first_position = start + num_tokens - (num_scored + num_drawn)
        for row in bad_rows:
            if first_row <= row < drawn_rows.stop:
                position = first_position + (row - first_row)
                error = FloatingPointError(f"request {request.id!r}: logits after its token {position} are not finite")
                return self.finish(request, "error", error)
        if num_scored:
            scored_rows = slice(first_row, first_drawn_row)
            request.score(start + 1, output.logprobs[scored_rows], tops and tops[scored_rows])
        self.metrics.prompt_tokens += is_prefill * (num_tokens - num_drafts)
        self.metrics.drafted_tokens += num_drafts
        if not drawn:
            return
        self.pending_outputs.setdefault(request, request.num_tokens)
        num_new = request.extend(drawn, output.logprobs[drawn_rows], num_drafts, tops and tops[drawn_rows])
        self.metrics.generated_tokens += num_new
        if output.draft_tokens is not None:
            drafts = output.draft_tokens[slot]
            request.device_drafts = drafts[drafts >= 0]

    def _schedule_prefill(self, readers, schedule, decode):
        """Schedules unread tokens of requests, within the token budget of the step.

        Args:
          readers: requests with more than one unread token.
          schedule: the decode tokens of the same step, which count towards the budget.
          decode: whether a request's newest known token may run. If this token runs, a new token is drawn after it.
        """
        shards = self.manager.shards
        # Both arrays have a number for each shard. `budget` counts the tokens that the step has room for beside the
        # decode tokens. `free_rows` counts the unused output rows, without one row that is set aside for each reader.
        budget = np.full((shards.count,), self.config.token_budget)
        free_rows = np.full((shards.count,), self.config.decode_size(shards.slots))
        decode_shards = shards.of(schedule.numbers["slot"])
        np.subtract.at(budget, decode_shards, schedule.numbers["num_tokens"])
        np.subtract.at(free_rows, decode_shards, schedule.num_rows)
        np.subtract.at(free_rows, [shards.of(request.slot) for request in readers], 1)
        chunks = []
        for request in readers:
            start = self.manager.length(request.slot)
            known = request.num_tokens
            shard = shards.of(request.slot)
            limit = min(budget[shard], free_rows[shard] + 1) if request.scores_prompt else budget[shard]
            end = int(min(start + limit, known if decode else known - 1))
            if end > start:
                if self.prefix is not None:
                    salt = request.params.prefix_salt
                    end = self.prefix.chunk_end(request.slot, request.tokens, end, salt=salt)
                samples = end == known
                num_scored = end - start - samples if request.scores_prompt else 0
                free_rows[shard] -= max(num_scored + samples - 1, 0)  # one row is set aside already
                budget[shard] -= end - start
                chunks.append((request, request.tokens[start:end], start, num_scored, samples))
        if not chunks:
            return Schedule.of((), ())
        requests, tokens, starts, num_scored, samples = zip(*chunks, strict=True)
        return Schedule.of(requests, tokens, start=starts, num_scored=num_scored, samples=samples, is_prefill=True)

    def _fits(self, request, num_tokens):
        """Returns whether any shard has room for a request. The request's cached prefix needs no room."""
        if self.prefix is not None and request.offloaded is None and not request.scores_prompt:
            return self.prefix.fits(request.tokens, num_tokens, salt=request.params.prefix_salt)
        return self.manager.fits(num_tokens)

    def _admit(self, request, num_tokens):
        """Admits a request and returns its slot. Restores its bytes from host memory, or its cached prefix."""
        if request.offloaded is not None:
            slot, self.cache = resume(self.manager, self.cache, request.offloaded, num_tokens=num_tokens)
        elif self.prefix is not None and not request.scores_prompt:  # scored tokens must run
            slot, hit_tokens, self.cache = self.prefix.admit(
                self.cache, request.tokens, num_tokens=num_tokens, salt=request.params.prefix_salt
            )
            if not request.num_generated:
                request.cached_tokens = hit_tokens
        else:
            slot = self.manager.admit(request.tokens, num_tokens=num_tokens)
        return slot

    def _add_drafts(self, schedule, max_drafts, is_in_flight):
        """Fills in the known newest tokens of requests, and adds their drafts.

        Args:
          schedule: the newest token of each request. If `source` is -1, the host knows it. Otherwise the step in flight
            draws it.
          max_drafts: [n] maximum number of drafts of each request.
          is_in_flight: whether a step is in flight.

        Returns:
          The schedule without requests that were preempted, or whose drafter failed.

        Raises:
          CacheFullError: blocks are missing while a step is in flight, because no request can be preempted then.
        """
        requests = schedule.requests
        numbers = schedule.numbers
        tokens = list(schedule.tokens)
        counts = numbers["num_tokens"]
        is_known = numbers["source"] < 0
        drafts = []
        if self.config.draft_tokens:
            drafts = [
                self._draft(request, count, not known)
                for request, count, known in zip(requests, max_drafts.tolist(), is_known.tolist(), strict=True)
            ]
            counts += np.array([len(ids) for ids in drafts], int)
        for i in np.flatnonzero(self.manager.missing_blocks(numbers["slot"], counts)):
            counts[i] = self._reserve(requests[i], int(counts[i]), can_preempt=not is_in_flight)
        numbers["num_drafts"] = counts - 1
        for i in np.flatnonzero(is_known).tolist():
            tokens[i] = requests[i].tokens[-1:]
            numbers["is_prefill"][i] = not requests[i].num_generated
        for i in np.flatnonzero(counts > 1).tolist():
            tokens[i] = np.concatenate([tokens[i], drafts[i][: counts[i] - 1]])
        has_slot = np.array([request.slot >= 0 for request in requests], bool)
        return Schedule(requests, tokens, numbers).select(has_slot)

    def _reserve(self, request, num_tokens, *, can_preempt):
        """Reserves blocks for a token and its drafts, or only for the token if there are no blocks for the drafts.

        Preempts requests of the shard, the one with the highest rank first, until there is a block for the token.

        Returns:
          The number of tokens for which blocks are reserved: `num_tokens`, 1, or 0 if the request itself was preempted.

        Raises:
          CacheFullError: a request has to be preempted and `can_preempt` is False.
        """
        while request.slot >= 0:
            try:
                self.manager.allocate(request.slot, num_tokens)
                return num_tokens
            except CacheFullError:
                if num_tokens > 1:
                    num_tokens = 1  # no request is preempted for the sake of drafts
                elif not can_preempt:
                    raise
                else:
                    shard_of = self.manager.shards.of
                    self._preempt([r for r in self.running if shard_of(r.slot) == shard_of(request.slot)][-1])
        return 0

    def _draft(self, request, max_drafts, is_in_flight):
        """Returns up to `max_drafts` drafts of a request, [n] int32; zeros if they are still on the device.

        If the drafter on the host fails, ends the request and returns no drafts.
        """
        count = min(request.params.draft_tokens or 0, max_drafts)
        if self.drafter is None or not count:
            return np.zeros((count,), np.int32) if is_in_flight else request.device_drafts[:count]
        try:
            drafts = self.drafter.draft(request.tokens, count)
            if len(drafts) > count:
                raise ValueError(f"the drafter guessed {len(drafts)} tokens, at most {count} were asked for")
            return self.manager.check_ids(drafts, "drafts") if len(drafts) else NO_DRAFTS
        except Exception as error:  # a drafter is the caller's code: its failure ends only this request
            self.finish(request, "error", error)
            return NO_DRAFTS

    def _preempt(self, request):
        """Moves a request's bytes to host memory and lets it wait. `admit` brings the bytes back."""
        if self.manager.length(request.slot):
            try:
                request.offloaded, self.cache = offload(self.manager, self.cache, request.slot)
            except CacheCorruptionError as error:
                return self.finish(request, "error", error)
        else:  # the request has run no token yet
            self.manager.release(request.slot)
        self._move(request, -1)
        self.metrics.preemptions += 1

    def _list_of(self, request):
        return self.waiting if request.slot < 0 else self.running

    def _move(self, request, slot):
        """Sets the slot of a request, -1 for none, and moves it to the list `running` or `waiting`."""
        self._list_of(request).remove(request)
        request.slot = slot
        self.add(request)


_rank = operator.attrgetter("rank")


def _is_lost(cache):
    """Returns whether the cache cannot be used any more, because a failed step donated it or did not compute it."""
    try:
        jax.block_until_ready(cache)
    except Exception:
        return True
    return any(x.is_deleted() for x in jax.tree.leaves(cache))
