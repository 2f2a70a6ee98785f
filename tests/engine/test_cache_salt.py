"""Requests share cached prefixes only with those of the same salt, also after forks and preemption."""

from dsv4_jax.decode import SamplingParams
from dsv4_jax.engine import Engine
from dsv4_jax.host import PrefixCache


PROMPT = list(range(1, 60))


def make(small, manager, **options):
    return Engine(small[0], manager, token_budget=20, prefix=PrefixCache(manager, key="tiny"), **options)


def finish(engine, request):
    while engine.busy:
        engine.step()
    return request


def run(engine, salt, prompt=PROMPT):
    return finish(engine, engine.add(prompt, max_new_tokens=20, cache_salt=salt))


def test_salts_are_apart(small, wide):
    engine = make(small, wide())
    found = {salt: run(engine, salt) for salt in ("", "a", "b")}
    assert {request.cached_tokens for request in found.values()} == {0}
    again = {salt: run(engine, salt) for salt in found}
    assert min(request.cached_tokens for request in again.values()) > 0
    assert all(again[salt].generated == found[""].generated for salt in again)


def test_what_a_fork_or_an_answer_adds_is_salted_too(small, wide):
    """The prompt has no full block: a fork caches its first one itself."""
    engine = make(small, wide())
    request = engine.add(PROMPT[:3], max_new_tokens=40, sampling=SamplingParams(temperature=1.0), cache_salt="a")
    engine.step(decode=False)
    requests = [request, *engine.fork(request, [1, 2])]
    finish(engine, request)
    assert len({tuple(request.generated) for request in requests}) == 3
    for request in requests:
        found = [run(engine, salt, request.tokens).cached_tokens > 0 for salt in ("", "b", "a")]
        assert found == [False, False, True]


def test_a_preempted_request_keeps_its_salt(small, wide):
    engine = make(small, wide(), overlap=False)
    request = engine.add(PROMPT, max_new_tokens=20, cache_salt="a")
    for _ in range(4):
        engine.step()
    engine._scheduler._preempt(request)
    finish(engine, request)
    found = [run(engine, salt, request.tokens).cached_tokens for salt in ("", "b", "a")]
    assert found[:2] == [0, 0] and found[2] > request.prompt_length
