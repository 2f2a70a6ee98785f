"""Steps that tell the likeliest tokens; steps that do not are what they were."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.decode import (
    BatchedSamplingParams,
    LogprobOptions,
    SamplingParams,
    StepOutput,
    decode_loop,
    sample,
    sample_step,
)
from dsv4_jax.decode.step import accepted_lengths, run_model
from tests.decode.bigram import MODEL, check
from tests.host.managers import make


def arguments():
    """Of `sample_step`: two requests, of which one brings two tokens to be drawn after."""
    manager = make()
    batch = manager.prepare_forward({manager.admit(): [7, 9], manager.admit(): [5]})
    sampling = jax.device_put(BatchedSamplingParams.of([SamplingParams(1.0)] * 4))
    rows = jnp.asarray([0, 1, 2, -1], jnp.int32)
    seeds = jnp.arange(4, dtype=jnp.uint32)
    return manager.init_cache(), batch, rows, sampling, seeds


def test_a_step_without_them_has_no_more_to_do():
    def expected(model, cache, batch, rows, sampling, seeds):
        hidden, cache = run_model(model, cache, batch)
        logits = model.logits(hidden[jnp.maximum(rows, 0)])
        at = jnp.maximum(rows, 0)
        slots = jnp.maximum(batch.slots[at], 0)
        tokens = sample(logits, sampling[slots], seeds[slots], batch.positions[at] + 1)
        logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)
        cache = dataclasses.replace(cache, lengths=accepted_lengths(cache.lengths, batch, rows, tokens))
        return StepOutput(tokens, logprobs), cache

    args = MODEL, *arguments()
    plain = str(jax.make_jaxpr(sample_step.__wrapped__)(*args))
    assert plain == str(jax.make_jaxpr(expected)(*args))
    assert "fori_loop" not in plain


def test_likeliest_and_forced_tokens():
    """A forced token takes the place of a drawn one: here a draft that stands, though another would be drawn."""
    forced = jnp.asarray([9, -1, -1, -1], jnp.int32)
    for wanted in (True, False):
        options = LogprobOptions(forced, jnp.asarray(wanted), num_top=4)
        output, cache = sample_step(MODEL, *arguments(), options)
        tokens = output.tokens
        top = output.top_logprobs
        assert int(tokens[0]) == 9 and cache.lengths.tolist()[:2] == [2, 1]
        if wanted:
            for i, before in enumerate((7, 9, 5)):
                check([before, int(tokens[i])], output.logprobs[i : i + 1], top[i : i + 1])
        else:
            assert not top.ids.any() and not top.logprobs.any()
    drawn, cache = sample_step(MODEL, *arguments())
    chex.assert_trees_all_equal(drawn.tokens[1:3], tokens[1:3])
    assert int(drawn.tokens[0]) != 9 and cache.lengths.tolist()[:2] == [1, 1]


def test_the_loop_on_the_device_tells_them():
    manager = make()
    slots = [manager.admit(), manager.admit()]
    batch = manager.prepare_forward({slot: [7 + slot] for slot in slots}, reserve=11)
    seeds = jnp.zeros(4, jnp.uint32)
    options = dict(steps=12, sampling=SamplingParams(1.0, top_k=20))
    plain, _ = decode_loop(MODEL, manager.init_cache(), batch, seeds, **options)
    stop = int(plain.tokens[1, 5])
    options |= dict(stop_tokens=(stop,), top_logprobs=5)
    output, _ = decode_loop(MODEL, manager.init_cache(), batch, seeds, **options)
    tokens = output.tokens
    logprobs = output.logprobs
    top = output.top_logprobs
    for slot in slots:
        count = int((tokens[slot] >= 0).sum())
        chex.assert_trees_all_equal(tokens[slot, :count], plain.tokens[slot, :count])
        check([7 + slot, *tokens[slot, :count].tolist()], logprobs[slot, :count], top[slot, :count])
    ended = tokens[1].tolist().index(stop) + 1
    assert ended <= 6 and not logprobs[1, ended:].any() and not top.logprobs[1, ended:].any()


def test_there_are_no_more_likely_tokens_than_tokens():
    cache, batch, *rows = arguments()
    vocabulary = MODEL.table.shape[1]
    with pytest.raises(ValueError, match=f"num_top={vocabulary + 1} must be at most {vocabulary}"):
        sample_step(MODEL, cache, batch, *rows, LogprobOptions(num_top=vocabulary + 1))
    assert not cache.lengths.is_deleted()
