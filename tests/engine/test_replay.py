"""Training in one prefill with and without the rollout's decisions; `-s` shows the numbers of the documentation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import Decisions
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import packaged_checkpoint
from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.decode.sampling import log_probabilities
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager
from dsv4_jax.quant import FakeQuantFormat, V4Format
from tests.engine.test_engine import drain


CONFIG = DSV4Config.from_hf(packaged_checkpoint())
# More than 512 tokens, so that selections leave entries out.
TEXT = (
    b"In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    b"was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there "
    b"be light: and there was light. And God saw the light, that it was good: and God divided the light from the "
    b"darkness. And God called the light Day, and the darkness he called Night. And the evening and the morning were "
    b"the first day. And God said, Let there be a firmament in the midst of the waters, and let it divide the waters "
    b"from the waters. And God made the firmament, and divided the waters which were under the firmament from the "
    b"waters which were above the firmament: and it was so. And God called the firmament Heaven. "
)
PROMPTS = TEXT[:600], TEXT[55:]
NEW_TOKENS = 100
SIZES = {"num_blocks": 16, "max_requests": 2, "max_context": 1024}


@functools.cache
def model_in(dtype):
    return CompiledModel(load_checkpoint(packaged_checkpoint(), CONFIG, dtype=dtype))


@functools.cache
def roll_out(dtype):
    """Returns finished requests with their decisions."""
    manager = KVCacheManager(CONFIG, dtype=dtype, **SIZES)
    engine = Engine(model_in(dtype), manager, token_budget=64, record_decisions=("experts", "selection"))
    sampling = SamplingParams(temperature=1.0)
    requests = [
        engine.add(list(p), max_new_tokens=NEW_TOKENS, sampling=sampling, seed=i) for i, p in enumerate(PROMPTS)
    ]
    drain(engine)
    return requests


@jax.jit
def train(model, cache, batch, targets):
    """Returns (log-probabilities of the targets, Decisions), both by token of the batch."""
    hidden, _, decisions, _ = model.forward_decisions(cache, batch)
    return log_probabilities(model.logits(hidden), targets)[0], decisions


def compare(requests, model, dtype, given):
    """Runs one prefill in a differentiable format.

    Args:
      requests: requests of the rollout.
      model: the model that is trained.
      dtype: dtype of its cache.
      given: Decisions [S, N, ...] to take.

    Returns:
      (differences of generated tokens' log-probabilities from the rollout's, the share of (token, layer) pairs with
      other experts, the share with another selection).
    """
    manager = KVCacheManager(CONFIG, kv_format=FakeQuantFormat(V4Format()), dtype=dtype, **SIZES)
    tokens = {manager.admit(): request.tokens for request in requests}
    batch = manager.prepare_forward(tokens, prefill_size=sum(map(len, tokens.values())))
    batch = batch.with_decisions(given)
    logprobs, decisions = train(model, manager.init_cache(), batch, jnp.roll(batch.token_ids, -1))
    slots = np.asarray(batch.slots)
    decisions = jax.tree.map(np.asarray, decisions)
    differences = []
    flips = []
    for slot, request in enumerate(requests):
        found = np.asarray(logprobs)[slots == slot][request.prompt_length - 1 : -1]
        differences.append(np.abs(found - np.float32(request.logprobs)))
        mine = jax.tree.map(np.sort, decisions[slots == slot][:-1])
        theirs = jax.tree.map(np.sort, request.decisions[:-1])
        flips.append([(x != y).any(axis=2) for x, y in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True)])
    experts, selection = (np.concatenate(items).mean() for items in zip(*flips, strict=True))
    return np.concatenate(differences), float(experts), float(selection)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "training"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32)],
    ids=["bfloat16", "bfloat16 in float32", "float32"],
)
def test_one_prefill_has_the_decisions_of_the_rollout(rollout, training):
    """Without them some selections are others; experts too if the rollout runs in bfloat16."""
    model = model_in(training)
    requests = roll_out(rollout)
    given = Decisions.padded([request.decisions for request in requests], max(r.num_tokens for r in requests))
    nothing = jax.tree.map(np.zeros_like, given)  # codes of nothing: the model decides, in the same program
    plain, *flips = compare(requests, model, training, nothing)
    replayed, *left = compare(requests, model, training, given)
    rows = {"without": (plain, *flips), "with": (replayed, *left)}
    for name, (differences, experts, selection) in rows.items():
        numbers = f"mean {differences.mean():.2e}, max {differences.max():.2e}, of {len(differences)}"
        print(f"\n{name}: {numbers}; other experts {experts:.2%}, other selections {selection:.2%}", end="")
    assert left == [0, 0] and flips[1] > 0 and replayed.mean() < plain.mean()
    assert flips[0] > 0 or rollout == jnp.float32
