"""An engine that runs in its own thread, for callers in an event loop."""

import asyncio
import collections
import functools
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsv4_jax.engine import Engine, Request
from dsv4_jax.engine.requests import FinishReason
from dsv4_jax.serve.errors import APIError


_log = logging.getLogger("dsv4_jax.serve")
# At most 4 events are sent to clients at once, and 2.5 per millisecond. Sending an event holds the GIL for 0.06 ms, and
# the engine needs the GIL for half of a short step. All tokens that a stream gets between two of its events are sent in
# the later event. With 32 fast streams, each stream has an event every 13 ms.
_EVENTS_AT_ONCE = 4
_SECONDS_PER_EVENT = 4e-4


class Update(NamedTuple):
    """The state of one request of a `Generation` at some time.

    Attributes:
      index: index of the request in the Generation: (index of its prompt) * n + (index of its sample).
      request: the request. The engine's thread may add further tokens to it, but does not change earlier ones. None if
        the request could not be added, was cancelled or failed together with others, or if the answer needs no request.
      num_generated: number of new tokens that the request had at that time.
      finish_reason: "stop", "length", "cancelled" or "error" in the final update, else None.
      error: the error that ended the request, or None.
    """

    index: int
    request: Request | None = None
    num_generated: int = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None


type _Key = tuple["Generation", int]  # identifies a request by its Generation and its index in this Generation


class Generation:
    """Requests that were submitted together, and a queue of their updates."""

    def __init__(self, engine: "AsyncEngine", adds: Sequence[Callable[[], Request]], n: int):
        """Makes a Generation; called by `AsyncEngine.submit`.

        Args:
          engine: the engine that runs the requests.
          adds: for each request, a function that adds it to the engine and returns it.
          n: number of samples of each prompt.
        """
        self._engine = engine
        self._adds = adds
        self._n = n
        self._updates: collections.deque[Update] = collections.deque()
        self._has_news = asyncio.Event()

    async def next_update(self, seconds: float) -> Update | None:
        """Waits up to `seconds` for the next update of any request. Returns None if there was none.

        Only the newest of a request's waiting updates is kept, so that a slow caller does not delay the engine. A
        failure is kept beside the update before it. The final update of a request has a `finish_reason`.
        """
        # A timer is cheaper than `asyncio.wait_for`, which matters because this runs for each event.
        timer = asyncio.get_running_loop().call_later(seconds, self._has_news.set)
        try:
            await self._has_news.wait()
        finally:
            timer.cancel()
        update = self._updates.popleft() if self._updates else None
        if not self._updates:
            self._has_news.clear()
        return update

    def _put(self, update):
        """Queues an update. Unless the update is a failure, it replaces a queued update of the same request."""
        self._has_news.set()
        for i, earlier in enumerate(self._updates):
            if earlier.index == update.index and update.finish_reason not in ("cancelled", "error"):
                self._updates[i] = update
                return
        self._updates.append(update)

    def cancel(self, *indices: int) -> None:
        """Cancels the requests with the given indices, by default all, without waiting. Skips finished requests."""
        keys = {(self, index) for index in indices or range(len(self._adds))}
        self._engine._send(self._engine._end, keys, "cancelled")


