"""Attention, compressor and indexer around a handle that records what it is given."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import Batch, KVCache, LayerCacheHandle
from dsv4_jax.checkpoint import keys
from dsv4_jax.config.layer_spec import CSA, HCA, SLIDING, LayerSpec
from dsv4_jax.nn import Attention, DeepseekV4ForCausalLM, StepCarry, parameter_views
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.ops import apply_rope, norm_rope
from tests.nn.reference import f64, rms_norm, rope


POSITIONS = np.array([300, 301, 0, -1], np.int32)
# Chains of float32 sums of at most 384 products, on values of order 1.
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


class RecordingCache(KVCache):
    def __init__(self):
        pass


class RecordingHandle(LayerCacheHandle):
    """Keeps each call's arguments under the method's name; `attend` gives the queries back."""

    def __init__(self):
        none = jnp.full((4,), -1, jnp.int32)
        batch = Batch(none, jnp.asarray(POSITIONS), none, jnp.full((1, 3), -1, jnp.int32), none, prefill=False)
        object.__setattr__(self, "batch", batch)
        object.__setattr__(self, "calls", {})
        object.__setattr__(self, "result", RecordingCache())
        object.__setattr__(self, "chosen", jnp.arange(16, dtype=jnp.int32).reshape(4, 4))

    @property
    def cache(self):
        return self.result

    def by_tiles(self, function, *arrays, candidates=None):
        return function(self, *arrays, candidates)

    def norm_rope_append(self, q, kv, weight, inv_freq, *, eps, norms_queries=True):
        q, self.calls["write_swa"] = norm_rope(q, kv, weight, jnp.maximum(self.batch.positions, 0), inv_freq, eps=eps)
        return q, self

    def flush(self, kv, gate, weights, index=None):
        self.calls["flush"] = (kv, gate, weights), index
        return self

    def indexer_scores(self, q, weights, inv_freq=None, candidates=None):
        self.calls["indexer_scores"] = apply_rope(q, jnp.maximum(self.batch.positions, 0), inv_freq), weights
        return jnp.zeros((4, 9))

    def indexer_topk(self, scores, candidates=None):
        self.calls["indexer_topk"] = scores
        return self.chosen

    def attend(self, q, sinks, indices=None, inv_freq=None):
        self.calls["attend"] = q, sinks, indices
        return apply_rope(q, jnp.maximum(self.batch.positions, 0), inv_freq, inverse=True), self


def run(config, kind, x, dtype=jnp.float32):
    layer = config.layer_types.index(kind)
    attention = Attention(config, layer, param_dtype=dtype, rngs=nnx.Rngs(0))
    handle = RecordingHandle()
    y, carry, cache = attention(jnp.asarray(x, dtype), handle, StepCarry())
    assert cache is handle.result
    assert set(carry.selection) == ({layer} if kind == CSA else set())
    return attention, handle.calls, y, layer


def linear(module, x):
    return f64(x) @ f64(module.weight).T


def product(fused, name, x):
    return f64(x) @ f64(fused.matrix(name)).T


@pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
def test_queries_window_rows_and_output(config, draw, kind):
    x = draw(4, config.hidden_size)
    attention, calls, y, layer = run(config, kind, x)
    heads = config.num_attention_heads
    dim = config.head_dim
    eps = config.rms_norm_eps
    positions = np.maximum(POSITIONS, 0)
    inv_freq = config.inv_freq(layer)

    kv = rms_norm(product(attention.input_projections, "kv_proj", x), eps, f64(attention.kv_norm.weight))
    np.testing.assert_allclose(f64(calls["write_swa"]), rope(kv, positions, inv_freq), **TOLERANCE)

    latent = rms_norm(product(attention.input_projections, "q_a_proj", x), eps, f64(attention.q_a_norm.weight))
    normed = rms_norm(product(attention.latent_projections, "q_b_proj", latent).reshape(4, heads, dim), eps)
    q, sinks, _ = calls["attend"]
    np.testing.assert_allclose(f64(q), rope(normed, positions, inv_freq), **TOLERANCE)
    chex.assert_trees_all_equal(sinks, attention.sinks[...])

    # The handle returned the queries, so that turning back must give the unrotated ones.
    groups = normed.reshape(4, config.o_groups, -1)
    low = f64(attention.o_a_proj.weight)
    rank = config.o_lora_rank
    out = np.concatenate([groups[:, g] @ low[g * rank : (g + 1) * rank].T for g in range(config.o_groups)], axis=1)
    np.testing.assert_allclose(f64(y), linear(attention.o_b_proj, out), **TOLERANCE)


def test_layers_use_their_own_rope_table(config):
    tables = {kind: config.inv_freq(config.layer_types.index(kind)) for kind in (SLIDING, CSA, HCA)}
    assert (tables[CSA] == tables[HCA]).all() and not np.allclose(tables[CSA], tables[SLIDING])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (SLIDING, ["write_swa", "attend"]),
        (HCA, ["write_swa", "flush", "attend"]),
        (CSA, ["write_swa", "flush", "indexer_scores", "indexer_topk", "attend"]),
    ],
)
def test_order_of_calls(config, draw, kind, expected):
    _, calls, _, _ = run(config, kind, draw(4, config.hidden_size))
    assert list(calls) == expected
    indices = calls["attend"][2]
    assert (indices is None) == (kind != CSA)
    if kind == CSA:
        chex.assert_trees_all_equal(indices, np.arange(16).reshape(4, 4))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [CSA, HCA])
def test_compressor_projects_in_float32(config, draw, kind, dtype):
    x = np.asarray(jnp.asarray(draw(4, config.hidden_size), dtype), np.float32)
    attention, calls, _, layer = run(config, kind, x, dtype)
    main, index = calls["flush"]
    assert (index is None) == (kind == HCA)
    compressor = attention.compressor
    cases = [("compressor", compressor, main)] + ([("indexer", compressor.indexer, index)] if index else [])
    for name, module, (kv, gate, weights) in cases:
        assert kv.dtype == gate.dtype == jnp.float32
        np.testing.assert_allclose(f64(kv), product(attention.input_projections, f"{name}_kv_proj", x), **TOLERANCE)
        np.testing.assert_allclose(f64(gate), product(attention.input_projections, f"{name}_gate_proj", x), **TOLERANCE)
        chex.assert_trees_all_equal(weights.position_bias, module.position_bias[...])
        chex.assert_trees_all_equal(weights.norm_weight, module.kv_norm.weight[...])
        chex.assert_trees_all_equal(weights.inv_freq, config.inv_freq(layer))
        assert weights.eps == config.rms_norm_eps


def test_indexer_queries_and_head_weights(config, draw):
    x = draw(4, config.hidden_size)
    attention, calls, _, layer = run(config, CSA, x)
    heads = config.index_n_heads
    dim = config.index_head_dim
    latent = rms_norm(
        product(attention.input_projections, "q_a_proj", x), config.rms_norm_eps, f64(attention.q_a_norm.weight)
    )
    q = product(attention.latent_projections, "indexer_q_b_proj", latent).reshape(4, heads, dim)
    got_q, got_weights = calls["indexer_scores"]
    np.testing.assert_allclose(f64(got_q), rope(q, np.maximum(POSITIONS, 0), config.inv_freq(layer)), **TOLERANCE)
    weights = product(attention.input_projections, "indexer_weights_proj", x) / np.sqrt(dim * heads)
    np.testing.assert_allclose(f64(got_weights), weights, **TOLERANCE)


def test_bf16_rounding_points(config, draw):
    wide = dataclasses.replace(config, index_n_heads=24)  # a scale that is no power of two
    attention, calls, y, _ = run(wide, CSA, draw(4, config.hidden_size), jnp.bfloat16)
    q, weights = calls["indexer_scores"]
    assert [v.dtype for v in (y, q, calls["write_swa"], calls["attend"][0])] == [jnp.bfloat16] * 4
    assert weights.dtype == jnp.float32
    chex.assert_trees_all_equal(weights, weights.astype(jnp.bfloat16).astype(jnp.float32))
    chex.assert_tree_all_finite(y)


# Layers that DeepSeek-V4 does not have: they share the first one's entries, its keys, or a selection.
SHARED = dict(compress_rate=2, overlap=True, group="shared", keys=True, key_compressor=True)
SPECS = (
    LayerSpec(0, **SHARED, owner=True, selection=0),
    LayerSpec(1, **SHARED, selection=1),
    LayerSpec(2, **SHARED, selection=1),
    LayerSpec(3, **SHARED),
    LayerSpec(4, **SHARED | dict(index=1), owner=True, selection=1),
)
WRITES = ["write_swa", "flush"]
SCORES = ["indexer_scores", "indexer_topk"]
CALLS = (WRITES + SCORES, ["write_swa", *SCORES], ["write_swa"], ["write_swa"], WRITES)


@pytest.fixture(scope="module")
def sharing(config):
    return config.with_layers(SPECS)


def test_layers_that_share_entries_keys_and_selections(sharing, draw):
    carry = StepCarry()
    x = jnp.asarray(draw(4, sharing.hidden_size))
    for spec, expected in zip(SPECS, CALLS, strict=True):
        attention = Attention(sharing, spec.layer, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
        assert (attention.compressor is not None) == spec.owner
        handle = RecordingHandle()
        # Numbers of their own, to tell whose selection a later layer gets.
        object.__setattr__(handle, "chosen", jnp.full((4, 4), spec.layer, jnp.int32))
        _, carry, _ = attention(x, handle, carry)
        assert list(handle.calls) == [*expected, "attend"]
        indices = handle.calls["attend"][2]
        if spec.selection is None:
            assert indices is None
        else:
            chex.assert_trees_all_equal(indices, jnp.full((4, 4), spec.selection))
        if "flush" in handle.calls:
            (kv, *_), (index_kv, *_) = handle.calls["flush"]
            assert kv.shape == (4, 2 * sharing.head_dim) and index_kv.shape == (4, 2 * sharing.index_head_dim)
    assert set(carry.selection) == {0, 1}


def test_the_table_of_keys_knows_shared_layers(sharing):
    model = DeepseekV4ForCausalLM(sharing, rngs=ABSTRACT)
    shapes = {path: view.shape for path, view in parameter_views(model).items()}
    table = {weight.path: weight for weight in keys.weights(sharing, "release")}
    assert {path: weight.shape for path, weight in table.items()} == shapes
    for layer in (0, 1):
        path = f"model.layers.{layer}.self_attn.latent_projections.weights.indexer_q_b_proj"
        assert table[path].sources == (f"layers.{layer}.attn.indexer.wq_b.weight",)
