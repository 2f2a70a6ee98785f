"""Float32 parity of DSpark with the release's (see the oracle's README)."""

import dataclasses
import functools
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint, save_release
from dsv4_jax.checkpoint.reader import read_checkpoint
from dsv4_jax.cli import main
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel, SamplingParams, decode_loop
from dsv4_jax.decode.drafts import DraftOptions, draft, one_token_batch
from dsv4_jax.decode.step import last_token_indices
from dsv4_jax.engine import Engine
from dsv4_jax.engine.generate import engine_for_prompts
from dsv4_jax.host import KVCacheManager, PrefixCache, offload, resume
from tests.oracle.drafts import T, manager_of, plans
from tests.paths import DATA


FOLDER = DATA / "official_dspark"
# Ten and more times what an independent float64 implementation differs by.
TOLERANCE = 1e-4
ROW_TOLERANCE = 5e-5
CONFIDENCE_TOLERANCE = 2e-4
K = 5
WINDOW = 8
LAYERS = slice(4, 7)
PLANS = plans((1, 4, 6), K)


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FOLDER, DSV4Config.from_hf(FOLDER, mtp=True), dtype=jnp.float32)


@pytest.fixture(scope="module")
def compiled(model):
    return CompiledModel(model)


@functools.partial(jax.jit, donate_argnames="cache")
def step(model, cache, batch, anchors):
    """By slot: taps and logits of the last token, and greedy drafts that follow it and an anchor."""
    hidden, taps, cache = model.forward_streams(cache, batch)
    cache = model.drafts.write(model, taps, cache, batch)
    slots = cache.lengths.shape[0]
    last = last_token_indices(batch, slots)
    at = jnp.maximum(last, 0)
    newest = one_token_batch(anchors, jnp.where(last >= 0, batch.positions[at] + 1, -1))
    seeds = jnp.zeros((slots,), jnp.uint32)
    tokens, draft_logits, _, cache = draft(model, cache, taps[at], newest, SamplingParams(), seeds, drafts=K)
    return dict(taps=taps[at], logits=model.logits(hidden[at]), draft_tokens=tokens, draft_logits=draft_logits), cache


def run(model, host, cache, tokens, anchors=None):
    """`step`, in one of two programs."""
    ids = np.zeros((host.schema.max_requests,), np.int32)
    for slot, anchor in (anchors or {}).items():
        ids[slot] = anchor
    out, cache = step(model, cache, host.prepare_forward(tokens, prefill_size=2 * T, decode_size=3 * (1 + K)), ids)
    return jax.device_get(out), cache


def run_true(model, host, cache, golden, rows, at, n):
    """Runs tokens `at` to `at + n - 1` of rows, {slot: row}, and checks them and the drafts after the next token."""
    ids = golden["ids"]
    last = at + n - 1
    anchors = {slot: ids[row, min(at + n, T - 1)] for slot, row in rows.items()}
    out, cache = run(model, host, cache, {slot: ids[row, at : at + n] for slot, row in rows.items()}, anchors)
    for slot, row in rows.items():
        compare = dict(taps=last, logits=last)
        if 1 <= last < T - 1:  # the golden's blocks have two rows before them, and a true token to begin with
            compare["draft_logits"] = last + 1
            chex.assert_trees_all_equal(out["draft_tokens"][slot], golden["draft_tokens"][row, last + 1])
        for name, t in compare.items():
            want = golden[name][row, t]
            chex.assert_trees_all_close(out[name][slot], want, rtol=0, atol=TOLERANCE, custom_message=f"{name} {t}")
    return cache


def read(model, host, cache, tokens, count):
    """Reads the first tokens of requests in chunks of the program for drafts."""
    for at in range(0, count, 1 + K):
        _, cache = run(model, host, cache, {slot: ids[at : min(at + 1 + K, count)] for slot, ids in tokens.items()})
    return cache


def check_rows(cache, golden, slot, row, end):
    """The rows of the window before a position, in all draft layers."""
    positions = np.arange(max(end - WINDOW, 0), end)
    rows = jax.tree.map(lambda x: x[LAYERS, slot][:, positions % x.shape[2]], cache.swa)
    have = np.concatenate([rows.nope, rows.rope], axis=-1)
    want = golden["rows"][:, row, positions]
    chex.assert_trees_all_close(have, want, rtol=0, atol=ROW_TOLERANCE)


@pytest.mark.parametrize("plan", PLANS)
def test_drafts_for_any_chunking(model, golden, plan):
    host = manager_of(model, K)
    at = 0
    cache = host.init_cache()
    slots = [host.admit(row) for row in golden["ids"]]
    for n in plan:
        cache = run_true(model, host, cache, golden, {slot: slot for slot in slots}, at, n)
        at += n
        for slot in slots if at < T else ():
            check_rows(cache, golden, slot, slot, at)


