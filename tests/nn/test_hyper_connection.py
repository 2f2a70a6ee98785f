"""mHC against naive float64 loops."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.nn import HyperConnection, HyperHead, ResidualStreams, RMSNorm, apply_post, sinkhorn
from dsv4_jax.ops.hyper_connections import apply_pre, mixing_weights, split_mixing
from tests.nn.reference import f64, rms_norm, sigmoid


@pytest.fixture
def small(config):
    return dataclasses.replace(config, hidden_size=24, hc_mult=3, hc_sinkhorn_iters=5, hc_eps=1e-3)


def connection(config, std=0.4):
    """Weights large enough that every mixing weight depends on the token."""
    hc = HyperConnection(config, rngs=nnx.Rngs(0))
    hc.fn[...] = hc.fn[...] * (std / 0.02)
    return hc


def collapse(hc, streams):
    """(collapsed, post, comb) of all tokens' streams."""
    mixing = mixing_weights(streams, hc._weights())
    return apply_pre(streams, mixing), *split_mixing(mixing, streams.shape[1])


def reference(hc, streams, config):
    """(collapsed, post, comb) of one token's [h, hidden] streams."""
    h = config.hc_mult
    eps = config.hc_eps
    logits = f64(hc.fn) @ rms_norm(streams.reshape(-1), config.rms_norm_eps)
    base = f64(hc.base)
    scale = f64(hc.scale)
    pre = [sigmoid(logits[j] * scale[0] + base[j]) + eps for j in range(h)]
    post = [2 * sigmoid(logits[h + j] * scale[1] + base[h + j]) for j in range(h)]
    comb = np.zeros((h, h))
    for j in range(h):
        row = np.array([logits[2 * h + h * j + k] * scale[2] + base[2 * h + h * j + k] for k in range(h)])
        comb[j] = np.exp(row) / np.exp(row).sum() + eps
    comb /= comb.sum(0)[None, :] + eps
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb /= comb.sum(1)[:, None] + eps
        comb /= comb.sum(0)[None, :] + eps
    return sum(pre[j] * streams[j] for j in range(h)), np.array(post), comb


# Fifty float32 operations a value at most, on values of order 1.
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def test_collapse_and_weights(small, draw):
    hc = connection(small)
    streams = draw(5, 3, 24)
    collapsed, post, comb = collapse(hc, jnp.asarray(streams))
    for t in range(5):
        expected = reference(hc, f64(streams[t]), small)
        for actual, want in zip((collapsed[t], post[t], comb[t]), expected, strict=True):
            np.testing.assert_allclose(f64(actual), want, **TOLERANCE)


def test_expansion_mixes_over_combs_first_axis(small, draw):
    streams = draw(4, 3, 24)
    y = draw(4, 24)
    post = draw(4, 3)
    comb = draw(4, 3, 3)
    new = apply_post(*map(jnp.asarray, (streams, y, post, comb)))
    for t in range(4):
        for k in range(3):
            expected = post[t, k] * f64(y[t]) + sum(comb[t, j, k] * f64(streams[t, j]) for j in range(3))
            np.testing.assert_allclose(f64(new[t, k]), expected, **TOLERANCE)


def test_head(small, draw):
    head = HyperHead(small, rngs=nnx.Rngs(0))
    streams = draw(5, 3, 24)
    head.hc_fn[...] = head.hc_fn[...] * 20.0
    out = head(jnp.asarray(streams))
    for t in range(5):
        logits = f64(head.hc_fn) @ rms_norm(f64(streams[t]).reshape(-1), small.rms_norm_eps)
        pre = sigmoid(logits * f64(head.hc_scale)[0] + f64(head.hc_base)) + small.hc_eps
        np.testing.assert_allclose(f64(out[t]), sum(pre[j] * f64(streams[t, j]) for j in range(3)), **TOLERANCE)


def test_comb_is_doubly_stochastic_but_not_symmetric(config, draw):
    # Logits of about one unit: with wilder ones 20 iterations are not enough for the rows.
    hc = connection(config, std=0.06)
    _, _, comb = collapse(hc, jnp.asarray(draw(50, config.hc_mult, config.hidden_size)))
    # The last division is by column sums; hc_eps = 1e-6 is what they may miss 1 by.
    chex.assert_trees_all_close(f64(comb).sum(1), 1, rtol=1e-7, atol=1e-5)
    chex.assert_trees_all_close(f64(comb).sum(2), 1, rtol=1e-7, atol=1e-3)
    assert np.abs(f64(comb) - f64(comb).swapaxes(1, 2)).max() > 0.1


def test_joined_borders_are_the_separate_steps(small, draw):
    """A block's output and the next block's input in one call, and the head after the last."""
    first = connection(small)
    second = connection(small, std=0.3)
    head = HyperHead(small, rngs=nnx.Rngs(1))
    norms = [RMSNorm(24, eps=small.rms_norm_eps, rngs=nnx.Rngs(i)) for i in range(3)]
    streams = jnp.asarray(draw(4, 3, 24))
    y, z = jnp.asarray(draw(2, 4, 24))
    x, residual = first.pre(ResidualStreams(streams), norms[0])
    between, residual = second.pre(residual.post(y), norms[1])
    out, left = head.pre(residual.post(z), norms[2])
    merged = residual.post(z).merged()

    collapsed, post, comb = collapse(first, streams)
    np.testing.assert_allclose(x, norms[0](collapsed), **TOLERANCE)
    streams = apply_post(streams, y, post, comb)
    collapsed, post, comb = collapse(second, streams)
    np.testing.assert_allclose(between, norms[1](collapsed), **TOLERANCE)
    streams = apply_post(streams, z, post, comb)
    np.testing.assert_allclose(out, norms[2](head(streams)), **TOLERANCE)
    for mine in (left, merged):
        np.testing.assert_allclose(mine, streams, **TOLERANCE)


def test_sinkhorn_with_one_iteration_divides_by_columns_only(draw):
    comb = np.exp(draw(2, 3, 3))
    expected = comb / comb.sum(1, keepdims=True)
    chex.assert_trees_all_close(np.asarray(sinkhorn(jnp.asarray(comb), 1, 0.0)), expected, rtol=1e-6)


def test_bf16_streams_are_rounded_once(config, draw):
    hc = connection(config)
    shape = (5, config.hc_mult, config.hidden_size)
    streams = jnp.asarray(draw(*shape), jnp.bfloat16)
    y = jnp.asarray(draw(5, config.hidden_size), jnp.bfloat16)
    low, exact = (collapse(hc, x) for x in (streams, streams.astype(jnp.float32)))
    assert [x.dtype for x in low] == [jnp.bfloat16, jnp.float32, jnp.float32]
    chex.assert_trees_all_equal(np.asarray(low[0]), np.asarray(exact[0].astype(jnp.bfloat16)))
    chex.assert_trees_all_equal(np.asarray(low[2]), np.asarray(exact[2]))
    new = apply_post(streams, y, *low[1:])
    assert new.dtype == jnp.bfloat16
    exact_new = apply_post(streams.astype(jnp.float32), y.astype(jnp.float32), *low[1:])
    chex.assert_trees_all_equal(np.asarray(new), np.asarray(exact_new.astype(jnp.bfloat16)))
