"""Float32 parity of the multi-token-prediction block with the release's (see the oracle's README)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache.newest_tokens import advance_streams
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.cli import main
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel, SamplingParams, decode_loop
from dsv4_jax.decode.drafts import draft, one_token_batch
from dsv4_jax.decode.step import last_token_indices
from dsv4_jax.engine import Engine, generate, stream
from dsv4_jax.host import KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.nn import ResidualStreams, StepCarry
from tests.oracle.drafts import T, manager_of, plans
from tests.paths import DATA


FOLDER = DATA / "official_mtp"
# Of logits and streams: 14 and more times what an independent float64 implementation differs by.
TOLERANCE = 1e-4
# 10 times that.
ROW_TOLERANCE = 2e-5
K = 3
WINDOW = 8
LAYER = 3
PLANS = plans((1, 2, 3, 4, 5, 16), K)


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FOLDER, DSV4Config.from_hf(FOLDER, mtp=True), dtype=jnp.float32)


@functools.partial(jax.jit, donate_argnames="cache")
def step(model, cache, batch):
    """By slot: the streams and logits after the last token, and K greedy drafts with their logits."""
    hidden, streams, cache = model.forward_streams(cache, batch)
    cache = model.drafts.write(model, streams, cache, batch)
    slots = cache.lengths.shape[0]
    last = last_token_indices(batch, slots)
    at = jnp.maximum(last, 0)
    logits = model.logits(hidden[at])
    choice = jnp.argmax(logits, axis=1).astype(jnp.int32)
    newest = one_token_batch(choice, jnp.where(last >= 0, batch.positions[at] + 1, -1))
    seeds = jnp.zeros((slots,), jnp.uint32)
    tokens, draft_logits, _, cache = draft(model, cache, streams[at], newest, SamplingParams(), seeds, drafts=K)
    return dict(streams=streams[at], logits=logits, draft_tokens=tokens, draft_logits=draft_logits), cache


def run(model, host, cache, tokens):
    """`step`, in one of two programs."""
    out, cache = step(model, cache, host.prepare_forward(tokens, prefill_size=2 * T, decode_size=3 * (1 + K)))
    return jax.device_get(out), cache


def read(model, host, cache, tokens, count):
    """Reads the first tokens of requests in chunks of the program for drafts."""
    for at in range(0, count, 1 + K):
        _, cache = run(model, host, cache, {slot: ids[at : min(at + 1 + K, count)] for slot, ids in tokens.items()})
    return cache


def check(out, golden, slot, row, t):
    """What a step gave a slot that holds tokens 0 to t of a row."""
    chex.assert_trees_all_equal(out["draft_tokens"][slot], golden["draft_tokens"][row, t])
    for name in ("logits", "draft_logits", "streams"):
        chex.assert_trees_all_close(
            out[name][slot], golden[name][row, t], rtol=0, atol=TOLERANCE, custom_message=f"{name} {t}"
        )


def ring(cache, slot, positions):
    """[n, head_dim] the block's window rows of some positions."""
    rows = jax.tree.map(lambda x: x[LAYER, slot][jnp.asarray(positions) % x.shape[2]], cache.swa)
    return np.concatenate([rows.nope, rows.rope], axis=-1)