def test_drafts_after_rewinds(model, golden):
    """Steps of six tokens of which 0 to 5 are wrong, rewound, leave no trace in the next step's drafts."""
    host = manager_of(model, K)
    ids = golden["ids"]
    t = 16
    cache = host.init_cache()
    slots = [host.admit(row) for row in ids]
    cache = read(model, host, cache, dict(enumerate(ids)), t)
    for wrong in (5, 0, 4, 1, 3, 2):
        guesses = {slot: ids[slot, t : t + 1 + K].copy() for slot in slots}
        for slot in slots:
            guesses[slot][1 + K - wrong :] = 125 - guesses[slot][1 + K - wrong :]
        _, cache = run(model, host, cache, guesses)
        for slot in slots:
            host.rewind(slot, wrong)
        t += 1 + K - wrong
        cache = run_true(model, host, cache, golden, {slot: slot for slot in slots}, t, 1)
        t += 1
        for slot in slots:
            check_rows(cache, golden, slot, slot, t)


def test_drafts_after_a_fork_and_after_an_offload(model, golden):
    """A child goes on with true tokens and its parent with others; later it comes back to another slot."""
    host = manager_of(model, K)
    ids = golden["ids"]
    cache = host.init_cache()
    parent = host.admit(ids[0])
    cache = read(model, host, cache, {parent: ids[0]}, 21)
    (child,), cache = host.fork(cache, parent, 1)
    for t in range(21, 26):
        _, cache = run(model, host, cache, {parent: 125 - ids[0, t : t + 1]})
        cache = run_true(model, host, cache, golden, {child: 0}, t, 1)
    request, cache = offload(host, cache, child)
    host.admit()
    child, cache = resume(host, cache, request)
    for t in range(26, 30):
        cache = run_true(model, host, cache, golden, {child: 0}, t, 1)


def test_drafts_after_a_prefix_hit(model, golden):
    """The request that left the prefix went on with another token."""
    host = manager_of(model, K)
    ids = golden["ids"][1]
    prefix = PrefixCache(host, key="", debug=True)
    cache = host.init_cache()
    first, _, cache = prefix.admit(cache, ids)
    cache = read(model, host, cache, {first: ids}, 32)
    _, cache = run(model, host, cache, {first: 125 - ids[32:33]})
    prefix.observe(cache, first, np.append(ids[:32], 125 - ids[32]))
    host.release(first)
    host.admit()
    slot, hit, cache = prefix.admit(cache, ids)
    assert (slot, hit) == (1, 32)
    for t in range(32, 38):
        cache = run_true(model, host, cache, golden, {slot: 1}, t, 1)


@pytest.mark.slow
def test_the_command_line_gives_the_goldens_predictions(golden, tmp_path):
    np.save(tmp_path / "ids.npy", golden["ids"])
    arguments = ["score", "--checkpoint", FOLDER, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz"]
    arguments += ["--dtype", "float32", "--cache-format", "plain", "--drafts", K]
    assert main([str(argument) for argument in arguments]) == 0
    scores = np.load(tmp_path / "scores.npz")
    # The command's begin with token 1, the golden's blocks have two rows before them.
    chex.assert_trees_all_equal(scores["draft_tokens"][:, 1:], golden["draft_tokens"][:, 2:])
    for name, tolerance in dict(draft_logits=TOLERANCE, confidence=CONFIDENCE_TOLERANCE).items():
        assert scores[name].dtype == np.float32
        chex.assert_trees_all_close(scores[name][:, 1:], golden[name][:, 2:], rtol=0, atol=tolerance)


def expected_steps(golden, row, tokens):
    """How many drafts each step keeps: none with the prompt's step, then the golden's, but for those past the end."""
    accepted = [0]
    at = 0
    while (left := tokens - sum(accepted) - len(accepted)) > 0:
        accepted.append(min(int(golden["spec_accept"][row, at]), left - 1))
        at += 1
    return accepted


def engine_of(compiled, prefix=False, kv_format="plain", **options):
    """All steps in one program: a row's sums do not depend on how many drafts there are."""
    host = manager_of(compiled.module, K, kv_format=kv_format)
    shared = PrefixCache(host, key="") if prefix else None
    options |= dict(token_budget=24, drafter="model", prefix=shared, batch_invariant=True)
    return Engine(compiled, host, **options)


def finish(engine):
    while engine.busy:
        engine.step()


@pytest.mark.slow
def test_the_engine_accepts_what_the_golden_does(compiled, golden):
    """With every number of drafts that a step verifies the tokens are those without drafts, also after a prefix hit."""
    engine = engine_of(compiled, prefix=True)
    prompts = golden["greedy_prompt"]
    want = golden["greedy_tokens"]
    requests = [engine.add(prompt, max_new_tokens=40) for prompt in prompts]
    finish(engine)
    again = [engine.add(prompts[0], max_new_tokens=40, draft_tokens=k) for k in range(1 + K)]
    finish(engine)
    assert engine.metrics.prefix.hit_tokens == 16 * len(again)
    for row, request in [*enumerate(requests), *((0, request) for request in again)]:
        assert request.generated == want[row].tolist()
    for row, request in [*enumerate(requests), (0, again[K])]:
        assert request.accepted == expected_steps(golden, row, 40)
    assert not any(again[0].accepted)


@pytest.mark.slow
def test_drafts_without_confidence_are_not_verified(compiled, golden):
    engine = engine_of(compiled, min_confidence=0.5)
    prompts = golden["greedy_prompt"]
    requests = [engine.add(prompt, max_new_tokens=40) for prompt in prompts]
    finish(engine)
    for row, request in enumerate(requests):
        assert request.generated == golden["greedy_tokens"][row].tolist()
        # The first block's drafts, up to the first of which the golden has a negative logit.
        enough = np.cumprod(golden["spec_confidence"][row, 0] >= 0).sum()
        assert request.accepted[1] == min(enough, golden["spec_accept"][row, 0])
        assert 0 < request.drafted_tokens < K * (len(request.accepted) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["plain", "v4"])
def test_drafts_change_no_drawn_token(compiled, golden, kv_format):
    """Drafts share the random bits of the tokens they guess, so tokens are equal and drafts are often right."""
    engine = engine_of(compiled, kv_format=kv_format)
    groups = []
    engine.manager.requests.allocator.acquire(17)  # the other 7 are too few for two requests: one has to make room
    for seed, temperature in enumerate((1.0, 1.0, 0.0)):
        options = dict(max_new_tokens=40, sampling=SamplingParams(temperature=temperature, top_k=20), seed=seed)
        groups.append([engine.add(golden["greedy_prompt"][0], draft_tokens=k, **options) for k in (0, 2, K)])
    finish(engine)
    for without, *others in groups:
        assert all(request.generated == without.generated for request in others)
    assert engine.metrics.acceptance > 0.1 and engine.metrics.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [K, DraftOptions(K, min_confidence=0.5)])