class AsyncEngine:
    """Runs the steps of an engine in a thread of its own. Only this thread uses the engine and the device.

    Methods are called in the event loop's thread, and do not wait for the device. If a step raises an exception, the
    requests of this step end with this error, and other requests continue.

    Attributes:
      engine: the engine; after `start` only its thread may call it.
      metrics: metrics of the engine after its newest step.
      capacity: maximum number of running and waiting requests.
      unfinished: current number of running and waiting requests.
      ready: whether the programs are compiled.
      alive: whether the thread runs.
    """

    unfinished = 0
    ready = False
    _stopping = False
    # Only the event loop's thread uses these: the time of the next handover of updates, and the timer that starts it.
    _next_handover = 0.0
    _timer: asyncio.TimerHandle | None = None
    _loop: asyncio.AbstractEventLoop

    def __init__(self, engine: Engine, *, max_waiting: int):
        """Wraps an engine. Up to `max_waiting` requests can wait while all slots are taken."""
        self.engine = engine
        self.metrics = engine.metrics
        self.capacity = engine.manager.schema.max_requests + max_waiting
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._running: dict[Request, _Key] = {}
        # `_followers` maps a prompt's first sample to the other samples, which wait until the first has read the
        # prompt.
        self._followers: dict[_Key, list[_Key]] = {}
        self._updates: list[tuple[_Key, Update]] = []
        # Only the event loop's thread uses this: the updates of each request that wait to be handed over to its
        # Generation.
        self._delivered: dict[_Key, list[Update]] = {}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread, which compiles all programs first. Call it in the event loop that will submit requests."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancels all requests and ends the thread."""
        self._send(self._stop)
        await asyncio.to_thread(self._thread.join)

    def submit(self, prompts: Sequence[np.ndarray], *, n: int, seed: int, **params: Any) -> Generation:
        """Queues `n` requests for each prompt. Sample k of a prompt uses `seed + k`, as in `engine.search.n_best`.

        With a prefix cache, the first sample reads the prompt before the other samples start, so that the prompt's
        full blocks are computed once.

        Args:
          prompts: arrays of token ids, which were checked already.
          n: number of samples of each prompt.
          seed: seed of the first sample.
          params: further fields of `RequestParams`.

        Raises:
          APIError: there would be more running and waiting requests than `capacity`; the status is 429. None of the new
            requests was submitted.
        """
        num_requests = len(prompts) * n
        if num_requests + self.unfinished > self.capacity:
            message = f"{self.unfinished} requests are running or waiting, the most is {self.capacity}"
            raise APIError(message, 429, code="queue_full", headers={"Retry-After": "1"})
        adds = [
            functools.partial(self.engine.add, prompt, seed=seed + k, **params) for prompt in prompts for k in range(n)
        ]
        generation = Generation(self, adds, n)
        self.unfinished += num_requests
        self._send(self._begin, generation)
        return generation

    def fail_all(self, error: Exception) -> None:
        """Ends all requests with an error."""
        self._send(self._end, None, "error", error)

    def _send(self, command, *args):
        """Queues a command for the engine's thread."""
        self._commands.put(functools.partial(command, *args))

    # --- The methods below run in the engine's thread. ---

    def _run(self):
        """The function of the thread. Compiles the programs, then runs commands and steps until `stop`."""
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
        except BaseException as error:  # such as a bug in this class, or a lost device
            _log.exception("the engine's thread ends")
            self.ready = False
            self._end(None, "error", RuntimeError(f"the engine's thread has ended: {error}"))
            while not self._commands.empty():
                self._commands.get()()
        finally:
            self._deliver()

    def _run_commands(self):
        """Runs the queued commands. If the engine is idle, waits for the next command first."""
        wait = not self.engine.busy
        while wait or not self._commands.empty():
            self._commands.get()()
            wait = False

    def _begin(self, generation):
        """Adds requests to the engine. With a prefix cache, samples of a prompt wait until the first has read it."""
        keys = [(generation, index) for index in range(len(generation._adds))]
        for samples in itertools.batched(keys, generation._n):
            leader, *followers = samples
            if self.engine.prefix is not None:
                self._followers[leader] = followers
                samples = [leader]
            for key in samples:
                self._add(key)

    def _add(self, key):
        """Adds a request to the engine. If that fails, the error is the request's final update."""
        generation, index = key
        try:
            self._running[generation._adds[index]()] = key
        except Exception as error:
            self._update(key, "error", error)

    def _stop(self):
        """Ends all requests, and then the thread."""
        self._stopping = True
        self._end(None, "cancelled")

    def _end(self, keys, reason, error=None):
        """Ends the requests with the given keys, or all if `keys` is None.

        A request may have finished in a step whose output is still to come. It then ends with `reason`, too.
        """
        for followers in list(self._followers.values()):
            for key in [key for key in followers if keys is None or key in keys]:
                followers.remove(key)
                self._update(key, reason, error)
        for request, key in list(self._running.items()):
            if keys is None or key in keys:
                if request.finish_reason is None:
                    self.engine.cancel(request)
                del self._running[request]
                self._update(key, reason, error)

    def _step(self):
        """Runs a step of the engine, and keeps an update for each request that got tokens or ended."""
        engine = self.engine
        try:
            outputs = engine.step()
        except Exception as error:
            _log.exception("a step failed: its requests end with an error")
            failed = [request for request in engine.last_scheduled if request.finish_reason is None]
            return self._end({self._running.get(request) for request in failed}, "error", error)
        for request, _ in outputs:
            key = self._running.get(request)
            if key is None:  # the request was cancelled, or ended by an error
                continue
            if request.finish_reason is not None:
                del self._running[request]
            self._update(key, request.finish_reason, request.error, request)

    def _update(self, key, finish_reason, error=None, request=None):
        """Keeps an update for `_deliver`. A request's first update also starts the request's followers."""
        _, index = key
        num_generated = 0 if request is None else request.num_generated
        self._updates.append((key, Update(index, request, num_generated, finish_reason, error)))
        # A request's first update means that the request has read its prompt, or never will. So followers can start.
        for follower in self._followers.pop(key, ()):
            self._add(follower)

    def _deliver(self):
        """Passes the kept updates to the event loop's thread."""
        updates = self._updates
        self._updates = []
        if updates and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._schedule_handover, updates)

    # --- The methods below run in the event loop's thread. ---

    def _schedule_handover(self, updates):
        """Adds updates to those that wait, and starts the timer of the handover if it is not running."""
        for key, update in updates:
            self._delivered.setdefault(key, []).append(update)
        if self._timer is None:
            self._timer = self._loop.call_at(self._next_handover, self._hand_over)

    def _hand_over(self):
        """Hands over updates to their Generations, first those of the requests whose updates have waited longest."""
        keys = list(itertools.islice(self._delivered, _EVENTS_AT_ONCE))
        for key in keys:
            generation, _ = key
            for update in self._delivered.pop(key):
                self.unfinished -= update.finish_reason is not None
                generation._put(update)
        # The next time counts from the planned time of this call, because timers are up to a millisecond late.
        self._next_handover = max(self._next_handover + len(keys) * _SECONDS_PER_EVENT, self._loop.time())
        self._timer = self._loop.call_at(self._next_handover, self._hand_over) if self._delivered else None
