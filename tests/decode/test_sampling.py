"""Sampling: what may be drawn, how often, and that company does not matter."""

import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.decode import BatchedSamplingParams, SamplingParams, sample
from dsv4_jax.decode.sampling import LogprobOptions, top_logprobs


draw = jax.jit(sample, static_argnums=1)
LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def many(sampling, n=4000):
    logits = jnp.asarray(np.tile(LOGITS, (n, 1)))
    return np.asarray(draw(logits, sampling, jnp.arange(n, dtype=jnp.uint32), jnp.full((n,), 3, jnp.int32)))


def frequencies(sampling):
    return np.bincount(many(sampling), minlength=4) / 4000


def test_temperature_one_draws_the_distribution():
    # Four standard deviations of a frequency over 4000 draws.
    chex.assert_trees_all_close(
        frequencies(SamplingParams(1.0)), np.array([0.5, 0.3, 0.15, 0.05]), rtol=1e-7, atol=4 * (0.25 / 4000) ** 0.5
    )


def test_a_low_temperature_sharpens():
    expected = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    chex.assert_trees_all_close(
        frequencies(SamplingParams(0.5)), expected / expected.sum(), rtol=1e-7, atol=4 * (0.25 / 4000) ** 0.5
    )


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (SamplingParams(1.0, top_k=2), {0, 1}),
        (SamplingParams(1.0, top_k=99), {0, 1, 2, 3}),
        (SamplingParams(1.0, top_p=0.5), {0}),
        (SamplingParams(1.0, top_p=0.51), {0, 1}),
        (SamplingParams(1.0, top_p=0.9), {0, 1, 2}),
        (SamplingParams(1.0, top_p=1e-6), {0}),
        (SamplingParams(1.0, top_k=3, top_p=0.6), {0, 1}),
        (SamplingParams(0.0), {0}),
    ],
)
def test_only_allowed_tokens_are_drawn_and_all_of_them(sampling, allowed):
    assert set(many(sampling).tolist()) == allowed


def test_greedy_takes_the_lowest_id_among_equals():
    logits = jnp.asarray([[1.0, 3.0, 3.0, 0.0]])
    assert draw(logits, SamplingParams(), jnp.zeros((1,), jnp.uint32), jnp.zeros((1,), jnp.int32)).tolist() == [1]


def test_a_row_depends_on_its_own_seed_and_position_only():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((8, 50)), jnp.float32)
    seeds = jnp.arange(8, dtype=jnp.uint32)
    positions = jnp.arange(10, 18, dtype=jnp.int32)
    together = draw(logits, SamplingParams(1.0), seeds, positions)
    for i in range(8):
        assert draw(logits[i : i + 1], SamplingParams(1.0), seeds[i : i + 1], positions[i : i + 1])[0] == together[i]
    assert (draw(logits, SamplingParams(1.0), seeds, positions + 1) != together).any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(temperature=-0.1), ValueError, "temperature=-0.1 must be 0"),
        (dict(temperature=float("nan")), ValueError, "temperature=nan"),
        (dict(temperature=float("inf")), ValueError, "temperature=inf"),
        (dict(temperature=1e-40), ValueError, "temperature=1e-40 must be 0 .* or positive, from 1e-5 to 1e5"),
        (dict(temperature=10**400), ValueError, "temperature=inf"),
        (dict(temperature="0.8"), TypeError, "temperature='0.8' must be a number"),
        (dict(temperature=True), TypeError, "temperature=True must be a number"),
        (dict(top_k=-1), ValueError, "top_k=-1 must be at least 0"),
        (dict(top_k=2**31), ValueError, "top_k=2147483648 must be at most 2147483647"),
        (dict(top_k=2.5), TypeError, "top_k=2.5 must be a whole number"),
        (dict(top_k=None), TypeError, "top_k=None must be a whole number"),
        (dict(top_p=0.0), ValueError, r"top_p=0.0 must be in \(0, 1\]"),
        (dict(top_p=1e-50), ValueError, r"top_p=1e-50 must be in \(0, 1\]"),
        (dict(top_p=1.5), ValueError, "top_p=1.5"),
        (dict(top_p=float("nan")), ValueError, "top_p=nan"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_bad_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**arguments)


@pytest.mark.usefixtures("untyped")
def test_numbers_of_any_kind_are_one_setting():
    """One setting is one compiled program."""
    assert hash(SamplingParams(np.float32(0.5), np.int64(3), 1)) == hash(SamplingParams(0.5, jnp.int32(3), 1.0))


def test_branches_sort_nothing():
    """XLA's sort for GPUs cannot be a part of a CUDA graph, so the host would wait for each step at such a branch."""
    shape = jax.ShapeDtypeStruct((2, 64), jnp.float32)
    params = BatchedSamplingParams.of([SamplingParams(1.0, top_k=3, top_p=0.6), SamplingParams()])
    ids = np.zeros(2, np.int32)
    drawn = jax.jit(sample).lower(shape, params, ids.astype(np.uint32), ids).as_text()
    options = LogprobOptions(wants_top=np.bool_(True), num_top=3)
    found = jax.jit(top_logprobs).lower(shape, shape.update(shape=(2,)), options).as_text()
    for program in (drawn, found):
        assert "stablehlo.case" in program
        assert "stablehlo.sort" not in program and "chlo.top_k" not in program
    assert "stablehlo.while" not in found


@pytest.mark.gpu
def test_a_call_returns_before_the_device_is_done():
    matrix = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    params = jax.device_put(BatchedSamplingParams.of([SamplingParams()] * 8))
    ids = jnp.zeros(8, jnp.int32)

    @jax.jit
    def step(matrix):
        for _ in range(50):
            matrix = jnp.tanh(matrix @ matrix)
        logits = matrix[:8].astype(jnp.float32)
        options = LogprobOptions(wants_top=jnp.all(logits > 2), num_top=5)
        return sample(logits, params, ids.astype(jnp.uint32), ids), top_logprobs(logits, logits[:, 0], options)

    jax.block_until_ready(step(matrix))
    begin = time.perf_counter()
    results = step(matrix)
    call = time.perf_counter() - begin
    jax.block_until_ready(results)
    assert call < 0.5 * (time.perf_counter() - begin)