@pytest.mark.slow
def test_the_block_on_true_tokens(model, golden):
    @jax.jit
    def block_step(model, cache, batch):
        _, streams, cache = model.forward_streams(cache, batch)
        before, shifted, cache = advance_streams(cache, streams, batch)
        drafts = model.drafts
        entered = drafts.join(before, model.embed(batch))
        names = "attention_in", "attention_out"
        arguments = ResidualStreams(entered), cache, shifted, StepCarry()
        left, carry, cache = drafts.layers[0](*arguments, record=names)
        left = left.merged()
        attention = {f"mtp_{name.replace('attention', 'attn')}": carry.recorded[name] for name in names}
        return dict(
            mtp_x=entered, mtp_out=left, mtp_logits=model.logits(drafts.norm(drafts.hc_head(left))), **attention
        ), cache

    host = manager_of(model, K)
    ids = golden["ids"]
    slots = [host.admit(row) for row in ids]
    batch = host.prepare_forward(dict(zip(slots, ids, strict=True)), prefill_size=2 * T)
    out, cache = block_step(model, host.init_cache(), batch)
    for name, value in out.items():
        value = np.asarray(value).reshape(2, T, *value.shape[1:])[:, 1:]
        tolerance = dict(mtp_logits=TOLERANCE, mtp_x=TOLERANCE, mtp_out=TOLERANCE)
        chex.assert_trees_all_close(
            value, golden[name], rtol=0, atol=tolerance.get(name, ROW_TOLERANCE), custom_message=name
        )
    for slot in slots:
        want = golden["mtp_ring"][slot]
        at = np.arange(T - 1 - WINDOW, T - 1)
        chex.assert_trees_all_close(ring(cache, slot, at), want[at % WINDOW], rtol=0, atol=ROW_TOLERANCE)


@pytest.mark.parametrize("plan", PLANS)
def test_drafts_for_any_chunking(model, golden, plan):
    host = manager_of(model, K)
    ids = golden["ids"]
    at = 0
    cache = host.init_cache()
    slots = [host.admit(row) for row in ids]
    for n in plan:
        out, cache = run(model, host, cache, {slot: ids[slot, at : at + n] for slot in slots})
        at += n
        for slot in slots:
            check(out, golden, slot, slot, at - 1)
    for slot in slots:
        # The rows of true tokens, then those that the last drafts left; the golden's ring has no more than a window.
        for name, end in dict(mtp_ring=T - 1, draft_ring=T + 2).items():
            positions = np.arange(end - WINDOW, end)
            want = golden[name][slot, positions % WINDOW]
            chex.assert_trees_all_close(
                ring(cache, slot, positions), want, rtol=0, atol=ROW_TOLERANCE, custom_message=name
            )


def test_drafts_after_rewinds(model, golden):
    """Steps of four tokens of which 0 to 3 are wrong, rewound, leave no trace in the next step's drafts."""
    host = manager_of(model, K)
    ids = golden["ids"]
    t = 21
    turn = 0
    cache = host.init_cache()
    slots = [host.admit(row) for row in ids]
    cache = read(model, host, cache, dict(enumerate(ids)), t)
    while t + 1 + K < T:
        guesses = {slot: ids[slot, t : t + 1 + K].copy() for slot in slots}
        wrong = {slot: (turn + slot) % (1 + K) for slot in slots}
        for slot, count in wrong.items():
            guesses[slot][1 + K - count :] = 159 - guesses[slot][1 + K - count :]
        out, cache = run(model, host, cache, guesses)
        for slot, count in wrong.items():
            if not count:
                check(out, golden, slot, slot, t + K)
            # At least as far as the other request, so that both stand at one position.
            host.rewind(slot, max(wrong.values()))
        t += 1 + K - max(wrong.values())
        out, cache = run(model, host, cache, {slot: ids[slot, t : t + 1] for slot in slots})
        for slot in slots:
            check(out, golden, slot, slot, t)
        t = t + 1
        turn = turn + 1
    assert turn > 2 * K


def test_drafts_after_a_fork_and_after_an_offload(model, golden):
    """A child and its parent go on with other tokens: the row between the last shared token and these differs."""
    host = manager_of(model, K)
    ids = golden["ids"]
    cache = host.init_cache()
    parent = host.admit(ids[0])
    cache = read(model, host, cache, {parent: ids[0]}, 21)
    (child,), cache = host.fork(cache, parent, 1)
    for t in range(21, 30):
        out, cache = run(model, host, cache, {parent: 159 - ids[0, t : t + 1], child: ids[0, t : t + 1]})
        check(out, golden, child, 0, t)
    request, cache = offload(host, cache, child)
    host.admit()  # so that it comes back to another slot, whose rows the parent left
    child, cache = resume(host, cache, request)
    for t in range(30, 40):
        out, cache = run(model, host, cache, {child: ids[0, t : t + 1]})
        check(out, golden, child, 0, t)


