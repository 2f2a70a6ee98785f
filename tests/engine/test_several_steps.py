"""An engine that runs several decode steps at once gives every request the tokens that single steps give it."""

import jax
import numpy as np
import pytest

from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import PrefixCache
from dsv4_jax.parallel.mesh import make_mesh
from tests.decode.bigram import MODEL as BIGRAM
from tests.engine.test_engine import BUDGET, PROMPTS, add, alone, drain, is_drained, make  # noqa: F401
from tests.host.managers import make as make_bigram_manager


STEPS = 6


def several(small, manager, **options):
    return make(small, manager, **dict(drafter=None, num_scheduler_steps=STEPS) | options)


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_are_those_of_single_steps(small, roomy, alone, cached):  # noqa: F811
    """Requests of all lengths and kinds of sampling wait, come and end in the midst of several steps."""
    prefix = PrefixCache(roomy, key="tiny") if cached else None
    engine = several(small, roomy, prefix=prefix)
    assert engine.warm_up() == {"mixed": BUDGET, "decode": 3, "several": STEPS} and is_drained(engine)
    compilations = engine.metrics.compilations
    with jax.transfer_guard("disallow"):
        requests, calls = [add(engine, i) for i in (5, 0, 1)], 0
        engine.step()
        requests += [add(engine, i) for i in (2, 3, 4)]
        while engine.busy:
            engine.step()
            calls += 1
            assert calls < 200
            running = {request.slot: request for request in engine.running}
            lengths = jax.device_get(engine.cache.lengths)
            held = {slot: roomy.length(slot) for slot in running}
            assert {slot: lengths[slot] for slot in held if held[slot]} == {k: n for k, n in held.items() if n}
    assert [request.generated for request in requests] == [alone[i] for i in (5, 0, 1, 2, 3, 4)]
    assert calls < engine.metrics.steps - STEPS and engine.metrics.compilations == compilations
    assert is_drained(engine)
    if cached:  # what was kept at the borders of blocks is right
        again = add(engine, 1, id="again")
        drain(engine)
        assert again.cached_tokens >= 32 and again.generated == alone[1]


def test_a_stop_token_ends_a_request_in_the_midst(small, roomy, alone):  # noqa: F811
    stop = alone[1][7]
    engine = several(small, roomy)
    request, other = add(engine, 1, stop_tokens=[stop]), add(engine, 3)
    drain(engine)
    assert request.generated == alone[1][: alone[1].index(stop) + 1] and request.finish_reason == "stop"
    assert other.generated == alone[3] and is_drained(engine)


def test_where_blocks_are_few_steps_run_alone(small, tight):
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[4]]
    tokens = []
    for steps in (1, STEPS):
        engine = several(small, tight, num_scheduler_steps=steps)
        requests = [engine.add(prompt, max_new_tokens=100, seed=i) for i, prompt in enumerate(prompts)]
        drain(engine)
        assert engine.metrics.preemptions > 0 and is_drained(engine, 13)
        tokens.append([request.generated for request in requests])
    assert tokens[0] == tokens[1]


def test_a_cache_too_small_for_several_steps(small, wide):
    """One token and 32 more want three blocks of 16."""
    manager = wide(2)
    engine = several(small, manager, num_scheduler_steps=32)
    assert engine.warm_up() == {"mixed": BUDGET, "decode": 3} and is_drained(engine, 2)
    request = engine.add(PROMPTS[0], max_new_tokens=8)
    drain(engine)
    assert len(request.generated) == 8 and is_drained(engine, 2)


def test_not_with_drafts(small, roomy):
    for options in (dict(drafter=PromptLookup()), dict(batch_invariant=True)):
        with pytest.raises(ValueError, match="num_scheduler_steps=6 must be 1 with a drafter, or batch_invariant="):
            several(small, roomy, **options)


def test_parts_of_a_mesh_take_several_steps():
    tokens = []
    for mesh in (None, make_mesh({"data": 2})):
        manager, model = make_bigram_manager(mesh=mesh), BIGRAM
        if mesh is not None:
            model = jax.device_put(BIGRAM, jax.NamedSharding(mesh, jax.P()))
        engine = Engine(model, manager, token_budget=24, num_scheduler_steps=STEPS)
        requests = [engine.add(range(n), max_new_tokens=n, seed=n) for n in (5, 12, 20)]
        while engine.busy:
            engine.step()
        tokens.append([request.generated for request in requests])
    assert tokens[0] == tokens[1] and np.size(tokens[0][2]) == 20
