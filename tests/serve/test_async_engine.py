"""Updates on their way from the engine's thread to answers."""

import asyncio
import time
import unittest.mock

import pytest

from dsv4_jax.engine import Engine
from dsv4_jax.serve import AsyncEngine, async_engine
from dsv4_jax.serve.async_engine import Generation, Update


def generation():
    return Generation(unittest.mock.Mock(), [unittest.mock.Mock()] * 2, 2)


def test_tokens_that_wait_are_one_update():
    async def take():
        updates = generation()
        updates._put(Update(0, num_generated=1))
        updates._put(Update(1, num_generated=1))
        updates._put(Update(0, num_generated=3, finish_reason="length"))
        return await updates.next_update(5), await updates.next_update(5), updates._has_news.is_set()

    first, second, has_news = asyncio.run(take())
    assert (first, second) == (Update(0, num_generated=3, finish_reason="length"), Update(1, num_generated=1))
    assert not has_news


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_tokens_before_a_failure_come_first(reason):
    async def take():
        updates = generation()
        updates._put(Update(0, num_generated=1))
        updates._put(Update(0, finish_reason=reason))
        return await updates.next_update(5), await updates.next_update(5)

    first, last = asyncio.run(take())
    assert (first.num_generated, first.finish_reason, last.finish_reason) == (1, None, reason)


def test_the_wait_for_an_update_ends():
    async def take():
        updates = generation()
        nothing = await asyncio.wait_for(updates.next_update(0.01), 5)
        updates._put(Update(0, num_generated=1))
        update = await updates.next_update(0)  # one that has come already does not depend on the time
        return nothing, update, await updates.next_update(-1)

    assert asyncio.run(take()) == (None, Update(0, num_generated=1), None)


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
        engine._schedule_handover([((updates, i), Update(i, num_generated=1)) for i in range(10)])
        found = [await updates.next_update(5) for _ in range(8)]
        begin = time.monotonic()
        last = [((updates, i), Update(i, num_generated=2, finish_reason="stop")) for i in range(10)]
        engine._schedule_handover(last[8:])
        found += [await updates.next_update(5) for _ in range(2)]
        seconds = time.monotonic() - begin
        unfinished = engine.unfinished
        engine._schedule_handover(last[:8])
        return [*found, *[await updates.next_update(5) for _ in range(8)]], seconds, unfinished, engine.unfinished

    found, seconds, *unfinished = asyncio.run(take())
    assert [update.num_generated for update in found] == [1] * 8 + [2] * 10
    assert [update.finish_reason for update in found] == [None] * 8 + ["stop"] * 10
    assert 0.05 < seconds < 5 and unfinished == [8, 0]
