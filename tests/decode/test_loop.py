"""stream, generate and the on-device loop: the same tokens by every road."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import Decisions
from dsv4_jax.decode import SamplingParams, decode_loop, decode_step, last_token_indices, sample_step
from dsv4_jax.engine import generate, stream
from dsv4_jax.host import CacheFullError
from tests.decode.conftest import EVERY_MODEL


# Chunks of 3, the shortest of the longer prompts: one size of prefill steps for all, so one program to compile.
PROMPTS = [[5, 9, 100], list(range(20, 60)), [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [150] * 5]
WARM = SamplingParams(temperature=1.0, top_k=50)


def collect(pairs, count):
    tokens = [[] for _ in range(count)]
    for i, token in pairs:
        tokens[i].append(token)
    return tokens


def test_a_stream_needs_two_programs(model, manager):
    """Whatever prompts, slots and lengths meet: one program for decode steps and one for all others."""
    sample_step.clear_cache()
    list(stream(model, manager, PROMPTS, max_new_tokens=6, sampling=WARM, seed=3, chunk=3))
    assert sample_step._cache_size() == 2


def test_requests_wait_for_slots_and_every_road_gives_the_same_tokens(model, manager):
    """Five prompts over three slots; one by one; and all on the device: the company changes nothing."""
    together = collect(stream(model, manager, PROMPTS, max_new_tokens=6, sampling=WARM, seed=3, chunk=3), 5)
    assert [len(t) for t in together] == [6] * 5
    assert manager.free_slots == 3 and manager.free_blocks == 12
    for i in (0, 1, 4):
        alone = [
            t for _, t in stream(model, manager, [PROMPTS[i]], max_new_tokens=6, sampling=WARM, seed=3 + i, chunk=3)
        ]
        assert alone == together[i]
    on_device = generate(model, manager, PROMPTS[:3], max_new_tokens=6, sampling=WARM, seed=3, chunk=3)
    assert on_device == together[:3]
    assert manager.free_slots == 3 and manager.free_blocks == 12


@pytest.mark.slow
def test_stop_tokens_end_a_request_and_are_returned(model, manager):
    free = generate(model, manager, PROMPTS[:2], max_new_tokens=6, sampling=WARM, seed=3, chunk=3)
    stop = free[0][2]
    expected = [t[: t.index(stop) + 1] if stop in t else t for t in free]
    sizes = dict(max_new_tokens=6, sampling=WARM, seed=3, chunk=3, stop_tokens=(stop,))
    assert collect(stream(model, manager, PROMPTS[:2], **sizes), 2) == expected
    assert generate(model, manager, PROMPTS[:2], **sizes) == expected


@pytest.mark.slow
def test_the_device_loop_crosses_blocks_as_single_steps_do(model, manager):
    slot = manager.admit(num_tokens=90)
    cache = manager.init_cache()
    batch = manager.prepare_forward({slot: [3]}, reserve=39)
    seeds = jnp.zeros((3,), jnp.uint32)
    output, cache = decode_loop(model, cache, batch, seeds, steps=40)
    tokens = output.tokens
    manager.advance(slot, 39)
    logits, _ = decode_step(model, cache, manager.prepare_forward({slot: [int(tokens[slot, -1])]}))
    manager.release(slot)

    slot = manager.admit(num_tokens=90)
    cache = manager.init_cache()
    token = 3
    for i in range(40):
        step_logits, cache = decode_step(model, cache, manager.prepare_forward({slot: [token]}))
        token = int(np.argmax(step_logits[slot]))
        assert token == int(tokens[slot, i])
    again, _ = decode_step(model, cache, manager.prepare_forward({slot: [token]}))
    chex.assert_trees_all_equal(again, logits)


def test_a_stream_that_is_left_early_frees_its_slots(model, manager):
    tokens = stream(model, manager, PROMPTS, max_new_tokens=6, chunk=3)
    next(tokens)
    assert manager.free_slots == 0
    tokens.close()
    assert manager.free_slots == 3 and manager.free_blocks == 12


def test_an_oversized_request_waits_for_blocks(model, manager):
    """Twelve blocks: three requests of five blocks each, of which the third waits although a slot is free."""
    prompts = [list(range(70)), list(range(70, 140)), list(range(70))]
    order = [i for i, _ in stream(model, manager, prompts, max_new_tokens=3, sampling=WARM, chunk=3)]
    assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert order.index(2) > order.index(0) + 2


@pytest.mark.parametrize(
    ("prompts", "change", "error", "message"),
    [
        ([], {}, ValueError, "prompts is empty"),
        ([[]], {}, ValueError, "is empty"),
        ([[1, 160]], {}, ValueError, "160 is outside the vocabulary: ids go from 0 to 159"),
        ([[-1]], {}, ValueError, "outside the vocabulary"),
        ([[1] * 92], {}, ValueError, "need room for 97 tokens, max_context=96"),
        ([[1]], dict(max_new_tokens=0), ValueError, "max_new_tokens=0 must be at least 1"),
        ([[1]], dict(chunk=-4), ValueError, "chunk=-4 must be at least 1"),
    ],
)
@pytest.mark.parametrize("how", [stream, generate])
def test_bad_requests_are_refused_before_anything_runs(model, manager, how, prompts, change, error, message):
    with jax.log_compiles(False), pytest.raises(error, match=message):
        list(how(model, manager, prompts, **(dict(max_new_tokens=6) | change)))
    assert manager.free_slots == 3 and manager.free_blocks == 12


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["In the beginning"], TypeError, "prompt='In the beginning' is text: encode it first"),
        ("In the beginning", TypeError, "must be a list of prompts, each a list of token ids"),
        ([1, 2, 3], TypeError, r"prompts=\[1, 2, 3\] must be a list of prompts, .*, such as \[\[1, 2, 3\]\]"),
        ([[1, [2, 3]]], ValueError, "prompt holds lists of several lengths: give the ids of one request"),
    ],
)
def test_prompts_of_another_kind_are_explained(model, manager, prompts, error, message):
    with pytest.raises(error, match=message):
        generate(model, manager, prompts, max_new_tokens=6)
    assert manager.free_slots == 3


def test_generate_says_when_prompts_do_not_fit_at_once(model, manager):
    with pytest.raises(CacheFullError, match="5 prompts do not fit at once \\(3 do\\); use stream"):
        generate(model, manager, PROMPTS, max_new_tokens=6)
    assert manager.free_slots == 3 and manager.free_blocks == 12


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_last_tokens_are_found_in_every_slot(manager, slot):
    """Beside padding, whose slot -1 is no slot, above all not the last."""
    for _ in range(slot + 1):
        manager.admit()
    batch = manager.prepare_forward({slot: [5, 6, 7, 8, 9]})
    assert batch.slots.tolist() == [slot] * 5 + [-1] * 3
    assert last_token_indices(batch, 3).tolist() == [4 if i == slot else -1 for i in range(3)]


def test_the_loop_refuses_what_it_would_drop(model, manager):
    batch = manager.prepare_forward({manager.admit(): [1]})
    cache = manager.init_cache()
    seeds = jnp.zeros((manager.schema.max_requests,), jnp.uint32)
    images = jnp.ones(batch.positions.shape, bool)
    for fields in ({"is_image": images}, {"decisions": Decisions()}):
        with pytest.raises(ValueError, match=f"batch.{[*fields][0]} must be None"):
            decode_loop(model, cache, dataclasses.replace(batch, **fields), seeds, steps=1)
    with pytest.raises(ValueError, match="the batch is a prefill: run it with sample_step"):
        decode_loop(model, cache, dataclasses.replace(batch, prefill=True), seeds, steps=1)
    decode_loop(model, cache, batch, seeds, steps=1)  # the cache was not donated


@EVERY_MODEL
def test_no_type_depends_on_64_bits(model, manager):
    batch = manager.prepare_forward({manager.admit(): [1]})
    arguments = model, manager.abstract_cache(), batch, np.zeros(manager.schema.max_requests, np.uint32)
    options = dict(steps=2, top_logprobs=1)
    with jax.enable_x64(True):
        types = decode_loop.eval_shape(*arguments, **options)
    assert types == decode_loop.eval_shape(*arguments, **options)
