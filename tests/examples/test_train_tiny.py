"""Training through the dense stand-in: it is the paged cache's model, it learns, and ships what it trained."""

import dataclasses
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_cache import DenseCache, whole_sequences
from draft_training import draft_losses
from flax import nnx
from tiny_model import (
    TINY,
    TINY_WINDOW_ONLY,
    TOY,
    TOY_WINDOW_ONLY,
    apart,
    as_stored,
    assemble,
    first_weights,
    for_training,
    named_tensors,
)
from train_tiny import TrainTiny
from training import Recipe, evaluate, train_step

from dsv4_jax import DeepseekV4ForCausalLM, DSV4Config, KVCacheManager, load_checkpoint
from dsv4_jax.checkpoint import save_release
from dsv4_jax.config import LayerSpec
from dsv4_jax.decode.drafts import one_token_batch
from dsv4_jax.decode.step import forward


# Differences are rounding alone: the two paths sum in different orders.
CLOSE = dict(rtol=0, atol=1e-4)
LENGTH = 64


@pytest.fixture(scope="module")
def toy():
    trained, fixed = first_weights(TOY, 0)
    return assemble(TOY, trained | fixed, jnp.float32)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, TOY.vocab_size, (2, LENGTH), dtype=np.int32)


@jax.jit
def dense_logits(model, cache, ids):
    hidden, cache = for_training(model)(cache, whole_sequences(ids))
    return model.logits(hidden).reshape(*ids.shape, -1), cache


def paged_logits(model, ids, size):
    manager = KVCacheManager(
        model.config, num_blocks=2, max_requests=2, max_context=128, kv_format="plain", dtype=jnp.float32
    )
    slots = [manager.admit(row) for row in ids]
    cache = manager.init_cache()
    parts = []
    for at in range(0, ids.shape[1], size):
        batch = manager.prepare_forward({slot: row[at : at + size] for slot, row in zip(slots, ids, strict=True)})
        logits, cache = forward(model, cache, batch)
        parts.append(np.asarray(logits)[: 2 * size].reshape(2, size, -1))
    return np.concatenate(parts, axis=1)


@pytest.mark.slow
def test_the_dense_path_has_the_paged_caches_logits(toy, ids):
    cache = DenseCache.make(TOY, *ids.shape, kv_format="plain", dtype=jnp.float32)
    cache = dataclasses.replace(cache, select=jnp.bool_(True))
    dense, after = dense_logits(toy, cache, ids)
    np.testing.assert_allclose(dense, paged_logits(toy, ids, size=32), **CLOSE)
    chex.assert_trees_all_close(np.sum(after.expert_load, axis=1), 1, rtol=1e-6)
    assert after.index_loss > 0

    everything = dataclasses.replace(cache, select=jnp.bool_(False))
    others, _ = dense_logits(toy, everything, ids)
    seen = TOY.index_topk * 4 + 3  # the next entry is one more than an indexer selects
    np.testing.assert_allclose(dense[:, :seen], others[:, :seen], **CLOSE)
    assert np.abs(dense - others).max() > 0.01, "no selection took place"


@pytest.mark.slow
def test_equal_layers_in_a_loop_have_the_paged_caches_logits(ids):
    specs = [LayerSpec.csa(), LayerSpec.hca(16)] * 2
    config = dataclasses.replace(TOY, specs=tuple(specs), mlp_layer_types=("moe",) * 4)
    trained, fixed = first_weights(config, 0)
    model = assemble(config, trained | fixed, jnp.float32)
    assert [loop.run.repeats for loop in model.model.layers.loops] == [2]
    chex.assert_trees_all_equal(named_tensors(model), trained | fixed)
    cache = DenseCache.make(config, *ids.shape, kv_format="plain", dtype=jnp.float32)
    cache = dataclasses.replace(cache, key=jax.random.key(0))  # nothing is dropped
    dense, after = dense_logits(model, cache, ids)
    np.testing.assert_allclose(dense, paged_logits(model, ids, size=32), **CLOSE)
    chex.assert_trees_all_close(np.sum(after.expert_load, axis=1), np.ones(4), rtol=1e-6)


