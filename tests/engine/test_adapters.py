"""Requests with different adapters in one engine: each gets the tokens that it gets alone, and prefixes of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.engine import Engine, generate
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM, add_adapters, parameter_views, shardings
from dsv4_jax.nn.lora import place_adapters
from tests.v41 import v41_config


PROMPT = np.arange(3, 40).tolist()
CONFIG = v41_config().first_layers(3)  # a window only, Engram, and candidates
SIZES = {"num_blocks": 32, "max_requests": 3, "max_context": 64, "block_tokens": 8, "dtype": jnp.float32}


@pytest.fixture(scope="module")
def model():
    model = DeepseekV4ForCausalLM(CONFIG, jnp.float32)
    add_adapters(model, ["a", "b"], rank=2, targets=["o_b_proj", "kv_proj"])
    rng = np.random.default_rng(0)
    for path, view in parameter_views(model).items():
        if path.endswith(".up"):
            view.set_value(jnp.asarray(0.3 * rng.standard_normal(view.shape), jnp.float32))
    return model


@pytest.fixture(scope="module")
def engine(model):
    manager = KVCacheManager(model.config, **SIZES)
    prefix = PrefixCache(manager, key="adapters")
    return Engine(model, manager, token_budget=40, prefix=prefix, batch_invariant=True)


def finish(engine, *adapters):
    requests = [engine.add(PROMPT, max_new_tokens=12, adapter=adapter) for adapter in adapters]
    while engine.busy:
        engine.step()
    return requests


def test_requests_get_the_tokens_of_their_adapters(engine, model):
    alone = [finish(engine, adapter)[0] for adapter in (None, "a", "b")]
    assert len({tuple(request.generated) for request in alone}) == 3
    assert [request.cached_tokens for request in alone] == [0, 0, 0]
    compilations = engine.metrics.compilations
    together = finish(engine, None, "a", "b")
    assert [request.generated for request in together] == [request.generated for request in alone]
    assert all(request.cached_tokens for request in together)  # each hits the prefix of its own adapter
    looped = generate(model, KVCacheManager(model.config, **SIZES), [PROMPT], max_new_tokens=12, adapter="b")
    assert looped == [alone[2].generated]
    (child,) = engine.fork(running := engine.add(PROMPT, max_new_tokens=12, adapter="b"), seeds=[1])
    while engine.busy:
        engine.step()
    assert child.generated == running.generated == alone[2].generated
    assert engine.metrics.compilations == compilations


def test_no_salt_of_a_client_is_an_adapters(engine):
    finish(engine, "a")
    request = engine.add(PROMPT, max_new_tokens=1, cache_salt='["a", ""]')
    while engine.busy:
        engine.step()
    assert request.cached_tokens == 0


@pytest.mark.slow
def test_adapters_on_a_mesh(model, engine):
    """They are sharded as the maps that they stand beside."""
    sharded = DeepseekV4ForCausalLM(CONFIG, jnp.float32)
    mesh = jax.make_mesh((2,), ("model",))
    sharded = jax.device_put(sharded, shardings(sharded, mesh))
    add_adapters(sharded, ["a", "b"], rank=2, targets=["o_b_proj", "kv_proj"], place=False)
    values = {path: view.read() for path, view in parameter_views(model).items()}
    for path, view in parameter_views(sharded).items():
        if ".adapters." in path:
            view.set_value(values[path])
    place_adapters(sharded)
    meshed = Engine(sharded, KVCacheManager(model.config, **SIZES, mesh=mesh), token_budget=40, batch_invariant=True)
    for mine, other in zip(finish(meshed, None, "a", "b"), finish(engine, None, "a", "b"), strict=True):
        assert mine.generated == other.generated


def test_what_is_refused(engine, untyped):
    with pytest.raises(ValueError, match="adapter='c' must be one of the model's: a, b"):
        engine.add(PROMPT, max_new_tokens=1, adapter="c")
    with pytest.raises(TypeError, match="adapter=0 must be the name of an adapter, or None"):
        engine.add(PROMPT, max_new_tokens=1, adapter=0)