def test_drafts_after_a_prefix_hit(model, golden):
    """The request that left the prefix went on with another token; the one that hits has what a cold one has."""
    host = manager_of(model, K)
    ids = golden["ids"][1]
    prefix = PrefixCache(host, key="", debug=True)
    cache = host.init_cache()
    first, _, cache = prefix.admit(cache, ids)
    cache = read(model, host, cache, {first: ids}, 32)
    _, cache = run(model, host, cache, {first: 159 - ids[32:33]})
    prefix.observe(cache, first, np.append(ids[:32], 159 - ids[32]))
    host.release(first)
    host.admit()
    slot, hit, cache = prefix.admit(cache, ids)
    assert (slot, hit) == (1, 32)
    cold = manager_of(model, K)
    cold_cache = cold.init_cache()
    cold.admit()
    cold.admit()
    cold_cache = read(model, cold, cold_cache, {1: ids}, 32)
    for t in range(32, T):
        out, cache = run(model, host, cache, {slot: ids[t : t + 1]})
        check(out, golden, slot, 1, t)
        want, cold_cache = run(model, cold, cold_cache, {1: ids[t : t + 1]})
        chex.assert_trees_all_equal(out["draft_logits"][slot], want["draft_logits"][1])
        # Up to the rows that drafts made, as a window needs them.
        positions = np.arange(t - WINDOW + 1, t + K)
        chex.assert_trees_all_equal(ring(cache, slot, positions), ring(cold_cache, 1, positions))


