"""`StepRunner`, which runs an engine's steps on the device in programs of fixed shapes."""

import contextlib
import dataclasses
import functools
import itertools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.decode import (
    BatchedSamplingParams,
    CompiledModel,
    DraftOptions,
    EarlierTokens,
    LogitsProcessor,
    LogprobOptions,
    sample_step,
)
from dsv4_jax.decode.logits_processor import begin_slot
from dsv4_jax.decode.step import draw_step, logits_step
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.requests import Request, RequestParams
from dsv4_jax.engine.steps import LaunchedStep, Schedule
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.host.cache_devices import consecutive


NO_REQUEST = RequestParams(1)  # the parameters of slots without a request: greedy, with the seed 0


class StepRunner:
    """Runs each step in one of two programs, the decode program or the mixed program.

    The decode program runs decode steps, the newest tokens of requests and their drafts, in batches of `decode_size`
    tokens. The mixed program runs all other steps in batches of `token_budget` tokens; with `batch_invariant` it runs
    decode steps, too. Both programs return `decode_size` rows of drawn tokens. All sizes are per shard of a mesh's axis
    "data". For steps with grammars there is another version of each program.

    Attributes:
      decode_size: maximum number of tokens in a decode step, and number of output rows of each step.
      model: the CompiledModel whose steps are run.
      config: the engine's configuration, from `EngineConfig.resolve`.
      adapter_names: names of the model's adapters, in the order of the adapters' indices.
    """

    def __init__(
        self, model: CompiledModel, manager: KVCacheManager, config: EngineConfig, *, device_drafts: DraftOptions
    ):
        """Makes a runner; compiles nothing.

        Args:
          model: the model.
          manager: the engine's manager of slots and blocks.
          config: the engine's configuration, from `EngineConfig.resolve`.
          device_drafts: options of the drafts that each step makes on the device for the next one; count 0 = no drafts.
        """
        self.model = model
        self._manager = manager
        self.config = config
        self._device_drafts = device_drafts
        self.decode_size = config.decode_size(manager.shards.slots)
        self._compilations_before = model.compilations
        slots = manager.schema.max_requests
        count = device_drafts.count
        self._num_rows = manager.shards.count * self.decode_size  # number of output rows of a step in all shards
        # `_no_tokens` takes the place of `LaunchedStep.tokens` if there is no previous step.
        rows = np.zeros((self._num_rows,), np.int32)
        no_tokens = (rows[:slots], np.zeros((slots, count), np.int32)) if count else rows
        self._no_tokens = manager.devices.put(no_tokens, "tokens")
        self.forget_logits_states()
        self.adapter_names: tuple[str, ...] = getattr(model.module, "adapter_names", ())
        # This keeps the parameters of the previous step's requests by slot, and the result of `_parameters` for them.
        self._last_parameters: tuple[list[RequestParams], Any] = [], None

    @property
    def compilations(self) -> int:
        """The number of programs of steps that were compiled or loaded since this runner was made."""
        return self.model.compilations - self._compilations_before

    def forget_logits_states(self) -> None:
        """Drops the logits processor's states, which an error may have lost. The next step makes new states."""
        self._processor: LogitsProcessor | None = None  # holds the states of all slots
        self._begun = np.zeros((self._manager.schema.max_requests,), int)  # admission time of each slot's request

    def __call__(
        self, cache: KVCache, schedule: Schedule, after: LaunchedStep | None = None, *, has_grammars: bool = False
    ) -> tuple[LaunchedStep, KVCache]:
        """Prepares a batch and launches its step, without waiting for the device.

        A step with grammars needs token masks, which depend on the tokens of the step `after`. With `overlap`, the host
        has not read these tokens yet, so the step's tokens are drawn later, by `draw`. With drafts on the device, the
        tokens are drawn at once, because the engine launches a step with grammars only after it has read the previous
        step.

        Args:
          cache: the cache; donated.
          schedule: the requests and tokens of the step.
          after: the previous step if the schedule's `source` refers to its tokens; None = the schedule has all tokens.
          has_grammars: whether to run the version of the program for grammars even if no request has one.

        Returns:
          (the launched step, the cache).
        """
        launched, function, args, options = self._prepare(schedule, after, has_grammars)
        *results, cache = self.model.run(function, cache, *args, **options)
        if function is logits_step:
            return dataclasses.replace(launched, undrawn=results), cache
        return self._with_output(launched, *results), cache

    def _prepare(self, schedule, after=None, has_grammars=False):
        """Prepares the batch of a step, with arguments as for a call of the runner.

        Returns:
          (LaunchedStep without output, the function to launch, its arguments after model and cache, its keyword
          arguments). The function is `logits_step` if the tokens are drawn later, else `sample_step`.
        """
        config = self.config
        numbers = schedule.numbers
        slots = numbers["slot"]
        counts = numbers["num_tokens"]
        num_rows = schedule.num_rows
        batch, begins = self._manager.prepare_arrays(
            slots,
            counts,
            np.concatenate(schedule.tokens),
            prefill_size=config.token_budget,
            decode_size=0 if config.batch_invariant else self.decode_size,
        )
        first_tokens = begins + counts - num_rows  # the output rows follow the last `num_rows` tokens of each request
        fields = np.stack((slots, num_rows, first_tokens, numbers["source"], begins, counts))
        first_rows, logits_indices, sources = _output_rows(
            fields.tobytes(), self._manager.shards, len(batch.slots), self.decode_size
        )
        logprob_options = self._logprob_options(schedule, first_rows) if config.max_logprobs else None
        sampling, seeds, adapters = self._parameters(schedule.requests)
        arrays = (logits_indices, sources, (sampling, seeds, logprob_options), adapters)
        logits_indices, sources, drawing, adapters = self._manager.devices.put_changed(arrays, "tokens")
        if adapters is not None:
            batch = dataclasses.replace(batch, adapters=adapters)
        earlier = EarlierTokens(self._no_tokens if after is None else after.tokens, sources)
        wants_top = logprob_options is not None and bool(logprob_options.wants_top)
        launched = LaunchedStep(schedule, batch, first_rows, begins, (logits_indices, *drawing), wants_top)
        self._begin_slots(schedule.requests)
        has_grammars = has_grammars or any(request.matcher is not None for request in schedule.requests)
        if has_grammars and config.overlap and not self._device_drafts.count:
            return launched, logits_step, (batch, logits_indices, earlier), {"record": config.record_decisions}
        masks = self._token_masks(launched) if has_grammars else None
        args = (batch, *launched.drawing, earlier, masks, self._processor)
        return launched, sample_step, args, {"drafts": self._device_drafts, "record": config.record_decisions}

    def draw(self, launched: LaunchedStep) -> LaunchedStep:
        """Launches the drawing of a step's tokens, after the previous step has been read.

        Returns the step with its output. If the step's tokens were drawn already, returns the step as it is.
        """
        if launched.undrawn is None:
            return launched
        logits, decisions = launched.undrawn
        masks = self._token_masks(launched)
        with self._counts_draws():
            output = draw_step(logits, launched.batch, *launched.drawing, masks, self._processor)
        return self._with_output(launched, dataclasses.replace(output, decisions=decisions))

    @contextlib.contextmanager
    def _counts_draws(self):
        """Adds the body's compilations of `draw_step` to `compilations`. The model does not count this program."""
        before = draw_step._cache_size()
        yield
        self._compilations_before -= draw_step._cache_size() - before

    def _begin_slots(self, requests):
        """Sets the logits processor's state in each slot to which a new request was admitted.

        The state is the request's initial state, updated by the tokens that the request has generated before.
        """
        devices = self._manager.devices
        processor = self.config.logits_processor
        if processor is None:
            return
        if self._processor is None:
            states = processor.stacked([processor.state] * self._manager.schema.max_requests)
            self._processor = devices.put(states, "slots")
        slots = np.array([request.slot for request in requests], int)
        admitted = self._manager.admission_times[slots]
        for i in np.flatnonzero(self._begun[slots] != admitted).tolist():
            request = requests[i]
            state = processor.state if request.params.logits_state is None else request.params.logits_state
            tokens = np.zeros((self._manager.schema.max_context,), np.int32)
            tokens[: request.num_generated] = request.generated
            values = np.int32(request.slot), jax.tree.map(np.array, state), tokens, np.int32(request.num_generated)
            self._processor = begin_slot(self._processor, *devices.put_changed(values))
            self._begun[request.slot] = admitted[i]

    def _with_output(self, launched, output):
        """Returns the step with its output and drawn tokens, and starts the copy of the output to the host."""
        self._processor = output.processor
        tokens = output.tokens if output.last_tokens is None else (output.last_tokens, output.draft_tokens)
        top = output.top_logprobs if launched.wants_top else None
        output = dataclasses.replace(output, last_tokens=None, processor=None, top_logprobs=top)
        output = self._manager.devices.begin_get(output)
        return dataclasses.replace(launched, undrawn=None, tokens=tokens, output=output)

    def _token_masks(self, launched):
        """Returns the `token_mask` of `sample_step` for a step, on the devices.

        Matchers first read the tokens that their requests have generated. Rows without a grammar allow all tokens.
        """
        from dsv4_jax.engine.grammar import token_masks  # llguidance comes with the extra "serve"

        schedule = launched.schedule
        rows = []
        numbers = schedule.numbers
        first_rows = launched.first_rows + numbers["num_scored"]
        num_known = numbers["num_tokens"] - numbers["num_drafts"]
        for i in np.flatnonzero(numbers["samples"]).tolist():
            request = schedule.requests[i]
            if request.matcher is not None and request.finish_reason is None:
                request.matcher.read(request.tokens_from(request.prompt_length + request.matcher.num_tokens))
                drafts = schedule.tokens[i][num_known[i] :].tolist()
                rows.append((request.matcher, int(first_rows[i]), drafts))
        masks = token_masks(rows, self._num_rows, self._manager.schema.config.vocab_size)
        return self._manager.devices.put(masks, "tokens")

    def _logprob_options(self, schedule, first_rows):
        """Returns LogprobOptions of NumPy arrays.

        `forced_tokens` has, for each output row, the known token whose log-probability is wanted, or -1. `wants_top` is
        whether any request with output rows asks for the likeliest tokens.
        """
        forced = np.full((self._num_rows,), -1, np.int32)
        scored = schedule.numbers["num_scored"]
        starts = schedule.numbers["start"]
        for i in np.flatnonzero(scored):
            known = schedule.requests[i].tokens[starts[i] + 1 :]  # the row of position p scores the token at p + 1
            forced[first_rows[i] :][: scored[i]] = known[: scored[i]]
        wants_top = any(r.params.top_logprobs and n for r, n in zip(schedule.requests, schedule.num_rows, strict=True))
        return LogprobOptions(forced, np.array(wants_top), self.config.max_logprobs)

    def _parameters(self, requests):
        """Returns the BatchedSamplingParams, the seeds and the indices of the adapters, NumPy arrays [slots].

        Slots without a request are greedy. The third item is None if the model has no adapters.
        """
        params = [NO_REQUEST] * self._manager.schema.max_requests
        for request in requests:
            params[request.slot] = request.params
        last_params, last_result = self._last_parameters
        if params == last_params:
            return last_result
        sampling = BatchedSamplingParams.of([p.sampling for p in params])
        seeds = np.array([p.seed for p in params], np.uint32)
        adapters = None
        if names := self.adapter_names:
            adapters = np.array([-1 if p.adapter is None else names.index(p.adapter) for p in params], np.int32)
        self._last_parameters = params, (sampling, seeds, adapters)
        return sampling, seeds, adapters

    def warm_up(self, cache: KVCache, prefix: PrefixCache | None) -> tuple[dict[str, int], KVCache]:
        """Runs each program once: the steps' programs, and those that offload, resume, fork and restore requests.

        Returns:
          (sizes, the cache without requests). `sizes` is {name of a step's program, "mixed" or "decode": number of
          tokens in its batches}.
        """
        manager = self._manager
        sizes = {}
        with self._counts_draws():
            for program in self.begin_programs(cache):
                program.result()
        for schedule, has_grammars in self._trial_steps():
            (request,) = schedule.requests
            launched, cache = self(cache, schedule, has_grammars=has_grammars)
            self.draw(launched)
            sizes["mixed" if launched.batch.prefill else "decode"] = len(launched.batch.slots)
            if request.num_tokens == 1 and not has_grammars:
                offloaded, cache = offload(manager, cache, request.slot)
                request.slot, cache = resume(manager, cache, offloaded)
                if prefix is not None:
                    cache = prefix.warm_up(cache, request.slot)
                with contextlib.suppress(CacheFullError):  # a cache of one slot or block: no request can ever be forked
                    (child,), cache = manager.fork(cache, request.slot, 1)
                    manager.release(child)
        return sizes, cache

    def _trial_steps(self):
        """Yields (schedule, has_grammars) of a step for each program, which runs zeros of one request.

        The request has a slot until the next step is asked for.
        """
        schema = self._manager.schema
        # The first count is for the mixed program: it exceeds `max_query_tokens`, if the budget and the context allow
        # it. The second is for the decode program.
        counts = min(schema.max_query_tokens + 1, self.config.token_budget, schema.max_context), 1
        # Programs with grammars come last. They reuse the trace of the model from the other programs.
        for has_grammars, count in itertools.product(sorted({False, self.config.structured_output}), counts):
            request = Request(None, np.zeros((count,), np.int32), NO_REQUEST, order=0)
            request.slot = self._manager.admit(num_tokens=count)
            yield Schedule.of([request], [request.tokens]), has_grammars
            self._manager.release(request.slot)

    def begin_programs(self, cache: KVCache) -> list[Future[None]]:
        """Begins to compile the programs of all steps, each in its own thread, and returns the threads' Futures.

        Tracing holds the GIL, so threads trace in turn. Lowering of kernels by worker processes and compiling do not
        hold the GIL. The arrays of the cache and the model may be `jax.ShapeDtypeStruct` objects.
        """
        steps = []
        for schedule, has_grammars in self._trial_steps():
            launched, *step = self._prepare(schedule, has_grammars=has_grammars)
            masks = self._token_masks(launched) if logits_step in step else None
            steps.append((cache, launched, masks, *step))
        threads = ThreadPoolExecutor(len(steps), "compile-steps")
        try:
            return [threads.submit(self._compile, *step) for step in steps]
        finally:
            threads.shutdown(wait=False)

    def _compile(self, cache, launched, masks, function, args, options):
        """Compiles the program of a step.

        If `draw_step` draws the step's tokens, runs it on zeros to compile it too, except on a mesh.
        """
        self.model.prepare(function, cache, *args, **options)
        if masks is not None and self._manager.devices.mesh is None:
            logits = np.zeros((len(masks), self._manager.schema.config.vocab_size), np.float32)
            draw_step(jax.device_put(logits), launched.batch, *launched.drawing, masks, self._processor)


