"""An engine in its own thread, for callers in an event loop."""

import asyncio
import collections
import dataclasses
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dsv4_jax.decode.sampling import TopLogprobs
from dsv4_jax.engine import Engine, Request


_log = logging.getLogger("dsv4_jax.serve")
# Sending an event takes 0.06 ms of a CPU core, and the engine needs Python's lock for half of a short step. So 2.5
# events a millisecond are sent, and tokens that come meanwhile are sent together: with 32 fast streams, those of 13 ms.
_EVENTS_AT_ONCE = 4
_SECONDS_PER_EVENT = 4e-4


class QueueFullError(RuntimeError):
    """Raised if the maximum number of requests is running or waiting. Nothing was changed."""


@dataclasses.dataclass(frozen=True)
class Update:
    """News of one request of a `Generation`.

    Attributes:
      index: index of the request: number of its prompt * n + number of its sample.
      tokens: new token ids.
      logprobs: log-probabilities of the new tokens under the model.
      top: likeliest tokens in the place of each new token, [n, k].
      prompt_logprobs, prompt_top: if requested, the same for the prompt's tokens after the first. They come with the
        first new tokens.
      cached_tokens: number of prompt tokens that the prefix cache held.
      finish_reason: "stop", "length", "cancelled" or "error" in the last update, else None.
      error: the error that ended the request.
    """

    index: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top: TopLogprobs | None = None
    prompt_logprobs: Sequence[float] = ()
    prompt_top: TopLogprobs | None = None
    cached_tokens: int = 0
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None = None
    error: Exception | None = None

    def merged(self, later: "Update") -> "Update":
        """Returns this update and the same request's next one as one."""
        tops = [top for top in (self.top, later.top) if top is not None]
        top = jax.tree.map(lambda *parts: np.concatenate(parts), *tops) if tops else None
        return dataclasses.replace(
            later,
            tokens=[*self.tokens, *later.tokens],
            logprobs=[*self.logprobs, *later.logprobs],
            top=top,
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            prompt_top=later.prompt_top if self.prompt_top is None else self.prompt_top,
        )


SILENCE = Update(-1)  # of no request


class Generation:
    """Requests that were submitted together, and a queue of their updates."""

    def __init__(self, engine: "AsyncEngine", adds: Sequence[Callable[[], Request]], n: int):
        """Made by `AsyncEngine.submit`. `adds` has a function for each request that adds it to the engine."""
        self._engine = engine
        self._adds = adds
        self._n = n
        self._updates: collections.deque[Update] = collections.deque()
        self._has_news = asyncio.Event()
        self._is_expired = False
        self._last_update = 0.0

    def report_silence(self, seconds: float) -> Callable[[], None]:
        """Makes `next_update` return SILENCE where no update came for so long; returns a function that ends this."""
        loop = asyncio.get_running_loop()
        self._last_update = loop.time()

        def check() -> None:
            nonlocal timer
            silent = loop.time() - self._last_update
            if silent >= seconds:
                self._last_update += silent
                self._has_news.set()
            timer = loop.call_at(self._last_update + seconds, check)

        timer = loop.call_later(seconds, check)
        return lambda: timer.cancel()

    def expire_after(self, seconds: float) -> Callable[[], None]:
        """Limits the time of all updates, and returns a function that lifts the limit."""
        # One timer for all updates: `asyncio.wait_for` would make one for each.
        return asyncio.get_running_loop().call_later(seconds, self._expire).cancel

    async def next_update(self) -> Update | None:
        """Waits for the next update of any request. The last update of a request has a `finish_reason`.

        Tokens that have come since the last call are one update, so that slow callers do not delay the engine. Returns
        None once the time limit is over.
        """
        await self._has_news.wait()
        if self._is_expired:
            return None
        update = self._updates.popleft() if self._updates else SILENCE
        if not self._updates:
            self._has_news.clear()
        self._last_update = asyncio.get_running_loop().time()
        return update

    def _put(self, update: Update) -> None:
        """Adds an update, or merges it with one of the same request that waits."""
        self._has_news.set()
        for i, earlier in enumerate(self._updates):
            if earlier.index == update.index and update.finish_reason not in ("cancelled", "error"):
                self._updates[i] = earlier.merged(update)
                return
        self._updates.append(update)

    def _expire(self) -> None:
        self._is_expired = True
        self._has_news.set()

    def cancel(self, *indices: int) -> None:
        """Cancels some requests, by default all, and returns at once. Finished requests are unchanged."""
        self._engine._send(self._engine._cancel, self, set(indices or range(len(self._adds))))


