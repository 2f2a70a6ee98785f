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
from dsv4_jax.host import CacheCorruptionError, PrefixCache


WARM = SamplingParams(temperature=1.0)
RNG = np.random.default_rng(9)
SYSTEM = RNG.integers(160, size=37).tolist()
MESSAGES = [[RNG.integers(160, size=n).tolist() for n in sizes] for sizes in ((5, 30, 9), (21, 2, 16), (11, 13, 40))]


def converse(engine):
    """Three conversations of three turns that resend their history; tokens and log-probabilities of every reply."""
    histories, replies = [list(SYSTEM) for _ in MESSAGES], []
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


@pytest.mark.parametrize(
    ("free", "every", "snapshots"),
    [(36, 1, 99), (36, 2, 99), (36, None, 99), (36, 1, 3), (19, 1, 99), (19, None, 2)],
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
    bad, good = other.add(SYSTEM, max_new_tokens=5), other.add(SYSTEM[::-1], max_new_tokens=5)
    while other.busy:
        other.step()
    assert bad.finish_reason == "error" and good.finish_reason == "length" and len(good.generated) == 5 == len(want)
    with pytest.raises(CacheCorruptionError, match=f"block {block} .* has changed in layer 1"):
        list(other.stream(bad))
    assert manager.free_slots == 3


def test_a_prefix_cache_of_another_manager_is_refused(small, wide):
    with pytest.raises(ValueError, match="prefix cache of another manager"):
        make(small, wide(), prefix=PrefixCache(wide(), key="tiny"))