@pytest.mark.slow
def test_the_command_line_gives_the_goldens_predictions(golden, tmp_path):
    """All at once: the block is given true tokens one by one, whatever the model's chunks."""
    np.save(tmp_path / "ids.npy", golden["ids"])
    arguments = ["score", "--checkpoint", FOLDER, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz"]
    arguments += ["--dtype", "float32", "--cache-format", "plain", "--drafts", K]
    assert main([str(argument) for argument in arguments]) == 0
    scores = np.load(tmp_path / "scores.npz")
    assert scores["draft_logits"].shape == (2, T - 1, K, 160) and "confidence" not in scores
    chex.assert_trees_all_equal(scores["draft_tokens"], np.argmax(scores["draft_logits"], axis=-1).astype(np.int32))
    found = dict(logits=scores["logits"], mtp_logits=scores["draft_logits"][:, :, 0])
    for name, logits in found.items():
        assert logits.dtype == np.float32
        chex.assert_trees_all_close(logits, golden[name], rtol=0, atol=TOLERANCE, custom_message=name)
    # The golden's drafts follow the model's own choice: where that is the true token, they are the same.
    own = np.argmax(golden["logits"][:, :-1], axis=-1) == golden["ids"][:, 1:]
    assert own.any()
    chex.assert_trees_all_equal(scores["draft_tokens"][own], golden["draft_tokens"][:, :-1][own])


def expected_steps(golden, row, tokens):
    """How many drafts each step keeps: none with the prompt's step, then the golden's, but for those past the end."""
    accepted = [0]
    at = 0
    while at < tokens - 1:
        accepted.append(min(int(golden["greedy_accept"][row, at]), tokens - 2 - at))
        at += 1 + accepted[-1]
    return accepted


@pytest.fixture(scope="module")
def compiled(model):
    return CompiledModel(model)


def engine_of(compiled, prefix=False, requests=3):
    """All steps in one program: a row's sums do not depend on how many drafts there are."""
    host = manager_of(compiled.module, K, requests)
    shared = PrefixCache(host, key="") if prefix else None
    return Engine(compiled, host, token_budget=8 * requests, drafter="model", prefix=shared, batch_invariant=True)


def length_that_ends_with_drafts(golden, row):
    """How many tokens a request may get so that its last step keeps a draft."""
    return next(n for n in range(32, 0, -1) if expected_steps(golden, row, n)[-1])


def finish(engine):
    while engine.busy:
        engine.step()


def test_the_engine_accepts_what_the_golden_does(compiled, golden):
    """Requests with drafts and without in one batch."""
    engine = engine_of(compiled)
    prompts = golden["greedy_prompt"]
    want = golden["greedy_tokens"]
    requests = [engine.add(prompt, max_new_tokens=32) for prompt in prompts]
    requests += [engine.add(prompts[1], max_new_tokens=20, draft_tokens=0)]
    finish(engine)
    for row, request in enumerate(requests[:2]):
        assert request.generated == want[row].tolist()
        assert request.accepted == expected_steps(golden, row, 32)
        assert 0.1 < request.acceptance < 0.5
    assert requests[2].generated == want[1][:20].tolist()
    assert (requests[2].accepted, requests[2].drafted_tokens) == ([0] * 20, 0)
    assert engine.metrics.accepted_tokens == sum(sum(request.accepted) for request in requests)


def test_guesses_follow_the_last_kept_draft(compiled, golden):
    """Their rows, which lie behind those of the text, are rotated by their positions: two requests, the same bits."""
    engine = engine_of(compiled)
    prompt = golden["greedy_prompt"][1]
    count = length_that_ends_with_drafts(golden, 1)
    requests = [engine.add(prompt, max_new_tokens=count, draft_tokens=k) for k in (K, 0)]
    engine.step()
    slots = [request.slot for request in requests]
    finish(engine)
    assert requests[0].accepted[-1] and not requests[1].accepted[-1]
    positions = np.arange(len(prompt) + count - 1 - WINDOW, len(prompt) + count - 2 + K)
    with_drafts, without = (ring(engine.cache, slot, positions) for slot in slots)
    chex.assert_trees_all_equal(with_drafts, without)


def test_what_makes_no_drafts_is_refused(compiled):
    host = manager_of(compiled.module, K)
    batch = host.prepare_forward({host.admit(): [5]})
    seeds = jnp.zeros((3,), jnp.uint32)
    with pytest.raises(ValueError, match="drafts=4 must be from 1 to 3: the cache has max_query_tokens=4"):
        compiled.decode_loop(host.init_cache(), batch, seeds, steps=2, drafts=4)
    config = DSV4Config.from_hf(FOLDER)
    plain = KVCacheManager(config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16, max_query_tokens=2)
    with pytest.raises(ValueError, match="need the model's draft layers.*mtp=True"):
        Engine(compiled, plain, drafter="model")
    with pytest.raises(ValueError, match="draft_tokens=4 must be from 0 to 3"):
        engine_of(compiled).add([5], max_new_tokens=2, draft_tokens=4)


def test_the_engine_accepts_as_many_after_a_prefix_hit(compiled, golden):
    """The prompt's first block, of a request whose prompt goes on otherwise."""
    engine = engine_of(compiled, prefix=True)
    prompt = golden["greedy_prompt"][0]
    engine.add(np.append(prompt[:16], 159 - prompt[16:]), max_new_tokens=1)
    finish(engine)
    request = engine.add(prompt, max_new_tokens=32)
    finish(engine)
    assert engine.metrics.prefix.hit_tokens == 16
    assert request.accepted == expected_steps(golden, 0, 32)


def test_drafts_change_no_drawn_token(compiled, golden):
    """Drafts share the random bits of the tokens they guess, so tokens are equal and drafts are often right."""
    engine = engine_of(compiled)
    warm = SamplingParams(temperature=1.0, top_k=20)
    pairs = []
    for seed in range(4):
        options = dict(max_new_tokens=24, sampling=warm, seed=seed)
        pairs.append([engine.add(golden["greedy_prompt"][0], draft_tokens=k, **options) for k in (0, 1, K)])
    finish(engine)
    for without, *others in pairs:
        assert all(request.generated == without.generated for request in others)
        assert all(sum(n + 1 for n in request.accepted) == 24 for request in others)
    assert len({tuple(without.generated) for without, *_ in pairs}) == 4
    # 0.06 with random bits of their own.
    assert engine.metrics.acceptance > 0.15


@pytest.mark.slow
def test_drafts_keep_the_models_distribution(compiled, golden):
    """The token after the first one, which drafts guess, is as often each id as softmax says."""
    # Many at once, and prompts so short that a step reads all of theirs.
    engine = engine_of(compiled, requests=16)
    prompt = golden["ids"][0, :7]
    options = dict(max_new_tokens=3)
    draws = [
        engine.add(prompt, seed=i, sampling=SamplingParams(temperature=1.0, top_k=4), **options) for i in range(1500)
    ]
    finish(engine)
    assert engine.metrics.acceptance > 0.05
    firsts = np.bincount([request.generated[0] for request in draws], minlength=160)
    chi = freedom = 0
    for first in np.flatnonzero(firsts > 200):
        ids = np.append(prompt, first)
        after = logits_after(compiled.module, ids)
        best = np.argsort(after)[-4:]
        want = np.exp(after[best] - after[best].max())
        want *= firsts[first] / want.sum()
        seconds = [request.generated[1] for request in draws if request.generated[0] == first]
        have = np.bincount(seconds, minlength=160)[best]
        assert have.sum() == firsts[first]  # none outside the four
        chi = chi + ((have - want) ** 2 / want).sum()
        freedom = freedom + 3
    # Its mean is the degrees of freedom, its variance twice that: four standard deviations.
    assert freedom >= 3 and chi < freedom + 4 * (2 * freedom) ** 0.5


def logits_after(model, ids):
    host = manager_of(model, K)
    cache = host.init_cache()
    host.admit()
    cache = read(model, host, cache, {0: ids}, len(ids) - 1)
    return run(model, host, cache, {0: ids[-1:]})[0]["logits"][0]


@pytest.mark.slow
def test_the_loop_on_the_device_accepts_what_the_golden_does(model, golden):
    host = manager_of(model, K)
    prompts = golden["greedy_prompt"]
    want = golden["greedy_tokens"]
    cache = host.init_cache()
    slots = [host.admit(prompt) for prompt in prompts]
    cache = read(model, host, cache, dict(enumerate(prompts)), 20)
    steps = length_that_ends_with_drafts(golden, 0)
    batch = host.prepare_forward({slot: prompts[slot, -1:] for slot in slots}, reserve=steps - 1)
    seeds = jnp.zeros((3,), jnp.uint32)
    output, cache = decode_loop(model, cache, batch, seeds, steps=steps, drafts=K)
    tokens = output.tokens
    accepted = output.accepted
    chex.assert_trees_all_equal(tokens[:2], want[:, :steps])
    assert (np.asarray(tokens[2]) == -1).all() and (np.asarray(accepted[2]) == -1).all()
    held = 21 + steps - 1
    assert cache.lengths.tolist() == [held, held, 0]
    for row in range(2):
        kept = expected_steps(golden, row, steps)
        assert accepted[row].tolist() == kept + [-1] * (steps - len(kept))
    # The last guesses' rows, too, are where single steps leave them.
    other = manager_of(model, K)
    ids = np.append(prompts[0], want[0, : steps - 1])
    other_cache = read(model, other, other.init_cache(), {other.admit(): ids}, held)
    positions = np.arange(held - WINDOW, held - 1 + K)
    chex.assert_trees_all_close(ring(cache, 0, positions), ring(other_cache, 0, positions), rtol=0, atol=ROW_TOLERANCE)


@pytest.mark.slow
def test_drawn_tokens_are_the_same_by_every_road(model, golden):
    """A stop in one row, prompts of unequal lengths; with 1 and 3 drafts in the loop on the device, and streamed."""
    long, short = golden["greedy_prompt"].tolist()
    prompts = [long, short[:5]]
    options = dict(max_new_tokens=30, sampling=SamplingParams(temperature=1.0), seed=3, chunk=8)
    free = generate(model, manager_of(model, K), prompts, **options)
    stop = next(token for token in free[0][5:] if token not in free[1])
    want = [free[0][: free[0].index(stop) + 1], free[1]]
    for drafts in (1, K):
        assert generate(model, manager_of(model, K), prompts, drafts=drafts, stop_tokens=(stop,), **options) == want
    streamed = [[], []]
    for i, token in stream(model, manager_of(model, K), prompts, drafts=K, stop_tokens=(stop,), **options):
        streamed[i].append(token)
    assert streamed == want