def test_the_loop_on_the_device_accepts_what_the_golden_does(model, golden, drafts):
    host = manager_of(model, K)
    prompts = golden["greedy_prompt"]
    want = golden["greedy_tokens"]
    cache = host.init_cache()
    slots = [host.admit(prompt) for prompt in prompts]
    cache = read(model, host, cache, dict(enumerate(prompts)), 20)
    batch = host.prepare_forward({slot: prompts[slot, -1:] for slot in slots}, reserve=39)
    output, _ = decode_loop(model, cache, batch, jnp.zeros((3,), jnp.uint32), steps=40, drafts=drafts)
    chex.assert_trees_all_equal(output.tokens[:2], want)
    for row in range(2):
        steps = expected_steps(golden, row, 40)
        accepted = output.accepted[row].tolist()
        if drafts == K:
            assert accepted == steps + [-1] * (40 - len(steps))
        else:
            assert accepted.index(-1) > len(steps) and max(accepted) > 0


def test_what_makes_no_drafts_is_refused(compiled):
    config = compiled.module.config
    sizes = dict(num_blocks=8, max_requests=2, max_context=64, block_tokens=16)
    with pytest.raises(ValueError, match="drafts=6 must be from 1 to 5, the most that this model's layers make"):
        Engine(compiled, KVCacheManager(config, **sizes, max_query_tokens=7), drafter="model")
    with pytest.raises(ValueError, match=r"min_confidence=1.5 must be from 0 to 1"):
        engine_of(compiled, min_confidence=1.5)
    mtp = KVCacheManager(dataclasses.replace(config, dspark=None), **sizes, max_query_tokens=3)
    with pytest.raises(ValueError, match=r"min_confidence=0.5 needs draft layers that estimate their confidence"):
        Engine(compiled, mtp, drafter="model", min_confidence=0.5)


def test_prompts_are_generated_with_a_threshold(compiled, monkeypatch):
    made = {}
    # The package has the function by the module's name.
    module = importlib.import_module("dsv4_jax.engine.generate")
    monkeypatch.setattr(module, "Engine", lambda *_, **options: made.update(options))
    engine_for_prompts(compiled, manager_of(compiled.module, K), [[2]], 4, 8, DraftOptions(K, 0.5))
    assert made["drafter"] == "model" and made["min_confidence"] == 0.5 and made["draft_tokens"] == K


def test_the_layers_are_saved_as_the_release_stores_them(model, tmp_path):
    save_release(model, tmp_path)
    config = DSV4Config.from_hf(tmp_path, mtp=True)
    assert config == model.config and config.num_draft_layers == 3
    theirs = read_checkpoint(FOLDER)
    ours = read_checkpoint(tmp_path)
    scales = {name for name in ours if name.endswith(".scale")}
    assert ours.keys() - scales == theirs.keys()
    assert ours["mtp.0.main_proj.weight"].dtype == "F8_E4M3"
    for name in ("markov_head.markov_w1", "markov_head.markov_w2", "confidence_head.proj"):
        assert ours[f"mtp.2.{name}.weight"].dtype == "BF16"
    load_checkpoint(tmp_path, config)
    assert dataclasses.replace(config, dspark=None, num_nextn_predict_layers=0) == DSV4Config.from_hf(tmp_path)
