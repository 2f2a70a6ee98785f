"""Serves many requests over one cache: continuous batching of prompt chunks and decoded tokens."""

import contextlib
import dataclasses
import itertools
import reprlib
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from dsv4_jax.arguments import check_whole
from dsv4_jax.cache import KVCache
from dsv4_jax.decode.drafts import check_drafts
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import GREEDY, SamplingParams
from dsv4_jax.decode.step import Model
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.engine.metrics import EngineMetrics, pool_use
from dsv4_jax.engine.requests import Output, Request, check_no_requests, check_request
from dsv4_jax.engine.runner import StepResults, StepRunner
from dsv4_jax.engine.scheduler import ScheduledRequest, Scheduler
from dsv4_jax.engine.updates import update, update_steps
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache
from dsv4_jax.parallel.processes import lost_process_named
from dsv4_jax.summary import Summarised, Summary


class Engine(Summarised):
    """Serves requests with chunked prompts, continuous batching, preemption, drafts and prefix hits.

    A step is one of two compiled programs: one for decode steps, which bring the newest token of each request and its
    drafts, and one of `token_budget` tokens for all others; a third one may run several decode steps. None depends on
    which requests run. A request's tokens do not depend on other requests, on waiting, on preemption or on drafts.

    On a mesh with an axis "data" each part of it runs requests of its own, in steps of one program. A request goes
    where it fits, to the part with the longest prefix of it, else to the one with the most free slots.

    If a step raises, whatever the error, the engine stays usable: the requests that ran are queued again and continue
    from the tokens they have. Not thread-safe.

    Attributes:
      manager: owns the slots and blocks; only the engine may admit requests to it.
      token_budget, draft_tokens, prefix, max_logprobs, num_scheduler_steps: as for `__init__`.
    """

    def __init__(
        self,
        model: Model,
        manager: KVCacheManager,
        cache: KVCache | None = None,
        *,
        token_budget: int = 256,
        drafter: Drafter | None = None,
        draft_tokens: int | None = None,
        prefix: PrefixCache | None = None,
        batch_invariant: bool = False,
        max_logprobs: int = 0,
        num_scheduler_steps: int = 1,
    ):
        """An engine without requests; `warm_up` compiles its programs.

        Args:
          model: the model.
          manager: must hold no request.
          cache: of the manager; None = an empty one. The engine donates it.
          token_budget: how many tokens a step runs at most, in each part of a mesh's axis "data". More read prompts
            faster and delay running requests longer.
          drafter: guesses tokens, on the host, such as `PromptLookup()`, or on the device: `MTPDrafter()`; None = no
            drafts.
          draft_tokens: how many drafts of a request a step verifies at most; by default what the manager's
            `max_query_tokens` allows.
          prefix: a prefix cache of this manager, to share the blocks of equal prefixes.
          batch_invariant: run all steps in one program of `token_budget` tokens. Matrix products with another number
            of rows
            may add in another order, so the last bit of a logit can depend on whether a token came in a chunk, alone or
            as a draft. This prevents it, at the price of slower decode steps.
          max_logprobs: the most `top_logprobs` of a request; 0 = none, and no log-probabilities of prompts either.
          num_scheduler_steps: how many decode steps a call of `step` runs on the device without the host between them,
            while all requests decode and nobody waits. Their tokens come together. Not with drafts, nor
            `batch_invariant`.

        Raises:
          ValueError: the manager holds requests, the cache or `prefix` is of another one, `token_budget` cannot hold a
            token and its drafts for every slot, `draft_tokens` do not fit the manager's `max_query_tokens`, the model
            has no block for `MTPDrafter`, `max_logprobs` are more than the vocabulary has tokens, or several steps are
            to be run at once with drafts or `batch_invariant`.
        """
        schema = manager.schema
        check_no_requests(manager)
        if cache is not None:
            manager.check_cache(cache)
        if prefix is not None and prefix.manager is not manager:
            raise ValueError("prefix is the prefix cache of another manager")
        spare = schema.max_query_tokens - 1
        if draft_tokens is None:
            draft_tokens = spare if drafter is not None else 0
        if not (0 <= draft_tokens <= spare) or (draft_tokens > 0) != (drafter is not None):
            raise ValueError(
                f"{draft_tokens=} must be from 1 to {spare} with a drafter and 0 without one: the manager has "
                f"max_query_tokens={spare + 1}"
            )
        drafts = draft_tokens if getattr(drafter, "on_device", False) else 0
        if drafts:
            check_drafts(schema, drafts)
        slots = manager.requests.slots_per_shard
        decode_size = slots * (1 + draft_tokens)
        if token_budget < decode_size:
            raise ValueError(
                f"{token_budget=} must be at least {decode_size}: {1 + draft_tokens} for each of {slots} requests"
            )
        self.max_logprobs = check_whole("max_logprobs", max_logprobs, 0, schema.config.vocab_size)
        self.num_scheduler_steps = check_whole("num_scheduler_steps", num_scheduler_steps, 1)
        if num_scheduler_steps > 1 and (drafter is not None or batch_invariant):
            raise ValueError(f"{num_scheduler_steps=} must be 1 with a drafter, or {batch_invariant=}")
        self.manager, self.prefix, self.token_budget, self.draft_tokens = manager, prefix, token_budget, draft_tokens
        model = CompiledModel.of(model)
        options = dict(
            batch_invariant=batch_invariant, drafts=drafts, max_logprobs=max_logprobs, steps=num_scheduler_steps
        )
        self._runner = StepRunner(model, manager, decode_size, token_budget, **options)
        self._metrics = EngineMetrics()
        self._scheduler = Scheduler(
            manager,
            manager.init_cache() if cache is None else cache,
            self._metrics,
            token_budget=token_budget,
            drafter=None if drafts else drafter,
            draft_tokens=draft_tokens,
            prefix=prefix,
        )
        self._orders = itertools.count()

    def _summary(self) -> Summary:
        running, waiting = self.running, self.waiting
        requests = {f"request {reprlib.repr(request.id)}": request.progress for request in (*running, *waiting)}
        use = {name: share for name, share in self.manager.requests.use().items() if not name.startswith("slot ")}
        words = f"{len(running)} requests running", f"{len(waiting):,} waiting", f"{self._metrics.steps:,} steps"
        return Summary(words, use | requests)

    @property
    def cache(self) -> KVCache:
        """The cache as the last step left it."""
        return self._scheduler.cache

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests that hold a slot, in the order in which they are served."""
        return tuple(self._scheduler.running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without a slot, in the order in which they are served."""
        return tuple(self._scheduler.waiting)

    @property
    def busy(self) -> bool:
        """Whether a step would run anything or return outputs."""
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting or scheduler.pending_outputs)

    @property
    def last_scheduled(self) -> tuple[Request, ...]:
        """Requests that the last step ran. If it raised: those it would have run, or was preparing to run."""
        return self._scheduler.current

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine has done so far, and holds now; a copy."""
        return dataclasses.replace(
            self._metrics,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            compilations=self._runner.compilations,
            pools=pool_use(self.manager, self._metrics.pools),
            prefix=None if self.prefix is None else self.prefix.metrics,
        )

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
        priority: int = 0,
        draft_tokens: int | None = None,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        id: Hashable = None,
    ) -> Request:
        """Queues a request, which a later `step` runs, and returns it.

        Args:
          prompt: [n] token ids.
          max_new_tokens, sampling, seed, stop_tokens, priority: as in `Request`; `priority` is at least 0.
          draft_tokens: how many drafts of it a step verifies at most; None = the engine's, 0 = none.
          top_logprobs: how many of the likeliest tokens to keep in place of each of its tokens.
          prompt_logprobs: find log-probabilities of the prompt's tokens too: all of them run, in the prefix cache or
            not, and no more in a step than it can draw.
          id: a name for it that no unfinished request has; None = a number.

        Raises:
          TypeError: an argument of another kind, such as a `sampling` that is no `SamplingParams`.
          ValueError: a bad prompt, a limit below 1, a negative priority, more drafts or log-probabilities than the
            engine's, an id that is taken, or more tokens than the cache ever holds.
        """
        ids = check_request(self.manager, prompt, max_new_tokens)
        draft_tokens = self.draft_tokens if draft_tokens is None else check_whole("draft_tokens", draft_tokens, 0)
        if draft_tokens > self.draft_tokens:
            raise ValueError(f"{draft_tokens=} must be from 0 to {self.draft_tokens}, the engine's draft_tokens")
        top_logprobs = check_whole("top_logprobs", top_logprobs, 0)
        if max(top_logprobs, prompt_logprobs) > self.max_logprobs:
            raise ValueError(f"{top_logprobs=}, {prompt_logprobs=}: the engine has max_logprobs={self.max_logprobs}")
        if not isinstance(id, Hashable):
            raise TypeError(f"{id=} must be hashable")
        if id is not None and id in self._scheduler.requests:
            raise ValueError(f"{id=} belongs to a request that has not finished")
        order = self._next_order()
        request = Request(
            order if id is None else id,
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop_tokens=stop_tokens,
            priority=priority,
            draft_tokens=draft_tokens,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            order=order,
        )
        self._scheduler.add(request)
        self._metrics.added += 1
        return request

    def fork(self, request: Request, seeds: Sequence[int]) -> list[Request]:
        """Returns new requests that continue from where one is now, each with its own seed; the request goes on too.

        To draw several answers to a prompt, fork once `step(decode=False)` has read it: then the first tokens differ
        too. Full blocks are shared; no request sees what another gets from here on.

        Args:
          request: an unfinished request.
          seeds: one for each new request.

        Raises:
          TypeError: a seed is no whole number.
          ValueError: the request has finished or is not of this engine, or there are no seeds.
        """
        self._check_unfinished(request)
        if not len(seeds):
            raise ValueError("seeds is empty: give one for each new request")
        children = [request.child(seed=seed, order=self._next_order()) for seed in seeds]
        with self._restart_on_error():
            self._scheduler.fork(request, children)
        self._metrics.added += len(children)
        return children

    def cancel(self, request: Request) -> None:
        """Ends a request; it keeps the tokens it has.

        Raises:
          ValueError: it has finished, or is not of this engine.
        """
        self._check_unfinished(request)
        with self._restart_on_error():
            self._scheduler.finish(request, "cancelled")

    def close(self) -> None:
        """Cancels all requests: all slots are free, and all blocks except those of the prefix cache."""
        for request in list(self._scheduler.requests.values()):
            self.cancel(request)

    def stream(self, request: Request) -> Iterator[int]:
        """Yields a request's token ids, first those it has, as they come; runs steps, for all requests, to get them.

        Raises:
          ValueError: it is not of this engine.
          Exception: what went wrong with the request, if anything did.
        """
        if request.finish_reason is None:
            self._check_unfinished(request)
        shown = 0
        while True:
            for token in request.generated[shown:]:
                shown += 1
                yield token
            if request.finish_reason is not None:
                break
            self._run_step(decode=True)
        if request.error is not None:
            raise request.error

    def step(self, *, decode: bool = True) -> list[Output]:
        """Admits what fits, runs one batch, and returns what requests got.

        Args:
          decode: False reads all tokens of each request but its newest, and draws none. Then the step may have nothing
            to do.

        Returns:
          An output for each request that got tokens or failed since the last call that returned.
        """
        self._run_step(decode)
        pending = self._scheduler.pending_outputs
        outputs = [Output(request, request.tokens[start:].tolist()) for request, start in pending.items()]
        # An interrupted step may have left requests here that got nothing.
        outputs = [output for output in outputs if output.tokens or output.request.error is not None]
        try:
            self._scheduler.pending_outputs = {}
            return outputs
        except BaseException:  # the next call returns them
            self._scheduler.pending_outputs = pending
            raise

    def warm_up(self) -> dict[str, int]:
        """Compiles all programs by running each once, also those that move requests; later steps compile nothing.

        Returns:
          {name of a step's program: its number of tokens}.

        Raises:
          ValueError: requests are running.
        """
        scheduler = self._scheduler
        if scheduler.running:
            raise ValueError(f"{len(scheduler.running)} requests are running: warm up before the first step")
        with self._restart_on_error():
            sizes, scheduler.cache = self._runner.warm_up(scheduler.cache, self.prefix)
        return sizes

    # --- one step ---

    def _run_step(self, decode):
        scheduler = self._scheduler
        with self._restart_on_error(), lost_process_named():
            scheduler.current = ()
            scheduler.admit()
            self._metrics.waits += len(scheduler.waiting)
            several = decode and self.num_scheduler_steps > 1
            counts = scheduler.schedule_steps(self.num_scheduler_steps) if several else {}
            if not (counts and self._execute_steps(counts)) and (scheduled := scheduler.schedule(decode=decode)):
                self._execute(scheduled)
        self._metrics.pools = pool_use(self.manager, self._metrics.pools)

    @contextlib.contextmanager
    def _restart_on_error(self):
        """Restarts the scheduler if the body raises, so that the engine stays usable."""
        try:
            yield
        except BaseException:
            self._scheduler.restart()
            self._metrics.restarts += 1
            raise

    def _execute(self, scheduled: list[ScheduledRequest]):
        """Runs a batch and gives each request what was drawn for it."""
        scheduler = self._scheduler
        sampling, seeds, failed = self._runner.sampling_rows([item.request for item in scheduled])
        for request, error in failed.items():
            scheduler.finish(request, "error", error)
        scheduled = [item for item in scheduled if item.request not in failed]
        if not scheduled:
            return
        tokens = {item.request.slot: item.tokens for item in scheduled}
        given = {item.request.slot: item.given for item in scheduled}
        top = any(item.given and item.request.num_top_logprobs for item in scheduled)
        batch, found, rows, scheduler.cache = self._runner(scheduler.cache, tokens, given, sampling, seeds, top=top)
        found = self.manager.requests.get(found)
        self._metrics.steps += 1
        self._metrics.mixed_steps += batch.prefill
        for item in scheduled:
            update(scheduler, item, found.rows(rows[item.request.slot]))

    def _execute_steps(self, counts: dict[Request, int]) -> bool:
        """Runs several decode steps of the running requests; False, and nothing was done, if a step is better alone."""
        scheduler, runner = self._scheduler, self._runner
        sampling, seeds, failed = runner.sampling_rows(list(counts))
        if failed:
            return False
        tokens = {request.slot: request.tokens[-1:] for request in counts}
        of_slots = {request.slot: count for request, count in counts.items()}
        try:
            drawn, logprobs, scheduler.cache = runner.run_steps(scheduler.cache, tokens, of_slots, sampling, seeds)
        except CacheFullError:
            return False
        self._metrics.steps += max(counts.values())
        for request, count in counts.items():
            here = request.slot, slice(count)
            update_steps(scheduler, request, StepResults(drawn[here], logprobs[here], None, None))
        return True

    def _next_order(self):
        """The next number that is not the id of a request: it may become one."""
        return next(order for order in self._orders if order not in self._scheduler.requests)

    def _check_unfinished(self, request):
        if request.finish_reason is not None:
            raise ValueError(f"request {request.id!r} has finished ({request.finish_reason})")
        if self._scheduler.requests.get(request.id) is not request:
            raise ValueError(f"request {request.id!r} belongs to another engine")