@functools.lru_cache(maxsize=8)  # most steps have the same requests as the previous step
def _output_rows(fields, shards, num_tokens, decode_size):
    """Places the output rows of a step. Within a shard, the rows of its requests stand one after another.

    Args:
      fields: the bytes of an int64 array [6, n], which has these values for each request. Bytes can be a key of
        `lru_cache`.
        * slot of the request.
        * number of the request's output rows.
        * index in the batch of the token that the request's first output row follows.
        * index of the request's first token in `LaunchedStep.tokens` of the previous step, or -1.
        * index of the request's first token in the batch.
        * number of the request's tokens in the batch.
      shards: the shards of the cache.
      num_tokens: number of tokens in the batch, in all shards with padding.
      decode_size: number of output rows of a shard.

    Returns:
      ([n] index of each request's first output row, `logits_indices` of `sample_step`, `EarlierTokens.indices`), as
      NumPy arrays.
    """
    slots, num_rows, first_tokens, sources, begins, counts = np.frombuffer(fields, int).reshape(6, -1)
    first_rows = shards.place_rows(slots, num_rows, decode_size)
    # On a device, indices of tokens in the batch and in the previous step's tokens count from the shard's first token.
    logits_indices = np.full((shards.count * decode_size,), -1, np.int32)
    token_indices = consecutive(first_tokens, num_rows) % (num_tokens // shards.count)
    logits_indices[consecutive(first_rows, num_rows)] = token_indices
    has_source = sources >= 0
    earlier = np.full((num_tokens,), -1, np.int32)
    earlier[consecutive(begins[has_source], counts[has_source])] = consecutive(
        sources[has_source] % decode_size, counts[has_source]
    )
    return first_rows, logits_indices, earlier
