"""Updates on their way from the engine's thread to answers."""

import asyncio
import time
import unittest.mock

import chex
import numpy as np
import pytest

from dsv4_jax.decode import TopLogprobs
from dsv4_jax.engine import Engine
from dsv4_jax.serve import AsyncEngine, async_engine
from dsv4_jax.serve.async_engine import Generation, Update


def some_top(*ids):
    return TopLogprobs(np.array(ids, np.int32)[:, None], -np.ones((len(ids), 1), np.float32))


def generation():
    return Generation(unittest.mock.Mock(), [unittest.mock.Mock()] * 2, 2)


def test_tokens_that_wait_are_one_update():
    async def take():
        updates = generation()
        updates._put(Update(0, [5], [-0.5], some_top(5), prompt_logprobs=[-1.0], prompt_top=some_top(1)))
        updates._put(Update(1, [7], [-0.7]))
        updates._put(Update(0, [6, 8], [-0.6, -0.8], some_top(6, 9), cached_tokens=3, finish_reason="length"))
        return await updates.next_update(), await updates.next_update(), updates._has_news.is_set()

    first, second, has_news = asyncio.run(take())
    assert (first.tokens, first.logprobs, first.finish_reason) == ([5, 6, 8], [-0.5, -0.6, -0.8], "length")
    assert (first.prompt_logprobs, first.cached_tokens, second.tokens) == ([-1.0], 3, [7])
    chex.assert_trees_all_equal((first.top, first.prompt_top), (some_top(5, 6, 9), some_top(1)))
    assert not has_news


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_tokens_before_a_failure_come_first(reason):
    async def take():
        updates = generation()
        updates._put(Update(0, [5], [-0.5]))
        updates._put(Update(0, finish_reason=reason))
        return await updates.next_update(), await updates.next_update()

    first, last = asyncio.run(take())
    assert (first.tokens, first.finish_reason, last.tokens, last.finish_reason) == ([5], None, (), reason)


def test_the_time_limit_ends_the_wait():
    async def take():
        updates = generation()
        lift = updates.expire_after(0.01)
        lift()
        await asyncio.sleep(0.05)
        was_expired = updates._is_expired
        updates.expire_after(0.01)
        return was_expired, await asyncio.wait_for(updates.next_update(), 5)

    assert asyncio.run(take()) == (False, None)


def test_fast_streams_get_several_tokens_in_an_event(monkeypatch):
    monkeypatch.setattr(async_engine, "_SECONDS_PER_EVENT", 0.02)

    async def take():
        engine = unittest.mock.MagicMock(spec=Engine, manager=unittest.mock.MagicMock(), metrics=None)
        engine.manager.schema.max_requests = 10
        engine = AsyncEngine(engine, max_waiting=0)
        engine._loop = asyncio.get_running_loop()
        engine.unfinished = 10
        updates = generation()
        # Of ten requests, the first eight get their token at once after a pause, and the others with the next one.
        engine._schedule_handover([(updates, Update(i, [i], [-0.5])) for i in range(10)])
        found = [await updates.next_update() for _ in range(8)]
        begin = time.monotonic()
        last = [(updates, Update(i, [11], [-0.7], finish_reason="stop")) for i in range(10)]
        engine._schedule_handover(last[8:])
        found += [await updates.next_update() for _ in range(2)]
        seconds = time.monotonic() - begin
        unfinished = engine.unfinished
        engine._schedule_handover(last[:8])
        return [*found, *[await updates.next_update() for _ in range(8)]], seconds, unfinished, engine.unfinished

    found, seconds, *unfinished = asyncio.run(take())
    assert [update.tokens for update in found] == [*([i] for i in range(8)), [8, 11], [9, 11], *[[11]] * 8]
    assert [update.finish_reason for update in found] == [None] * 8 + ["stop"] * 10
    assert 0.05 < seconds < 5 and unfinished == [8, 0]