@pytest.mark.slow
def test_the_index_loss_is_a_weighted_mean_over_tokens(toy, ids):
    cache = DenseCache.make(TOY, *ids.shape, kv_format="plain", dtype=jnp.float32)
    some = np.zeros(ids.size, np.float32)
    some[40:60] = 3.0
    losses = []
    for weights in (some, 3 - some, np.full(ids.size, 3, np.float32)):
        weighted = dataclasses.replace(cache, select=jnp.bool_(True), token_weights=jnp.asarray(weights))
        losses.append(float(dense_logits(toy, weighted, ids)[1].index_loss))
    share = 20 / ids.size
    chex.assert_trees_all_close(share * losses[0] + (1 - share) * losses[1], losses[2], rtol=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3, "the weights do nothing"


def test_refuses_a_length_that_is_no_multiple_of_the_window():
    with pytest.raises(ValueError, match="length=60 must be a multiple of layer 0's window, 8"):
        DenseCache.make(TOY, 1, 60)


@pytest.mark.slow
def test_a_blocks_losses_are_of_the_drafts_that_decoding_makes():
    """Three passes over whole sequences are, at any token, three steps after it; but for wrong drafts, see there."""
    config = dataclasses.replace(TOY, num_nextn_predict_layers=1)
    length = 4 * TOY.sliding_window
    t = 20
    trained, fixed = first_weights(config, 0)
    model = assemble(config, trained | fixed, jnp.float32)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, length + 1), dtype=np.int32)
    cache = DenseCache.make(config, 2, length, kv_format="plain", dtype=jnp.float32)
    losses, after, metrics = jax.jit(lambda m, *args: draft_losses(for_training(m), *args))(model, cache, ids)
    chex.assert_trees_all_close(np.sum(after.expert_load, axis=1), np.array([0, 0, 1]), rtol=1e-6)
    assert 0 <= metrics["accepted"] <= 3

    sizes = dict(num_blocks=2, max_requests=2, max_context=128, max_query_tokens=4)
    manager = KVCacheManager(config, kv_format="plain", dtype=jnp.float32, **sizes)
    for row in ids:
        manager.admit(row)

    @jax.jit
    def passes(model, cache, batch, true):
        _, streams, cache = model.forward_streams(cache, batch)
        cache = model.drafts.write(model, streams, cache, batch)
        at = jnp.arange(2, dtype=jnp.int32) * (t + 1) + t
        logits = []
        newest = one_token_batch(true[:, 0], batch.positions[at])
        streams = streams[at]
        for i in range(3):
            step = dataclasses.replace(newest, token_ids=true[:, i], positions=newest.positions + i)
            hidden, streams, cache = model.drafts(model, streams, cache, step)
            logits.append(model.logits(hidden))
        return jnp.stack(logits, axis=1)

    read = manager.prepare_forward({slot: ids[slot, : t + 1] for slot in (0, 1)}, prefill_size=2 * (t + 1))
    of_block = passes(model, manager.init_cache(), read, jnp.asarray(ids[:, t + 1 : t + 4]))
    of_model, _ = dense_logits(model, cache, ids[:, :-1])
    target = jax.nn.softmax(of_model[:, t + 1 : t + 4])
    entropies = -jnp.sum(target * jax.nn.log_softmax(of_block), axis=-1)
    expected = np.asarray(entropies) @ np.array([4, 2, 1], np.float32) / 7
    np.testing.assert_allclose(losses[:, t], expected, **CLOSE)


@pytest.mark.slow
def test_trains_a_block_and_leaves_the_model_as_it_is(toy, tmp_path):
    (tmp_path / "text").write_bytes(b"In the beginning God created the heaven and the earth.\n" * 100)
    save_release(toy, tmp_path / "toy")
    options: Any = dict(rows=2, length=LENGTH, every=3, learning_rate=2e-2, dtype="float32", quantize_from=0.0)
    train = TrainTiny(tmp_path / "text", tmp_path / "out", steps=6, mtp=True, init=tmp_path / "toy", **options)
    last = train.run()
    lines = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert last["validation"] < lines[0]["validation"] and 0 <= last["accepted"] <= 3
    best = tmp_path / "out" / "best"
    whole = named_tensors(load_checkpoint(best, DSV4Config.from_hf(best, mtp=True), dtype=jnp.float32))
    for path, value in named_tensors(load_checkpoint(tmp_path / "toy", dtype=jnp.float32)).items():
        chex.assert_trees_all_equal(whole.pop(path), value, custom_message=path)
    assert whole and all(path.startswith("drafts.") for path in whole)


@pytest.mark.slow
def test_trains_stops_goes_on_and_ships_what_it_trained(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"In the beginning God created the heaven and the earth.\n" * 100)
    options: Any = dict(
        text=text, size="toy", steps=6, rows=2, length=LENGTH, every=3, learning_rate=2e-2, dtype="float32",
        select_from=0.0,
    )  # fmt: skip
    compiled = train_step._cache_size()
    TrainTiny(out=tmp_path / "parts", minutes=0, **options).run()
    stopped = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in stopped] == [1]
    last = TrainTiny(out=tmp_path / "parts", **options).run()
    lines = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3, 6]
    assert last["validation"] < stopped[0]["validation"] - 1, "bits per byte did not fall by one"
    whole = TrainTiny(out=tmp_path / "whole", **options).run()
    assert whole["validation"] == last["validation"], "going on is not the same as never having stopped"
    assert train_step._cache_size() == compiled + 1, "the step was compiled more than once"

    best = tmp_path / "whole" / "best"
    tensors = named_tensors(load_checkpoint(best, dtype=jnp.float32))
    trained, fixed = apart(tensors)
    for path, value in as_stored(TOY, tensors).items():
        chex.assert_trees_all_equal(value, tensors[path], custom_message=f"{path} is not a stored value")
    recipe = Recipe(TOY, rows=2, length=LENGTH, learning_rate=2e-2, dtype="float32", select_from=0.0)
    held_out = np.frombuffer(text.read_bytes()[-550:] + b"", np.uint8).astype(np.int32)
    bits = evaluate(recipe, trained, fixed, held_out).mean()
    # The text's end and its EOS differ from the validation part by a byte.
    chex.assert_trees_all_close(bits, min(line["validation"] for line in lines), rtol=1e-7, atol=0.05)
    assert {file.name for file in best.iterdir()} == {
        "README.md", "config.json", "curve.png", "model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert "held-out text" in (best / "README.md").read_text()


def test_says_how_to_get_the_text(tmp_path):
    with pytest.raises(ValueError, match="apt-get download bible-kjv-text"):
        TrainTiny(text=tmp_path / "none", out=tmp_path).run()


@pytest.mark.parametrize(("full", "window"), [(TINY, TINY_WINDOW_ONLY), (TOY, TOY_WINDOW_ONLY)])
def test_the_window_only_model_has_no_entries_and_as_many_parameters(full, window):
    sizes = []
    for config in (full, window):
        model = nnx.eval_shape(lambda config=config: DeepseekV4ForCausalLM(config, rngs=nnx.Rngs(0)))
        sizes.append(sum(value.size for value in jax.tree.leaves(nnx.state(model))))
    assert set(window.layer_types) == {"sliding_attention"}
    chex.assert_trees_all_close(sizes[1], sizes[0], rtol=0.01 if full is TINY else 0.05)
