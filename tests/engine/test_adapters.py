"""Requests with different adapters in one engine: each gets the tokens that it gets alone, and prefixes of its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM, add_adapters, parameter_views
from tests.v41 import v41_config


PROMPT = np.arange(3, 40).tolist()


@pytest.fixture(scope="module")
def model():
    model = DeepseekV4ForCausalLM(v41_config(), jnp.float32)
    add_adapters(model, ["a", "b"], rank=2, targets=["o_b_proj", "kv_proj"])
    rng = np.random.default_rng(0)
    for path, view in parameter_views(model).items():
        if path.endswith(".up"):
            view.set_value(jnp.asarray(0.3 * rng.standard_normal(view.shape), jnp.float32))
    return model


@pytest.fixture(scope="module")
def engine(model):
    sizes = {"num_blocks": 32, "max_requests": 3, "max_context": 64, "block_tokens": 8, "dtype": jnp.float32}
    manager = KVCacheManager(model.config, **sizes)
    prefix = PrefixCache(manager, key="adapters")
    return Engine(model, manager, token_budget=40, prefix=prefix, batch_invariant=True)


def finish(engine, *adapters):
    requests = [engine.add(PROMPT, max_new_tokens=12, adapter=adapter) for adapter in adapters]
    while engine.busy:
        engine.step()
    return requests


def test_requests_get_the_tokens_of_their_adapters(engine):
    alone = [finish(engine, adapter)[0] for adapter in (None, "a", "b")]
    assert len({tuple(request.generated) for request in alone}) == 3
    assert [request.cached_tokens for request in alone] == [0, 0, 0]
    compilations = engine.metrics.compilations
    together = finish(engine, None, "a", "b")
    assert [request.generated for request in together] == [request.generated for request in alone]
    assert all(request.cached_tokens for request in together)  # each hits the prefix of its own adapter
    (child,) = engine.fork(running := engine.add(PROMPT, max_new_tokens=12, adapter="b"), seeds=[1])
    while engine.busy:
        engine.step()
    assert child.generated == running.generated == alone[2].generated
    assert engine.metrics.compilations == compilations


def test_what_is_refused(engine, untyped):
    with pytest.raises(ValueError, match="adapter='c' must be one of the model's: a, b"):
        engine.add(PROMPT, max_new_tokens=1, adapter="c")
    with pytest.raises(TypeError, match="adapter=0 must be the name of an adapter, or None"):
        engine.add(PROMPT, max_new_tokens=1, adapter=0)
