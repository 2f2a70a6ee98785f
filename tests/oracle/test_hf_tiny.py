"""Float32 parity with transformers 5.23 (see the oracle's README): per layer, logits for every chunking, greedy."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config.layer_spec import CSA, SLIDING
from dsv4_jax.decode import forward
from dsv4_jax.engine import generate, stream
from dsv4_jax.host import KVCacheManager
from tests.oracle.layers import entries, reader, run_layer
from tests.paths import DATA


FOLDER = DATA / "hf_tiny"
# 20 times the difference observed between two independent float32 implementations.
LAYER_TOLERANCE = 2e-5
# 10 times the difference observed between two implementations.
LOGITS_TOLERANCE = 1e-4
PLANS = {f"chunks of {n}": [n] * (75 // n) + [75 % n] * (75 % n > 0) for n in (1, 4, 5, 16, 40)}
PLANS |= {"all": [75]} | {f"prefill {p}, decode": [p] + [1] * (75 - p) for p in (1, 3, 4, 5, 16, 17, 33)}


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FOLDER, dtype=jnp.float32)


def manager(model, **sizes):
    sizes = dict(num_blocks=40, max_requests=2, max_context=128, block_tokens=16) | sizes
    return KVCacheManager(model.config, kv_format="plain", dtype=jnp.float32, **sizes)


@pytest.mark.parametrize("layer", range(5))
def test_attention_layer(model, golden, layer):
    x = golden[f"attn_in_{layer}"]
    out, record, cache = run_layer(model, layer, x, [37, 1, 37], kv_format="plain", dtype=jnp.float32)
    chex.assert_trees_all_close(out, golden[f"attn_out_{layer}"], rtol=0, atol=LAYER_TOLERANCE)
    kind = model.config.layer_types[layer]
    if kind == SLIDING:
        return
    handle = reader(cache, layer)
    stored = entries(handle.read_classical_view(), golden[f"entries_{layer}"].shape[1])
    got = np.concatenate([stored.nope, stored.rope], axis=-1)
    chex.assert_trees_all_close(got, golden[f"entries_{layer}"], rtol=0, atol=LAYER_TOLERANCE)
    if kind == CSA:
        keys = entries(handle.read_indexer_view(), golden[f"index_entries_{layer}"].shape[1]).codes
        chex.assert_trees_all_close(keys, golden[f"index_entries_{layer}"], rtol=0, atol=LAYER_TOLERANCE)
        scores = golden[f"index_score_{layer}"]
        chex.assert_trees_all_close(record["scores"][..., : scores.shape[2]], scores, rtol=0, atol=LAYER_TOLERANCE)
        # The smallest gap between a selected and an unselected score is four times the tolerance: sets are equal.
        want = np.sort(golden[f"topk_{layer}"], axis=-1)
        chex.assert_trees_all_equal(np.sort(record["topk"], axis=-1), want)


# Chunks of more than 17 tokens need a second program.
@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=[pytest.mark.slow] * (max(plan) > 17)) for name, plan in PLANS.items()],
)
def test_logits_for_any_chunking(model, golden, plan):
    host = manager(model)
    cache = host.init_cache()
    ids = golden["ids"]
    slots = [host.admit(row) for row in ids]
    parts = []
    at = 0
    for n in plan:
        size = 2 * (17 if n <= 17 else 75)  # few sizes, so few programs to compile
        batch = host.prepare_forward({slot: ids[slot, at : at + n] for slot in slots}, prefill_size=size)
        logits, cache = forward(model, cache, batch)
        parts.append(np.asarray(logits)[: 2 * n].reshape(2, n, -1))
        at += n
    chex.assert_trees_all_close(np.concatenate(parts, axis=1), golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("how", [pytest.param(stream, marks=pytest.mark.slow), generate])
def test_greedy_tokens_equal_transformers(model, golden, how):
    prompts = golden["greedy_prompt"]
    want = golden["greedy_tokens"]
    made = how(model, manager(model), prompts, max_new_tokens=48, chunk=16)
    if how is stream:
        pairs = list(made)
        made = [[token for i, token in pairs if i == row] for row in range(2)]
    chex.assert_trees_all_equal(np.array(made), want)


@pytest.mark.slow
def test_drafts_are_verified_and_forgotten(model, golden):
    """Steps of four tokens of which three are wrong guesses: rewound, they leave no trace (rings with spare rows)."""
    host = manager(model, max_query_tokens=4)
    ids = golden["ids"]
    cache = host.init_cache()
    slots = [host.admit(row) for row in ids]
    _, cache = forward(model, cache, host.prepare_forward({slot: ids[slot, :21] for slot in slots}))
    logits = []
    for t in range(21, 72):  # all steps of four tokens: one program
        guesses = {slot: ids[slot, t : t + 4].copy() for slot in slots}
        for draft in guesses.values():  # the first token is right, and sometimes the first guesses are too
            draft[1 + t % 4 :] = 159 - draft[1 + t % 4 :]
        batch = host.prepare_forward(guesses)
        assert not batch.prefill
        out, cache = forward(model, cache, batch)
        logits.append(np.asarray(out).reshape(2, 4, -1)[:, 0])
        for slot in slots:
            host.rewind(slot, 3)
    chex.assert_trees_all_close(np.stack(logits, axis=1), golden["logits"][:, 21:72], rtol=0, atol=LOGITS_TOLERANCE)
