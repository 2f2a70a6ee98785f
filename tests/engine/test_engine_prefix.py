"""The engine on a prefix cache: requests that hit get what they would get cold, bit for bit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import PoolGroup
from dsv4_jax.decode import SamplingParams
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import CacheCorruptionError, KVCacheManager, PrefixCache, PrefixFiles
from tests.decode.bigram import MODEL
from tests.decode.conftest import EVERY_MODEL_SLOWLY
from tests.host.managers import CONFIG


WARM = SamplingParams(temperature=1.0)
RNG = np.random.default_rng(9)
SYSTEM = RNG.integers(160, size=37).tolist()
MESSAGES = [[RNG.integers(160, size=n).tolist() for n in sizes] for sizes in ((5, 30, 9), (21, 2, 16), (11, 13, 40))]


def converse(engine):
    """Three conversations of three turns that resend their history; tokens and log-probabilities of every reply."""
    histories = [list(SYSTEM) for _ in MESSAGES]
    replies = []
    for turn in range(3):
        for i, history in enumerate(histories):
            history += MESSAGES[i][turn]
        options = dict(max_new_tokens=9, sampling=WARM)
        made = [engine.add(history, seed=i, **options) for i, history in enumerate(histories)]
        while engine.busy:
            engine.step()
        replies += [(r.generated, r.logprobs) for r in made]
        histories = [r.tokens.tolist() for r in made]
    return replies


def make(small, manager, **options):
    # A hit changes which tokens share a step. All steps run in one program, so that this changes no bit on any CPU.
    return Engine(small[0], manager, token_budget=40, drafter=PromptLookup(), batch_invariant=True, **options)


@pytest.fixture(scope="module")
def cold(small, wide):
    return converse(make(small, wide()))


@EVERY_MODEL_SLOWLY
@pytest.mark.parametrize(
    ("free", "every", "snapshots"),
    [(36, 1, 99), (36, 2, 99), (36, None, 99), (36, 1, 3), (19, 1, 99), (19, None, 3)],
    ids=["all boundaries", "every second", "last only", "three snapshots", "few blocks", "few of both"],
)
def test_hits_change_no_token_and_no_logit(small, wide, cold, free, every, snapshots):
    """Whatever is kept and evicted: turns find their history, and get exactly what a cold engine gives."""
    manager = wide(free)
    unit = PrefixCache(wide(), key="tiny").bytes_per_snapshot
    prefix = PrefixCache(manager, key="tiny", every=every, max_bytes=unit * snapshots, debug=True)
    engine = make(small, manager, prefix=prefix)
    warm = converse(engine)
    assert [tokens for tokens, _ in warm] == [tokens for tokens, _ in cold]
    chex.assert_trees_all_equal(np.array([p for _, p in warm]), np.array([p for _, p in cold]))
    metrics = engine.metrics
    assert metrics.prefix.hits >= 3 and metrics.prefix.requests == 9
    assert metrics.prompt_tokens == metrics.prefix.prompt_tokens - metrics.prefix.hit_tokens
    assert manager.free_slots == 3 and manager.free_blocks == free - metrics.prefix.blocks
    prefix.evict(36)
    assert manager.free_blocks == free


def test_a_changed_byte_fails_the_request_that_would_read_it(small, wide):
    """`debug`: the canary names the block; a request with another prompt goes on."""
    manager = wide()
    engine = make(small, manager, prefix=PrefixCache(manager, key="tiny", debug=True))
    want = list(engine.stream(engine.add(SYSTEM, max_new_tokens=5)))
    csa = engine.cache.groups["csa4"]
    codes = csa.entries.nope
    block = np.flatnonzero(np.asarray(codes).any(axis=(0, 2, 3)))[0]
    entries = dataclasses.replace(csa.entries, nope=codes.at[0, block, 1, 7].add(jnp.uint8(1)))
    cache = engine.cache.with_groups({"csa4": PoolGroup(entries=entries)})
    other = Engine(small[0], manager, jax.block_until_ready(cache), token_budget=40, drafter=PromptLookup(),
                   prefix=engine.prefix)  # fmt: skip
    bad = other.add(SYSTEM, max_new_tokens=5)
    good = other.add(SYSTEM[::-1], max_new_tokens=5)
    while other.busy:
        other.step()
    assert bad.finish_reason == "error" and good.finish_reason == "length" and len(good.generated) == 5 == len(want)
    with pytest.raises(CacheCorruptionError, match=f"block {block} .* has changed in layer 1"):
        list(other.stream(bad))
    assert manager.free_slots == 3


def test_prefixes_are_found_in_the_cache_that_has_their_blocks(small, wide):
    """A second engine begins with an empty cache, unless it gets the first one's."""
    manager = wide()
    engine = make(small, manager, prefix=PrefixCache(manager, key="tiny"))
    request = engine.add(SYSTEM, max_new_tokens=5)
    want = list(engine.stream(request))
    for cache, hit_tokens in ((None, 0), (None, 0), ("the earlier engine's", 32)):
        cache = cache and engine.cache
        engine = make(small, manager, cache=cache, prefix=engine.prefix)
        request = engine.add(SYSTEM, max_new_tokens=5)
        assert list(engine.stream(request)) == want and request.cached_tokens == hit_tokens