class AsyncEngine:
    """Runs an engine's steps in a thread, the only one that uses the engine and the device.

    The methods are for the event loop's thread, and none of them waits for the device. If a step raises, its requests
    end with the error, and the others continue.

    Attributes:
      engine: the engine; after `start` only its thread may call it.
      metrics: metrics of the engine after its last step.
      capacity: maximum number of running and waiting requests.
      unfinished: current number of running and waiting requests.
      ready: whether the programs are compiled.
      alive: whether the thread runs.
    """

    def __init__(self, engine: Engine, *, max_waiting: int):
        """Wraps an engine; `max_waiting` requests may wait while all slots are taken."""
        self.engine = engine
        self.metrics = engine.metrics
        self.capacity = engine.manager.schema.max_requests + max_waiting
        self.unfinished = 0
        self.ready = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._running: dict[Request, tuple[Generation, int]] = {}
        # Requests that wait until the first one with the same prompt has read it, by that first one.
        self._followers: dict[tuple[Generation, int], list[int]] = {}
        self._updates: list[tuple[Generation, Update]] = []
        self._stopping = False
        # The event loop's: updates of each request that wait, and the timer that hands the first ones over.
        self._delivered: dict[tuple[Generation, int], list[Update]] = {}
        self._next_handover = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, which first compiles all programs. Call it in the event loop that submits requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancels all requests and ends the thread."""
        self._send(self._stop)
        await asyncio.to_thread(self._thread.join)

    def submit(self, prompts: Sequence[np.ndarray], *, n: int = 1, seed: int, **params: Any) -> Generation:
        """Queues `n` requests for each prompt. Sample k of a prompt uses seed + k, as in `n_best`.

        With a prefix cache, the first sample reads the prompt before the others start, so that its full blocks are
        computed once.

        Args:
          prompts: [n] token ids each, already checked with `check_request`.
          n: number of samples of each prompt.
          seed: seed of the first sample.
          params: further fields of `RequestParams`.

        Raises:
          ValueError: there are more requests than the server's capacity.
          QueueFullError: there are more requests than the server can take now.
        """
        count = len(prompts) * n
        if count > self.capacity:
            raise ValueError(f"{len(prompts)} prompts with {n} samples each are more than {self.capacity} requests")
        if count + self.unfinished > self.capacity:
            raise QueueFullError(f"{self.unfinished} requests are running or waiting, the most is {self.capacity}")
        add = functools.partial(self.engine.add, **params)
        adds = [functools.partial(add, prompt, seed=seed + k) for prompt in prompts for k in range(n)]
        generation = Generation(self, adds, n)
        self.unfinished += count
        self._send(self._begin, generation)
        return generation

    def fail_all(self, error: Exception) -> None:
        """Ends all requests with an error."""
        self._send(self._fail, None, error)

    def _send(self, command, *args):
        self._commands.put(functools.partial(command, *args))

    # --- The methods below run in the engine's thread. ---

    def _run(self):
        try:
            self.engine.warm_up()
            self.metrics = self.engine.metrics
            self.ready = True
            while not self._stopping:
                self._run_commands()
                if self.engine.busy:
                    self._step()
                self.metrics = self.engine.metrics
                self._deliver()
            self.engine.close()
        except BaseException as error:  # a defect of this class, or a lost device
            _log.exception("the engine's thread ends")
            self.ready = False
            self._fail(None, RuntimeError(f"the engine's thread has ended: {error}"))
            while not self._commands.empty():
                self._commands.get()()
        finally:
            self._deliver()

    def _run_commands(self):
        """Runs the queued commands; waits for one if the engine is idle."""
        wait = not self.engine.busy
        while wait or not self._commands.empty():
            self._commands.get()()
            wait = False

    def _begin(self, generation):
        for first in range(0, len(generation._adds), generation._n):
            others = list(range(first + 1, first + generation._n))
            if self.engine.prefix is not None and others:
                self._followers[generation, first] = others
                others = []
            for index in [first, *others]:
                self._add(generation, index)

    def _add(self, generation, index):
        try:
            self._running[generation._adds[index]()] = generation, index
        except Exception as error:
            self._update(generation, index, finish_reason="error", error=error)

    def _cancel(self, generation, indices):
        for leader, others in list(self._followers.items()):
            if leader[0] is generation:
                for index in indices.intersection(others):
                    others.remove(index)
                    self._update(generation, index, finish_reason="cancelled")
        for request, (owner, index) in list(self._running.items()):
            if owner is generation and index in indices:
                self._end(request, "cancelled")

    def _stop(self):
        self._stopping = True
        for generation in {generation for generation, _ in self._running.values()}:
            self._cancel(generation, set(range(len(generation._adds))))

    def _fail(self, requests, error):
        """Ends requests with an error; None ends all, including those that are not added yet."""
        if requests is None:
            for (generation, _), others in self._followers.items():
                for index in others:
                    self._update(generation, index, finish_reason="error", error=error)
            self._followers.clear()
        for request in list(self._running) if requests is None else requests:
            if request in self._running:
                self._end(request, "error", error)

    def _end(self, request, reason, error=None):
        """Ends a request. It may have finished in a step whose output is still to come."""
        if request.finish_reason is None:
            self.engine.cancel(request)
        self._update(*self._running.pop(request), finish_reason=reason, error=error)

    def _step(self):
        engine = self.engine
        try:
            outputs = engine.step()
        except Exception as error:
            _log.exception("a step failed: its requests end with an error")
            return self._fail([request for request in engine.last_scheduled if request.finish_reason is None], error)
        for output in outputs:
            request = output.request
            if request not in self._running:  # cancelled, or ended by an error
                continue
            generation, index = self._running[request]
            first = request.num_generated - len(output.tokens)
            if request.finish_reason is not None:
                del self._running[request]
            self._update(
                generation,
                index,
                tokens=output.tokens,
                logprobs=request.logprobs_from(request.prompt_length + first),
                top=request.top_logprobs[first:] if request.params.top_logprobs else None,
                prompt_logprobs=request.prompt_logprobs if not first else (),
                prompt_top=request.prompt_top_logprobs if not first else None,
                cached_tokens=request.cached_tokens,
                finish_reason=request.finish_reason,
                error=request.error,
            )

    def _update(self, generation, index, **fields):
        self._updates.append((generation, Update(index, **fields)))
        # The first update comes when the prompt has been read, or will not be.
        for follower in self._followers.pop((generation, index), ()):
            self._add(generation, follower)

    def _deliver(self):
        updates = self._updates
        self._updates = []
        if updates and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._schedule_handover, updates)

    # --- The methods below run in the event loop's thread. ---

    def _schedule_handover(self, updates):
        """Keeps updates until it is their turn."""
        for generation, update in updates:
            self._delivered.setdefault((generation, update.index), []).append(update)
        if self._timer is None:
            self._timer = self._loop.call_at(self._next_handover, self._hand_over)

    def _hand_over(self):
        """Queues all updates of the requests that have waited for longest."""
        requests = list(itertools.islice(self._delivered, _EVENTS_AT_ONCE))
        for request in requests:
            for update in self._delivered.pop(request):
                self.unfinished -= update.finish_reason is not None
                request[0]._put(update)
        # Timers are up to a millisecond late, which the next one makes up for.
        self._next_handover = max(self._next_handover + len(requests) * _SECONDS_PER_EVENT, self._loop.time())
        self._timer = self._loop.call_at(self._next_handover, self._hand_over) if self._delivered else None
