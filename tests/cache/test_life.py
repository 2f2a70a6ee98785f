"""Requests forked, cut short, found again, moved out and back: every live byte as if each had run alone."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from dsv4_jax.cache.newest_tokens import advance_ngrams
from dsv4_jax.config import EngramConfig
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.mesh import make_mesh
from tests.cache.life import MUCH, OPERATIONS, Life, random_operations
from tests.cache.test_state_machine import CONFIG, CSA, HCA, SMALL, WINDOW, config_of
from tests.v41 import v41_config


# A toy of Engram: n-grams of 4 tokens, so that three ids of each request live on.
ENGRAM = dataclasses.replace(
    config_of(CSA, WINDOW),
    engram=EngramConfig(
        layer_ids=(1,), num_embeddings=(5 + 7 + 11,), max_ngram_size=4, vocab_size=5, n_heads=1, head_dim=32,
        pad_token_id=2, compressed_vocab_size=8,
    ),
)  # fmt: skip
LARGER = dict(max_requests=6, num_blocks=24)
SHARDABLE = dataclasses.replace(SMALL, o_groups=4)  # over four devices, as its heads


def manager(config=SMALL, **changes):
    sizes = dict(num_blocks=14, max_requests=4, max_context=64, block_tokens=16, max_query_tokens=3)
    return KVCacheManager(config, **sizes | changes)


class LifeMachine(RuleBasedStateMachine):
    """All operations in any order; `Life.apply` compares after each."""

    def __init__(self):
        super().__init__()
        self.life = Life(manager(**self.changes()), every=self.every)

    every: int | None = 1

    def changes(self):
        return {}

    @rule(name=st.sampled_from(sorted(OPERATIONS)), a=st.integers(0, MUCH), b=st.integers(0, MUCH))
    def operation(self, name, a, b):
        self.life.apply(name, a, b)

    @rule(steps=st.integers(1, 5))
    def decode(self, steps):
        for _ in range(steps):
            self.life.apply("decode", 0, 0)

    @rule(a=st.integers(0, 2), b=st.integers(0, 3))
    def same_prompt_again(self, a, b):
        """The same long text with another end: hits whatever of it is still there."""
        self.life.apply("admit", a + 3 * 50, b)
        for _ in range(2):
            self.life.apply("chunk", 1, b)

    def teardown(self):
        self.life.drain()


LifeMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=24, deadline=None)
TestAnyLife = LifeMachine.TestCase


class MeshLifeMachine(LifeMachine):
    """The same over eight devices, on four of which each request lives."""

    def changes(self):
        return dict(config=SHARDABLE, mesh=make_mesh({"data": 2, "model": 4}))


TestAnyLifeOnAMesh = pytest.mark.slow(MeshLifeMachine.TestCase)
TestAnyLifeOnAMesh.settings = settings(max_examples=4, stateful_step_count=24, deadline=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (SMALL, dict(kv_format="per_entry")),
        (SHARDABLE, dict(**LARGER, mesh=dict(data=2, model=4))),
        (SHARDABLE, dict(**LARGER, mesh=dict(data=2, model=4), context_parallel=True)),
        (SMALL, dict(kv_format="plain", dtype=jnp.float32, max_query_tokens=1)),
        (CONFIG, dict()),
        (config_of(CSA, WINDOW), dict(max_query_tokens=6)),
        (config_of(HCA), dict()),
        (v41_config(), dict()),
        (v41_config(), dict(**LARGER, mesh=dict(data=2, model=4), context_parallel=True)),
        (config_of(WINDOW), dict()),
    ],
    ids=[
        "per_entry",
        "mesh",
        "context",
        "plain",
        "v4",
        "no HCA",
        "only HCA",
        "V4.1's layers",
        "V4.1's layers, context",
        "only windows",
    ],  # fmt: skip
)
def test_a_life_of_every_operation(config, changes):
    if "mesh" in changes:
        changes = changes | dict(mesh=make_mesh(changes["mesh"]))
    life = Life(manager(config, **changes), every=None if config is CONFIG else 1)
    for name, a, b in random_operations(5, 300):
        life.apply(name, a, b)
    assert all(life.done.values()), life.done
    assert life.prefix.metrics.hits and life.prefix.metrics.evicted_snapshots and life.refused
    life.drain()


def test_ngrams_of_requests_that_live_in_every_way():
    life = Life(manager(ENGRAM))
    for name, a, b in random_operations(5, 300):
        life.apply(name, a, b)
    assert all(life.done.values()), life.done
    life.drain()


def test_a_copy_runs_the_newest_token_again_with_the_same_ngram():
    """Without spare rows for drafts, too."""
    host = manager(ENGRAM, max_query_tokens=1)
    token_map = jnp.arange(ENGRAM.vocab_size, dtype=jnp.int32)

    @jax.jit
    def run(cache, batch):
        return advance_ngrams(cache.begin_step(batch), batch, token_map)

    cache = host.init_cache()
    slot = host.admit()
    for token in range(3, 9):
        ngrams, cache = run(cache, host.prepare_forward({slot: [token]}))
    (child,), cache = host.fork(cache, slot, 1, length=5)
    again, _ = run(cache, host.prepare_forward({child: [8]}))
    assert again[0].tolist() == ngrams[0].tolist() == [8, 7, 6, 5]