def test_engines_that_take_turns_do_not_hit_blocks_of_one_another(small, wide, tmp_path):
    """A prefix cache has blocks of one cache, in memory and in its files."""
    prompts = [SYSTEM, SYSTEM[::-1]]
    cold = make(small, wide())
    want = [list(cold.stream(cold.add(prompt, max_new_tokens=5))) for prompt in prompts]
    manager = wide()
    prefix = PrefixCache(manager, key="tiny", files=PrefixFiles(tmp_path, "1GiB"))
    engines = [make(small, manager, prefix=prefix) for _ in prompts]
    hits = []
    for engine, turn in ((0, 0), (0, 0), (1, 1), (0, 1), (1, 0), (0, 0), (0, 1)):
        request = engines[engine].add(prompts[turn], max_new_tokens=5)
        assert list(engines[engine].stream(request)) == want[turn]
        hits.append(request.cached_tokens)
    assert hits[1] == 32  # later ones may hit files, which the newest engine's blocks reach
    for engine in engines:
        engine.close()
    manager = wide()
    engine = make(small, manager, prefix=PrefixCache(manager, key="tiny", files=PrefixFiles(tmp_path, "1GiB")))
    for prompt, tokens in zip(prompts, want, strict=True):
        assert list(engine.stream(engine.add(prompt, max_new_tokens=5))) == tokens


def test_a_prefix_cache_of_another_manager_is_refused(small, wide):
    with pytest.raises(ValueError, match="prefix cache of another manager"):
        make(small, wide(), prefix=PrefixCache(wide(), key="tiny"))


class Reader:
    """An engine of a model that computes nothing, which reads prompts in blocks of 64 tokens."""

    def __init__(self, *, budget=512, cached=True, **options):
        manager = KVCacheManager(CONFIG, num_blocks=128, max_requests=4, max_context=4096, block_tokens=64)
        prefix = PrefixCache(manager, key="bigram", **options) if cached else None
        self.engine = Engine(MODEL, manager, token_budget=budget, prefix=prefix)

    def read(self, prompt, max_new_tokens=1):
        """Answers a prompt alone. Returns the request and the number of steps until its first token."""
        request = self.engine.add(prompt, max_new_tokens=max_new_tokens)
        steps = 0
        while not request.num_generated:
            self.engine.step()
            steps += 1
        while self.engine.busy:
            self.engine.step()
        return request, steps


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(CONFIG.vocab_size, size=n).tolist()


@pytest.mark.parametrize("every", [1, 2, None])
@pytest.mark.parametrize(
    ("length", "budget", "more"),
    [(2048, 512, 0), (2048, 2048, 0), (2049, 512, 0), (2000, 512, 1), (2000, 520, 1), (60, 512, 0), (2048, 64, 0)],
)
def test_a_prefix_cache_adds_at_most_the_step_behind_the_last_boundary(length, budget, more, every):
    prompt = tokens(length)
    request, steps = Reader(budget=budget, every=every).read(prompt)
    want, steps_without = Reader(budget=budget, cached=False).read(prompt)
    assert steps == steps_without + more and request.generated == want.generated


@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize("length", [1000, 1024, 1030, 50])
@pytest.mark.parametrize(("answer", "budget"), [(3, 512), (90, 512), (3, 90)])
def test_the_next_turn_hits_at_the_last_boundary(length, answer, budget, every):
    """It lies in the answer if that reached one, else in the prompt; an answer that a client drops costs no hit."""
    reader = Reader(budget=budget, every=every)
    prompt = tokens(length)
    request, _ = reader.read(prompt, answer)
    # The last token was drawn and has not run.
    known = request.tokens.tolist()[:-1]
    assert reader.read(known + tokens(100, 1))[0].cached_tokens == len(known) // 64 * 64
    if every == 1:
        assert reader.read(prompt + tokens(100, 2))[0].cached_tokens == length // 64 * 64


@pytest.mark.parametrize("every", [1, 3, None])
def test_the_third_prompt_with_a_common_beginning_hits_it(every):
    """The second one finds out where the two part, within a chunk."""
    reader = Reader(budget=2048, every=every)
    system = tokens(1000)
    hits = [reader.read(system + tokens(500, i))[0].cached_tokens for i in range(1, 5)]
    stride = 64 * (every or 1)
    assert hits == [0, 0, 1000 // stride * stride, 1000 // stride * stride]


def test_a_chunk_beside_running_requests_gives_up_an_eighth_at_most():
    """A budget of two blocks less one token is not halved."""
    reader = Reader(budget=128)
    runs = reader.engine.add([1], max_new_tokens=400)
    reader.engine.step()
    request = reader.engine.add(tokens(2050), max_new_tokens=1)
    steps = 0
    while not request.num_generated:
        reader.engine.step()
        steps += 1
    # 17 chunks, the tokens behind the last boundary, and the step of one token that ran ahead.
    assert steps <= 19 and runs.num_generated > steps - 2
    assert reader.read(request.prompt)[0].cached_tokens == 2048


def test_a_prompt_of_whole_blocks_hits_all_but_its_last(small, wide):
    """From the third time: the second one finds that the last block cannot be hit, and leaves a snapshot before it."""
    engine = make(small, manager := wide(), prefix=PrefixCache(manager, key="tiny"))
    prompt = RNG.integers(160, size=4 * manager.schema.block_tokens).tolist()
    hits = []
    for _ in range(3):
        request = engine.add(prompt, max_new_tokens=1)
        while engine.busy:
            engine.step()
        hits.append(request.cached_tokens)
    assert hits == [0, 0, 3 * manager.schema.block_tokens]
