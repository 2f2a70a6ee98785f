"""Routers and experts against naive float64 loops."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax import ops
from dsv4_jax.nn import MLP, Experts, MoE, Router
from tests.nn.reference import expert, f64


# Sums of at most 64 float32 products of order 1, through two matrices.
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


def spread(module, factor=20.0):
    """Enlarges all float weights of a module, so that no step is nearly linear."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            variable[...] = variable[...] * factor
    return module


def scores(router, x):
    return np.sqrt(np.log1p(np.exp(f64(router.weight) @ f64(x))))


def normalized(chosen, config):
    return config.routed_scaling_factor * chosen / (chosen.sum() + 1e-20)


def test_top_k_router(config, draw):
    router = spread(Router(config, config.mlp_layer_types.index("moe"), rngs=nnx.Rngs(0)))
    x = draw(30, config.hidden_size)
    experts, weights, _ = router(jnp.asarray(x), jnp.zeros(30, jnp.int32))
    assert (experts.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    for t in range(30):
        want = scores(router, x[t])
        best = np.argsort(-(want + f64(router.e_score_correction_bias)), kind="stable")[: config.num_experts_per_tok]
        chex.assert_trees_all_equal(experts[t], best)
        np.testing.assert_allclose(weights[t], normalized(want[best], config), **TOLERANCE)


def test_bias_moves_the_selection_and_never_a_weight(config, draw):
    router = Router(config, config.mlp_layer_types.index("moe"), rngs=nnx.Rngs(0))
    x = jnp.asarray(draw(30, config.hidden_size))
    ids = jnp.zeros(30, jnp.int32)
    before, plain_weights, _ = router(x, ids)
    router.e_score_correction_bias[...] = router.e_score_correction_bias[...] + 3.0
    chex.assert_trees_all_equal(router(x, ids)[1], plain_weights)
    router.e_score_correction_bias[...] = router.e_score_correction_bias[...].at[5].add(100.0)
    experts, weights, _ = router(x, ids)
    assert (experts[:, 0] == 5).all() and not (before == 5).any(axis=1).all()
    for t in range(30):
        chosen = scores(router, x[t])[np.asarray(experts[t])]
        np.testing.assert_allclose(weights[t], normalized(chosen, config), **TOLERANCE)


def test_hash_router_looks_experts_up_and_scores_them(config, draw):
    router = Router(config, config.mlp_layer_types.index("hash_moe"), rngs=nnx.Rngs(0))
    ids = np.array([0, 159, 7, 7, -1], np.int32)
    x = draw(5, config.hidden_size)
    experts, weights, _ = router(jnp.asarray(x), jnp.asarray(ids))
    table = np.asarray(router.tid2eid[...])
    assert table.dtype == np.int32 and len({tuple(row) for row in table}) > 1
    assert all(len(set(row)) == config.num_experts_per_tok for row in table)
    for t in range(4):
        chex.assert_trees_all_equal(experts[t], table[ids[t]])
        np.testing.assert_allclose(weights[t], normalized(scores(router, x[t])[table[ids[t]]], config), **TOLERANCE)
    assert ((experts[4] >= 0) & (experts[4] < config.n_routed_experts)).all()


@pytest.mark.parametrize("kind", ["moe", "hash_moe"])
def test_parts_of_images_have_their_own_bias(config, draw, kind):
    """It selects experts by score in hash layers, too, and enters no weight. Text is routed as without images."""
    layer = config.mlp_layer_types.index(kind)
    router = spread(Router(dataclasses.replace(config, image_token_id=3), layer, rngs=nnx.Rngs(0)))
    x = draw(30, config.hidden_size)
    ids = jnp.arange(30, dtype=jnp.int32)
    is_image = np.arange(30) % 3 == 1
    slots = jnp.where(ids == 4, -1, 0)  # a part of an image can be padding, too
    text = router(jnp.asarray(x), ids, slots)
    routing = router(jnp.asarray(x), ids, slots, jnp.asarray(is_image))
    chex.assert_trees_all_equal(routing.experts[~is_image], text.experts[~is_image])
    chex.assert_trees_all_equal(routing.weights[~is_image], text.weights[~is_image])
    assert (routing.experts[4] == -1).all() and (routing.weights[4] == 0).all()
    for t in np.flatnonzero(is_image & (np.arange(30) != 4)):
        want = scores(router, x[t])
        best = np.argsort(-(want + f64(router.image_correction_bias)), kind="stable")[: config.num_experts_per_tok]
        chex.assert_trees_all_equal(routing.experts[t], best)
        np.testing.assert_allclose(routing.weights[t], normalized(want[best], config), **TOLERANCE)
    assert (routing.experts[is_image] != text.experts[is_image]).any()


def test_images_need_a_model_that_knows_them(config, draw):
    router = Router(config, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="is_image, but the model's configuration has no image_token_id"):
        router(jnp.asarray(draw(2, config.hidden_size)), jnp.zeros(2, jnp.int32), None, jnp.ones(2, bool))


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("limit", [10.0, 0.5])
def test_moe_block(config, draw, tokens, limit):
    layer = config.mlp_layer_types.index("moe")
    moe = MoE(dataclasses.replace(config, swiglu_limit=limit), layer, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    moe.experts = spread(moe.experts, 10.0)
    moe.shared_experts = spread(moe.shared_experts, 10.0)
    x = draw(tokens, config.hidden_size)
    routing = moe.gate(jnp.asarray(x), jnp.zeros(tokens, jnp.int32))
    y = jax.jit(lambda moe, *args: moe(*args))(moe, jnp.asarray(x), routing)
    experts, weights, _ = routing
    gate_up = f64(moe.experts.gate_up_proj)
    down = f64(moe.experts.down_proj)
    shared = moe.shared_experts
    gate_up_shared = [f64(shared.gate_up_proj.matrix(name)) for name in ("gate_proj", "up_proj")]
    reached = False
    for t in range(tokens):
        want = expert(f64(x[t]), *gate_up_shared, f64(shared.down_proj.weight), limit)
        for e, w in zip(experts[t], weights[t], strict=True):
            reached |= np.abs(gate_up[e] @ x[t]).max() > limit
            want = want + float(w) * expert(f64(x[t]), *gate_up[e], down[e], limit)
        chex.assert_trees_all_close(f64(y[t]), want, rtol=2e-5, atol=1e-4)
    assert reached == (limit == 0.5)


def test_swiglu_limit_clamps_gate_above_and_up_on_both_sides(config):
    mlp = MLP(dataclasses.replace(config, hidden_size=1, swiglu_limit=2.0), param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    (weight,) = mlp.gate_up_proj.weights.values()
    inner = weight.shape[1]
    mlp.down_proj.weight[...] = jnp.ones((1, inner))
    cases = {(9.0, 1.0): (2.0, 1.0), (-9.0, 1.0): (-9.0, 1.0), (1.0, 9.0): (1.0, 2.0), (1.0, -9.0): (1.0, -2.0)}
    for (gate, up), (gate_kept, up_kept) in cases.items():
        weight[...] = jnp.stack([jnp.full((inner, 1), gate), jnp.full((inner, 1), up)])
        expected = inner * up_kept * gate_kept / (1 + np.exp(-gate_kept))
        chex.assert_trees_all_close(mlp(jnp.ones((1, 1)))[0, 0], expected, rtol=1e-5)


def test_a_bad_token_does_not_reach_others(config, draw):
    experts = Experts(config, 0, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(draw(6, config.hidden_size), jnp.bfloat16)
    chosen = jnp.asarray(np.random.default_rng(2).integers(0, config.n_routed_experts, (6, 2)), jnp.int32)
    routing = ops.Routing(chosen, jnp.full((6, 2), 0.5))
    clean = experts(x, routing)
    dirty = experts(x.at[2].set(jnp.nan), routing)
    assert clean.dtype == jnp.float32
    others = np.array([0, 1, 3, 4, 5])
    chex.assert_trees_all_equal(np.asarray(dirty)[others], np.asarray(clean)[others])
    assert np.isnan(np.asarray(dirty, np.float32)[2]).all()
