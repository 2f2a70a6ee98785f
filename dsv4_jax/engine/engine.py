"""Serves many requests over one cache: continuous batching of prompt chunks and decoded tokens."""

import contextlib
import dataclasses
import itertools
import reprlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.common.arguments import check, check_choice, check_type
from dsv4_jax.common.summary import Summarized
from dsv4_jax.decode import CompiledModel, DraftOptions, Model, RolloutShape
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.engine.requests import Output, Request, RequestParams, check_no_requests, check_request
from dsv4_jax.engine.runner import StepRunner
from dsv4_jax.engine.scheduler import Scheduler
from dsv4_jax.engine.steps import LaunchedStep
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, TokenIds
from dsv4_jax.parallel.processes import lost_process_named


class Engine(Summarized):
    """Serves requests with chunked prefill, continuous batching, preemption, speculative decoding and prefix caching.

    * Programs: a decode step runs each request's newest token and drafts in one compiled program. All other steps run
      in another program, of `token_budget` tokens. Steps with grammars have programs of their own. No program depends
      on which requests run, and a request's tokens do not depend on other requests, waiting, preemption or drafts.
    * Shards: on a mesh with an axis "data" each shard runs its own requests, all in the same step. A request goes to
      the shard with room that has the longest cached prefix of its tokens. Among equal shards, it goes to the one with
      the most free slots.
    * Overlap (`EngineConfig.overlap`): while a step's tokens are copied to the host, the next step already runs. It
      reads the newest tokens, and drafts that the device made, from device memory. It leaves out requests that reach
      their maximum length. If a request turns out to have ended by a stop token, its tokens in the next step are
      discarded. A step that has to preempt a request, or verifies drafts under a grammar, is not launched early, since
      the host has to know the tokens first.
    * Errors: if a step raises, the engine stays usable. All running requests are queued again and continue from the
      tokens that they have.

    The engine is not thread-safe.

    Attributes:
      manager: the manager of slots and blocks; only the engine may admit requests to it.
      prefix: the prefix cache, or None.
      config: EngineConfig with its `draft_tokens` and `overlap` filled in.

    Examples:
      With the small model that comes with the package, whose tokens are bytes:

      >>> from dsv4_jax import DSV4Config, Engine, KVCacheManager, load_checkpoint
      >>> from dsv4_jax.data import packaged_checkpoint
      >>> config = DSV4Config.from_hf(packaged_checkpoint())
      >>> model = load_checkpoint(packaged_checkpoint(), config)
      >>> manager = KVCacheManager(config, memory="8MiB", max_requests=2, max_context=256)
      >>> engine = Engine(model, manager, token_budget=32)
      >>> request = engine.add(list(b"And God said, Let there be "), max_new_tokens=5)
      >>> while engine.busy:
      ...     outputs = engine.step()
      >>> bytes(request.generated)
      b'a wif'
      >>> engine.close()
    """

    _launched: LaunchedStep | None = None  # the step that runs between two calls of `step`
    _experts = None

    def __init__(
        self,
        model: Model,
        manager: KVCacheManager,
        cache: KVCache | None = None,
        *,
        drafter: Drafter | Literal["model"] | None = None,
        prefix: PrefixCache | None = None,
        **options: Any,
    ):
        """Makes an engine without requests; `warm_up` compiles its programs.

        Args:
          model: the model. If it is a `CompiledModel` with `expert_memory`, the engine moves often selected experts to
            the GPU between steps.
          manager: the manager of slots and blocks, which must hold no request.
          cache: a cache of the manager, which the engine donates; None = a new, empty cache.
          drafter: source of draft tokens, such as `PromptLookup()`; "model" = the model's own draft layers, which need
            a configuration from `DSV4Config.from_hf(..., mtp=True)`; None = no drafts.
          prefix: a prefix cache of this manager, which shares the blocks of equal prefixes; None = no sharing.
          options: fields of `EngineConfig`.

        Raises:
          TypeError: an option is unknown or has the wrong type.
          ValueError: the manager holds requests, the cache or `prefix` belongs to another manager, the model has no
            draft layers for "model", or an option is out of the range that `EngineConfig` states.
        """
        if cache is not None:
            manager.check_cache(cache)
        check(
            prefix is None or prefix.serves(manager),
            "prefix is the prefix cache of another manager, or a later one has taken its place",
        )
        model = CompiledModel.of(model)
        self._runner = _make_runner(model, manager, drafter, options)
        self.manager = manager
        self.prefix = prefix
        self.config = self._runner.config
        self._metrics = EngineMetrics()
        cache = manager.init_cache() if cache is None else cache
        if model.expert_memory is not None:
            cache = cache.with_expert_counts()  # even if none can move: `begin_programs` compiles for these counts
            self._experts = model.expert_memory.migration
        if self._experts is not None:
            self._experts.start(cache.expert_counts, manager.schema.config.num_experts_per_tok)
        host_drafter = None if isinstance(drafter, str) else drafter
        scheduler = Scheduler(manager, cache, self._metrics, self.config, host_drafter, prefix)
        self._scheduler = scheduler
        if prefix is not None and prefix.files is not None:
            prefix.get_cache = lambda: scheduler.cache
        self._orders = itertools.count()

    @staticmethod
    def begin_programs(
        outline: CompiledModel,
        manager: KVCacheManager,
        *,
        drafter: Drafter | Literal["model"] | None = None,
        **options: Any,
    ) -> None:
        """Begins to compile the programs of steps, in threads, for a model whose weights are still being read.

        Make the engine later with `outline.with_weights(model)` as its model, so that it uses these programs. The
        engine's `warm_up` waits until they are compiled.

        Args:
          outline: a `CompiledModel` without weights. Its module is the one that `load_checkpoint` passes to the
            function `on_outline`, with `jax.ShapeDtypeStruct` in place of arrays. Its `expert_memory` is that of the
            model, if there is one.
          manager, drafter, options: as for the engine. The manager must hold no request.

        Raises:
          TypeError, ValueError: as for the engine.
        """
        runner = _make_runner(outline, manager, drafter, options)
        cache = manager.abstract_cache()
        runner.begin_programs(cache if outline.expert_memory is None else cache.with_expert_counts())

    def _summary(self) -> dict[str, Any]:
        running = self.running
        waiting = self.waiting
        requests = {f"request {reprlib.repr(request.id)}": request.progress for request in (*running, *waiting)}
        counts = {"running": len(running), "waiting": len(waiting), "steps": self._metrics.steps}
        return counts | self.manager.use() | requests

    @property
    def cache(self) -> KVCache:
        """The cache after the most recently launched step."""
        return self._scheduler.cache

    @property
    def running(self) -> tuple[Request, ...]:
        """The requests that hold a slot, in the order in which they are served."""
        return tuple(self._scheduler.running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests without a slot, in the order in which they are served."""
        return tuple(self._scheduler.waiting)

    @property
    def busy(self) -> bool:
        """Whether the next step would run a request or return an output."""
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting or scheduler.pending_outputs)

    @property
    def last_scheduled(self) -> tuple[Request, ...]:
        """The requests that the most recent step ran, or was preparing to run if the step raised."""
        return self._scheduler.current

    @property
    def rollout_shape(self) -> RolloutShape:
        """The shapes of the engine's program, for `decode.logprobs`.

        Raises:
          ValueError: the engine is not batch-invariant, so it has several programs; or its cache has
            `context_parallel`.
        """
        check(
            self.config.batch_invariant,
            "the bits of log-probabilities depend on the batch: make the engine with batch_invariant=True",
        )
        check(
            not self.manager.schema.context_parallel,
            "context_parallel=True: attention adds up in an order that depends on which device has which block",
        )
        return RolloutShape(self.manager.schema, self.config.token_budget, self._runner.decode_size)

    @property
    def metrics(self) -> EngineMetrics:
        """A copy of the counters, with the current use of the cache."""
        schema = self.manager.schema
        return dataclasses.replace(
            self._metrics,
            blocks=schema.num_blocks - self.manager.free_blocks,
            slots=len(self.manager.slots),
            schema=schema,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            compilations=self._runner.compilations,
            prefix=None if self.prefix is None else self.prefix.metrics,
            experts=None if self._experts is None else dataclasses.replace(self._experts.metrics),
        )

    def add(self, prompt: TokenIds, *, id: Hashable = None, **params: Any) -> Request:
        """Queues a request, which a later `step` runs, and returns it.

        Args:
          prompt: [n] token ids.
          id: a hashable name that no unfinished request of this engine has; None = the next free number.
          params: fields of `RequestParams`; `max_new_tokens` is required.

        Raises:
          TypeError: a parameter is unknown, missing or has the wrong type.
          ValueError: a parameter is out of range or not possible with the engine's configuration, an unfinished request
            has the id, the prompt is empty or holds invalid ids, or the request needs more tokens than an empty cache
            has room for.
        """
        checked = RequestParams(**params)
        limit = self.config.draft_tokens or 0
        ids = check_request(self.manager, prompt, checked.max_new_tokens)
        draft_tokens = limit if checked.draft_tokens is None else checked.draft_tokens
        check(draft_tokens <= limit, f"{draft_tokens=} must be from 0 to {limit}, the engine's draft_tokens")
        vocab_size = self.manager.schema.config.vocab_size
        if checked.grammar is not None and (size := checked.grammar.vocabulary.size) != vocab_size:
            raise ValueError(f"grammar: its vocabulary has {size} tokens, the model's has {vocab_size}")
        if checked.adapter is not None and checked.adapter not in (names := self._runner.adapter_names):
            raise ValueError(f"adapter={checked.adapter!r} must be one of the model's: {', '.join(names) or 'none'}")
        top_logprobs = checked.top_logprobs
        prompt_logprobs = checked.prompt_logprobs
        max_logprobs = self.config.max_logprobs
        has_room = max(top_logprobs, prompt_logprobs) <= max_logprobs
        check(has_room, f"{top_logprobs=}, {prompt_logprobs=}: the engine has {max_logprobs=}")
        logits_state = checked.logits_state
        if logits_state is not None:
            if (processor := self.config.logits_processor) is None:
                raise ValueError("logits_state: the engine has no logits_processor")
            logits_state = processor.check_state(logits_state, "logits_state")
        check_type("id", id, Hashable, "hashable")
        if id is not None and id in self._scheduler.requests:
            raise ValueError(f"{id=} belongs to a request that has not finished")
        order = self._next_order()
        checked = dataclasses.replace(checked, draft_tokens=draft_tokens, logits_state=logits_state)
        request = Request(order if id is None else id, ids, checked, order=order)
        self._scheduler.add(request)
        self._metrics.added += 1
        return request

    def fork(self, request: Request, seeds: Sequence[int]) -> list[Request]:
        """Returns copies of a request that continue from its current tokens, each with its own seed.

        To draw several answers to a prompt, call `step(decode=False)` until the prompt is read and then fork, so that
        the first tokens differ too. The copies share the request's full blocks.

        Args:
          request: an unfinished request, which continues too.
          seeds: one seed for each new request.

        Raises:
          TypeError: `seeds` is a number, or a seed is not an integer.
          ValueError: the request has finished or belongs to another engine, or `seeds` is empty.
        """
        self._check_unfinished(request)
        check_type("seeds", seeds, Collection, f"a sequence with a seed for each new request, such as [{seeds}]")
        if not len(seeds):
            raise ValueError("seeds is empty: give one for each new request")
        children = [request.child(seed=seed, order=self._next_order()) for seed in seeds]
        with self._restart_on_error():
            self._scheduler.fork(request, children, in_flight=self._launched)
        self._metrics.added += len(children)
        return children

    def cancel(self, request: Request) -> None:
        """Ends a request with `finish_reason` "cancelled". The request keeps the tokens that it has.

        Raises:
          ValueError: the request has finished or belongs to another engine.
        """
        self._check_unfinished(request)
        with self._restart_on_error():
            self._scheduler.finish(request, "cancelled")

    def close(self) -> None:
        """Cancels all requests. This frees all slots, and all blocks except those of the prefix cache.

        If the prefix cache has files, its blocks and snapshots are written, and the call waits until they are on disk.
        """
        for request in list(self._scheduler.requests.values()):
            self.cancel(request)
        if self._experts is not None:
            self._experts.finish(self.cache.expert_counts)
        if self.prefix is not None and self.prefix.files is not None:
            self.prefix.save(self.cache)

    def update_weights(
        self, model: Model, *, running: Literal["recompute", "keep"] = "recompute", key: str | None = None
    ) -> None:
        """Replaces the model's weights between two steps. Compiles nothing.

        Requests keep the tokens that they have, with their log-probabilities. If a step was launched already, its
        tokens come from the earlier weights, and the next `step` returns them. All later tokens come from the new
        weights. No prompt hits a cached prefix of other weights.

        The engine holds the arrays of the model, not copies of them: do not donate or delete them. If the module
        changes later, as by `nnx.update`, pass it to this method again: the engine does not see the change by itself.

        Args:
          model: a model with the new weights. It has the structure of the engine's model: names, shapes and dtypes of
            all arrays, and options of all modules. Arrays are moved to the devices of the engine's arrays if they lie
            on other devices.
          running: treatment of unfinished requests. "recompute": they are queued again and run all their tokens again
            with the new weights. "keep": they go on at once with the new weights, and read the entries in the cache
            that the earlier weights computed.
          key: name of the new weights for the prefix cache, as in `PrefixCache.reset`; required if the prefix cache has
            files.

        Raises:
          ValueError: the model has another structure, an array of it has no values or was deleted, its experts lie in
            an `ExpertMemory`, `running` is unknown, or the prefix cache refuses `key`. Nothing was changed.
        """
        check_choice("running", running, "recompute", "keep")
        new_model = self._runner.model.with_weights(model)
        if self.prefix is not None:
            self.prefix.check_key(key)
        with self._restart_on_error():
            launched = self._launched
            self._launched = None
            if launched is not None and not launched.is_in_vain:
                self._read(launched)  # the tokens come from the earlier weights
            if running == "recompute":
                self._scheduler.recompute()
            if self.prefix is not None:
                self.prefix.reset(key=key)
            self._runner.model = new_model

    def stream(self, request: Request) -> Iterator[int]:
        """Yields a request's generated token ids: first those that it has, then each new one.

        The iteration runs steps of the engine, with all requests, until the request has finished. The next `step` also
        returns the outputs of these steps, except those of a request that was iterated to its end.

        Raises:
          ValueError: the request belongs to another engine.
          Exception: the request's `error`, if it failed.
        """
        if request.finish_reason is None:
            self._check_unfinished(request)
        position = request.prompt_length
        while True:
            for token in request.tokens_from(position):
                position += 1
                yield token
            if request.finish_reason is not None:
                break
            self._run_step(decode=True)
        # The caller has all tokens, so `step` need not return them. If they stayed here, streams without a call of
        # `step` would keep every request in memory.
        self._scheduler.pending_outputs.pop(request, None)
        if request.error is not None:
            raise request.error

    def step(self, *, decode: bool = True) -> list[Output]:
        """Admits requests that fit, runs one batch, and returns the new tokens.

        Args:
          decode: whether to draw tokens. If False, the step runs only tokens that precede each request's newest one.
            Tokens of a step that the previous call launched early are still returned.

        Returns:
          An output for each request that got tokens or failed since the most recent call that did not raise.
        """
        self._run_step(decode)
        pending = self._scheduler.pending_outputs
        # After an interrupted step, some of the pending requests may have no new tokens.
        outputs = [Output(r, r.tokens_from(n)) for r, n in pending.items() if n < r.num_tokens or r.error is not None]
        try:
            self._scheduler.pending_outputs = {}
            return outputs
        except BaseException:  # such as KeyboardInterrupt; the next call returns the outputs
            self._scheduler.pending_outputs = pending
            raise

    def warm_up(self) -> dict[str, int]:
        """Compiles all programs, including those that move requests, by running each of them once.

        Later steps compile nothing, unless they have grammars and `structured_output` is not set.

        Returns:
          {name of a step's program, "mixed" or "decode": number of tokens in its batches}.

        Raises:
          ValueError: requests are running.
        """
        scheduler = self._scheduler
        check(not scheduler.running, f"{len(scheduler.running)} requests are running: warm up before the first step")
        with self._restart_on_error():
            sizes, scheduler.cache = self._runner.warm_up(scheduler.cache, self.prefix)
        if self._experts is not None:  # forgets the experts that the warm-up's tokens selected
            scheduler.cache = scheduler.cache.with_expert_counts()
        return sizes

    # --- one step ---

    def _run_step(self, decode):
        """Runs one step and gives requests its tokens.

        The step is the one that the previous call launched early, or else a new one. With `overlap`, the next step is
        launched before the tokens of this step are read.
        """
        scheduler = self._scheduler
        with self._restart_on_error(), lost_process_named():
            scheduler.current = ()
            launched = self._launched
            self._launched = None
            if launched is None or launched.is_in_vain:
                launched = self._launch(decode)
            if launched is not None:
                if self.config.overlap:
                    self._launched = self._launch(decode, launched)
                self._read(launched)
                if self._launched is not None:  # the host now knows the tokens that this next step begins with
                    self._launched = self._runner.draw(self._launched).with_known_tokens()
        if self._experts is not None:
            self._experts.between_steps(scheduler.cache.expert_counts)

    @contextlib.contextmanager
    def _restart_on_error(self):
        """Restarts the scheduler if the body raises, so that the engine stays usable."""
        try:
            yield
        except BaseException:
            self._launched = None
            self._scheduler.restart()
            self._runner.forget_logits_states()
            self._metrics.restarts += 1
            raise

    def _launch(self, decode, after=None):
        """Schedules a step and launches it, without waiting for it.

        Args:
          decode: as for `step`.
          after: the previous LaunchedStep, if its tokens were not read yet. The new step takes them from the device.

        Returns:
          The new LaunchedStep; None if there is nothing to run, or if the step can only be launched after the tokens of
          `after` are read.
        """
        scheduler = self._scheduler
        if after is not None:
            scheduler.current = after.schedule.requests
            if self.config.draft_tokens and any(request.matcher is not None for request in scheduler.running):
                return None  # token masks depend on the drafts, which the host does not know yet
            scheduler.take_snapshots(after)
        scheduler.admit()
        try:
            schedule = scheduler.schedule(decode=decode, in_flight=after)
        except CacheFullError:  # a request has to be preempted, and so its tokens must be known
            if after is None:
                raise
            return None
        if not schedule.requests:
            return None
        launched, scheduler.cache = self._runner(scheduler.cache, schedule, after)
        return self._runner.draw(launched) if after is None else launched

    def _read(self, launched):
        """Waits for a step's output and gives each request its tokens."""
        scheduler = self._scheduler
        scheduler.current = launched.schedule.requests
        output = jax.tree.map(np.asarray, launched.output)  # the copy was started; `device_get` would start it again
        self._metrics.steps += 1
        self._metrics.mixed_steps += launched.batch.prefill
        scheduler.update(launched, output, self._launched)

    def _next_order(self):
        """Returns the number for a new request: the next one that is not the id of an unfinished request."""
        return next(order for order in self._orders if order not in self._scheduler.requests)

    def _check_unfinished(self, request):
        check(request.finish_reason is None, f"request {request.id!r} has finished ({request.finish_reason})")
        is_here = self._scheduler.requests.get(request.id) is request
        check(is_here, f"request {request.id!r} belongs to another engine")


def _make_runner(model, manager, drafter, options):
    """Returns the StepRunner of an engine; arguments as for `Engine`, `options` as a dict."""
    check_no_requests(manager)
    config = EngineConfig(**options).resolve(manager, drafter)
    if config.record_decisions and not hasattr(model, "forward_decisions"):
        kind = type(model.module).__name__
        raise TypeError(f"record_decisions needs a model with a method forward_decisions, which {kind} lacks")
    drafts = DraftOptions(config.draft_tokens or 0, config.min_confidence) if drafter == "model" else DraftOptions()
    return StepRunner(model, manager, config, device_drafts=drafts)
