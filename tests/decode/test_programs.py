"""A compiled model takes the same steps as its module."""

import chex
import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.decode import (
    BatchedSamplingParams,
    CompiledModel,
    decode_loop,
    decode_step,
    forward,
    sample_step,
)
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.decode.bigram import MODEL
from tests.decode.conftest import make_manager
from tests.host.managers import make


@pytest.fixture
def manager(one_layer):
    return make_manager(one_layer.config)


@pytest.mark.slow
def test_each_method_is_the_function_of_its_name(one_layer, manager):
    compiled = CompiledModel(one_layer)
    batch = manager.prepare_forward({manager.admit(): [5]})
    slots = manager.schema.max_requests
    rows = jnp.array([0, -1, -1])
    seeds = jnp.zeros(slots, jnp.uint32)
    sampling = jax.device_put(BatchedSamplingParams.of([GREEDY] * slots))
    for function, args, options in (
        (forward, (), {}),
        (decode_step, (), {}),
        (sample_step, (rows, sampling, seeds), {}),
        (sample_step, (), {}),
        (decode_loop, (seeds,), dict(steps=1)),
    ):
        got = getattr(compiled, function.__name__)(manager.init_cache(), batch, *args, **options)
        # With the object itself as its model, the function runs the same program.
        programs = function._cache_size()
        chex.assert_trees_all_equal(got, function(compiled, manager.init_cache(), batch, *args, **options))
        assert function._cache_size() == programs


@pytest.mark.slow
def test_a_module_takes_the_same_step(one_layer, manager):
    batch = manager.prepare_forward({manager.admit(): [5]})
    expected, _ = decode_step(one_layer, manager.init_cache(), batch)
    got, _ = CompiledModel(one_layer).decode_step(manager.init_cache(), batch)
    chex.assert_trees_all_equal(got, expected)


def test_steps_of_equal_shapes_trace_the_model_once(one_layer, monkeypatch):
    manager = KVCacheManager(one_layer.config, num_blocks=4, max_requests=2, max_context=64)  # a shape of no other test
    cache = manager.init_cache()
    batch = manager.prepare_forward({manager.admit(): [5]})
    traced = []
    call = DeepseekV4ForCausalLM.__call__
    monkeypatch.setattr(DeepseekV4ForCausalLM, "__call__", lambda *args: traced.append(0) or call(*args))
    for step in (forward, decode_step, sample_step):
        step.trace(one_layer, cache, batch)
    assert len(traced) == 1


def test_nothing_is_copied_and_twice_is_once(model):
    compiled = CompiledModel(model)
    assert CompiledModel.of(compiled) is compiled
    assert all(a is b for a, b in zip(compiled.arrays, jax.tree.leaves(model), strict=True))
    # Equal structures: models of one shape share compiled programs.
    assert jax.tree.structure(CompiledModel.of(model)) == jax.tree.structure(compiled)


def test_compiled_programs_are_counted():
    # No other test has five slots, and so these programs.
    compiled = CompiledModel(MODEL)
    same = CompiledModel(MODEL)
    manager = make(max_query_tokens=1, max_requests=5)
    slot = manager.admit()
    cache = manager.init_cache()
    for tokens, count in (([5], 1), ([6], 1), ([7, 8], 2)):
        _, cache = compiled.decode_step(cache, manager.prepare_forward({slot: tokens}))
        assert compiled.compilations == count
    same.decode_step(cache, manager.prepare_forward({slot: [9]}))
    assert same.compilations == 0
