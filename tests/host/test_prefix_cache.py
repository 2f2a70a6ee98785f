"""The prefix cache's choices: what it finds, keeps and gives up; its bytes are compared in tests/cache/test_life.py."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from dsv4_jax.cache.request_rows import read_request, write_request
from dsv4_jax.config import DSV4Config
from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, PrefixFiles, resume
from dsv4_jax.host.offload import capture
from tests.host.managers import BLOCK, host_state, ids, make, step


class Cached:
    """A manager with a prefix cache, after a request of `n` tokens has run block by block and gone."""

    def __init__(self, n=0, manager=None, **options):
        self.manager = manager or make()
        self.prefix = PrefixCache(self.manager, **dict(key="model") | options)
        self.cache = self.manager.init_cache()
        if n:
            self.run(ids(n))

    def admit(self, tokens):
        slot, hit, self.cache = self.prefix.admit(self.cache, tokens)
        return slot, hit

    def step(self, slot, tokens, known):
        """Brings tokens to a request; `known` are all it holds then, and more."""
        self.cache = step(self.manager, self.cache, slot, tokens)
        self.prefix.observe(self.cache, slot, known)

    def run(self, tokens, keep=False):
        slot, hit = self.admit(tokens)
        for at in range(hit, len(tokens), BLOCK):
            self.step(slot, tokens[at : at + BLOCK], tokens)
        if not keep:
            self.manager.release(slot)
        return slot

    def hit(self, tokens):
        slot, hit = self.admit(tokens)
        self.manager.release(slot)
        return hit


def test_what_snapshots_cost_is_as_the_page_says():
    rows = {"bytes of a snapshot": [], "in blocks of 128 tokens": [], "snapshots in the default `max_bytes`, 1 GiB": []}
    for config in (DSV4Config.v4_flash(), DSV4Config.v4_pro(), DSV4Config.v41_flash()):
        manager = KVCacheManager(config, num_blocks=1, max_requests=1, max_context=128, block_tokens=128)
        prefix = PrefixCache(manager, key="model")
        size = prefix.bytes_per_snapshot
        cells = f"{size:,}", f"{size / manager.schema.block_bytes:.1f}", str(prefix.max_bytes // size)
        for cell, row in zip(cells, rows.values(), strict=True):
            row.append(cell)
    page = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in page


class TestFinding:
    @pytest.mark.parametrize(
        ("prompt", "found"),
        [
            (ids(64), 48),  # one token at least is left to run
            (ids(65), 64),
            (ids(90), 64),
            (ids(33), 32),
            (ids(32), 16),
            (ids(16), 0),
            (ids(40) + [0] * 20, 32),
            ([0, *ids(60)], 0),
            (ids(60, 1), 0),
        ],
    )
    def test_the_longest_known_prefix_of_whole_blocks(self, prompt, found):
        assert Cached(64).hit(prompt) == found

    def test_a_hit_shares_blocks_and_counts_tokens(self):
        cached = Cached(64)
        manager = cached.manager
        slot, found = cached.admit(ids(50))
        assert (slot, found, manager.length(slot), manager.min_length(slot)) == (0, 48, 48, 48)
        assert manager.block_table[0].tolist() == [0, 1, 2, -1, -1, -1]
        chex.assert_trees_all_equal(cached.cache.block_table, manager.block_table)
        assert cached.cache.lengths.tolist() == [48, 0, 0, 0]
        assert [manager.requests.allocator.references(b) for b in range(4)] == [2, 2, 2, 1]
        with pytest.raises(ValueError, match="its rings reach back to 48"):
            manager.rewind(slot, 1)
        batch = manager.prepare_forward({slot: ids(2, 48)})
        assert np.asarray(batch.reset_slots).max() == -1
        assert np.asarray(batch.new_blocks)[0].tolist() == [slot, 3, 4]

    def test_what_follows_other_tokens_is_not_found(self):
        """The same block of tokens in another place, or behind others, is another block."""
        cached = Cached(32)
        cached.run(ids(16, 50) + ids(16, 16))
        assert cached.prefix.metrics.blocks == 4
        assert cached.hit(ids(16, 16) + ids(17, 32)) == 0

    @pytest.mark.parametrize("change", [dict(key="other"), dict(seed=1)])
    def test_other_models_and_seeds_have_other_hashes(self, change):
        root = Cached().prefix._root
        assert Cached(manager=make(num_blocks=5)).prefix._root == root
        assert Cached(**change).prefix._root != root
        assert Cached(manager=make(kv_format="per_entry")).prefix._root != root

    def test_only_requests_of_the_same_salt_share(self, tmp_path):
        cached = Cached(64, files=PrefixFiles(tmp_path, "10MB"))
        prefix = cached.prefix

        def run(salt, keep=False):
            slot, hit, cached.cache = prefix.admit(cached.cache, ids(64), salt=salt)
            assert prefix.fits(ids(64), 64, salt=salt)
            for at in range(hit, 64, BLOCK):
                cached.cache = step(cached.manager, cached.cache, slot, ids(64)[at : at + BLOCK])
                prefix.observe(cached.cache, slot, ids(64), salt=salt)
            cached.manager.release(slot)
            return hit

        assert [run(salt) for salt in ("", "a", "b", "a", "b", "")] == [48, 0, 0, 48, 48, 48]
        prefix.save(cached.cache)
        prefix.evict(99)
        assert [run(salt) for salt in ("c", "a", "", "b")] == [0, 48, 48, 48]  # from disk

    def test_a_salt_is_no_block_of_tokens(self):
        """Else a salt could name another request's first block, and find what follows it."""
        cached = Cached(64)
        block = np.array(ids(BLOCK), np.int32).tobytes().decode("latin-1")
        assert block.encode() == np.array(ids(BLOCK), np.int32).tobytes()
        slot, hit, cached.cache = cached.prefix.admit(cached.cache, ids(64)[BLOCK:], salt=block)
        assert hit == 0

    def test_while_the_first_request_still_runs(self):
        cached = Cached()
        cached.run(ids(40), keep=True)
        assert cached.hit(ids(60)) == 32

    def test_two_that_ran_side_by_side_are_one(self):
        cached = Cached()
        a, _ = cached.admit(ids(60))
        b, _ = cached.admit(ids(60))
        for slot in (a, b):
            cached.step(slot, ids(32), ids(60))
        assert cached.prefix.metrics.blocks == 2
        cached.manager.release(a)
        assert cached.manager.free_blocks == 8
        # b's path leads through blocks that only the cache holds now: they may go, and b caches its own.
        assert cached.prefix.evict(9) == 2
        cached.step(b, ids(16, 32), ids(60))
        cached.manager.release(b)
        assert cached.hit(ids(60)) == 48

    def test_a_block_whose_earlier_ones_were_evicted_is_found_again_with_them(self):
        cached = Cached()
        a, _ = cached.admit(ids(60))
        b, _ = cached.admit(ids(60))
        for slot in (a, b):
            cached.step(slot, ids(16), ids(60))
        cached.step(b, ids(16, 16), ids(60))  # its second block follows the first one of a
        cached.manager.release(a)
        assert cached.prefix.evict(9) == 1
        assert cached.hit(ids(60)) == 0
        cached.step(b, ids(16, 32), ids(60))
        cached.manager.release(b)
        assert cached.hit(ids(60)) == 48 and cached.prefix.metrics.blocks == 3

    def test_programs_are_shared_by_all_hits(self):
        cached = Cached(48)
        cached.hit(ids(50))
        before = read_request._cache_size(), write_request._cache_size()
        assert [cached.hit(ids(n)) for n in (20, 40, 50)] == [16, 32, 48]
        cached.run(ids(80))
        assert (read_request._cache_size(), write_request._cache_size()) == before

    def test_no_implicit_transfers(self):
        cached = Cached(32)
        with jax.transfer_guard("disallow"):
            slot, _ = cached.admit(ids(40))
            (child,), cache = cached.manager.fork(cached.cache, slot, 1)
            cached.manager.truncate(cache, child, 5)


class TestReset:
    @pytest.mark.parametrize("key", [None, "other"])
    def test_nothing_of_other_weights_is_hit(self, key):
        cached = Cached(64)
        manager = cached.manager
        prefix = cached.prefix
        slot, _ = cached.admit(ids(50))
        prefix.reset(key=key)
        assert manager.free_blocks == 12 - 3 and prefix.metrics.blocks == prefix.metrics.snapshots == 0
        copy, cached.cache = resume(manager, cached.cache, capture(manager, cached.cache, slot))
        start, cached.cache = manager.truncate(cached.cache, copy, 40)
        assert start == 0  # the snapshots are gone
        for here, length in ((slot, 48), (copy, 0)):
            cached.step(here, ids(64 - length, length), ids(64))
            manager.release(here)
        assert prefix.metrics.blocks == 0 and cached.hit(ids(65)) == 0
        cached.run(ids(64))
        assert cached.hit(ids(65)) == 64
        assert prefix.reset() is None and cached.hit(ids(65)) == 0

    def test_the_name_of_the_weights_so_far_is_refused(self):
        cached = Cached(64)
        with pytest.raises(ValueError, match="key='model' is the name of the weights so far"):
            cached.prefix.reset(key="model")
        assert cached.hit(ids(65)) == 64


class TestSnapshots:
    def test_every_second_border(self):
        cached = Cached(80, every=2)
        assert cached.prefix.metrics.snapshots == 2
        assert [cached.hit(ids(n)) for n in (50, 90)] == [32, 64]

    def test_only_the_last_border_and_those_that_were_hit(self):
        cached = Cached(32, every=None)
        assert cached.prefix.metrics.snapshots == 1
        assert cached.hit(ids(80)) == 32
        cached.run(ids(80))
        assert [cached.hit(ids(n)) for n in (40, 60, 90)] == [32, 32, 80]

    def test_a_budget_drops_the_least_recently_used(self):
        size = Cached().prefix.bytes_per_snapshot
        cached = Cached(64, max_bytes=2 * size + 1)
        assert cached.prefix.metrics.snapshots == 2 and cached.prefix.metrics.snapshot_bytes == 2 * size
        assert cached.prefix.metrics.evicted_snapshots == 2
        assert [cached.hit(ids(n)) for n in (90, 50, 40)] == [64, 48, 0]
        # 48 was used after 64: the next one pushes 64 out.
        cached.run(ids(20, 7))
        assert [cached.hit(ids(n)) for n in (90, 50)] == [48, 48]

    @pytest.mark.parametrize(("end", "found"), [(32, 32), (33, 32), (34, 32), (35, 0)])
    def test_a_little_behind_the_border_is_as_good(self, end, found):
        """A step may end as far behind a border as the request could be rewound."""
        cached = Cached()
        slot, _ = cached.admit(ids(60))
        cached.step(slot, ids(end), ids(60))
        assert cached.prefix.metrics.blocks == 2
        assert cached.hit(ids(60)) == found

    def test_bytes_are_those_of_the_arrays(self):
        cached = Cached(16)
        (node,) = cached.prefix._tree.nodes.values()
        assert cached.prefix.metrics.snapshot_bytes == sum(x.nbytes for x in jax.tree.leaves(node.snapshot))


class TestEviction:
    def test_leaves_first_and_the_least_recently_used(self):
        cached = Cached(48)
        manager = cached.manager
        prefix = cached.prefix
        cached.run([*ids(16), *ids(33, 90)])
        assert cached.hit(ids(60)) == 48
        assert (manager.free_blocks, prefix.evictable) == (7, 5)
        assert prefix.evict(2) == 2
        assert [cached.hit(prompt) for prompt in (ids(60), [*ids(16), *ids(40, 90)])] == [48, 16]
        assert prefix.evict(99) == 3
        assert (manager.free_blocks, prefix.metrics.blocks, prefix.metrics.evicted_blocks) == (12, 0, 5)

    def test_what_requests_hold_stays(self):
        cached = Cached(64)
        slot, _ = cached.admit(ids(40))
        assert cached.prefix.evictable == 2
        assert cached.prefix.evict(9) == 2
        assert cached.hit(ids(90)) == 32
        cached.manager.release(slot)
        assert cached.prefix.evict(9) == 2

    def test_blocks_are_given_up_when_a_request_needs_them(self):
        cached = Cached(64, manager=make(num_blocks=5))
        cached.manager.allocate(cached.manager.admit(), 2 * BLOCK)
        assert cached.prefix.metrics.blocks == 3
        assert cached.hit(ids(70)) == 48

    def test_none_is_given_up_for_a_request_that_is_refused_anyway(self):
        cached = Cached(64, manager=make(num_blocks=5))
        slot, _ = cached.admit(ids(40))
        before = host_state(cached.manager)
        with pytest.raises(CacheFullError, match="4 blocks are needed, 1 of 5 are free"):
            cached.manager.allocate(slot, 4 * BLOCK)
        assert host_state(cached.manager) == before and cached.prefix.metrics.blocks == 4

    def test_forks_take_cached_blocks_too(self):
        cached = Cached(64, manager=make(num_blocks=5))
        slot, _ = cached.admit(ids(40))
        cached.step(slot, ids(2, 32), ids(34))
        cached.manager.fork(cached.cache, slot, 2)
        assert (cached.manager.free_blocks, cached.prefix.metrics.blocks) == (0, 2)


class TestMetricsAndRefusals:
    def test_metrics(self):
        prefix = (cached := Cached(32)).prefix
        assert Cached().prefix.metrics.hit_rate == 0
        cached.hit(ids(40))
        assert prefix.metrics.hit_rate == 32 / 72
        assert (prefix.metrics.requests, prefix.metrics.hits, prefix.metrics.hit_tokens) == (2, 1, 32)
        prefix.metrics.blocks = 99
        assert prefix.metrics.blocks == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(every=0), "every=0 must be at least 1"),
            (dict(every=1.5), "every=1.5 must be a whole number"),
            (dict(max_bytes=10), r"max_bytes=10 holds no snapshot: one takes \d+ bytes"),
            (dict(max_bytes="10B"), "max_bytes=10 holds no snapshot"),
            (dict(max_bytes=1e9), r"max_bytes=1000000000.0 must be an int \(bytes\) or text such as '80GiB'"),
            (dict(debug="no"), "debug='no' must be True or False"),
            (dict(files="folder"), r"files='folder' must be a PrefixFiles\(directory, max_bytes\), or None"),
        ],
    )
    @pytest.mark.usefixtures("untyped")
    def test_bad_options(self, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            Cached(**options)

    def test_a_second_one_takes_the_place_of_the_first(self):
        """Also while requests run: they keep their blocks, and nothing of them is cached any more."""
        old = Cached(64)
        slot, _ = old.admit(ids(50))
        new = Cached(manager=old.manager, key="other")
        assert old.manager.free_blocks == 12 - 3 and old.prefix.metrics.blocks == old.prefix.metrics.snapshots == 0
        (child,), new.cache = new.manager.fork(old.cache, slot, 1)
        for here in (slot, child):
            new.step(here, ids(16, 48), ids(64))
            new.manager.release(here)
        assert new.prefix.metrics.blocks == 0 and new.manager.free_blocks == 12
        new.run(ids(64))
        assert new.hit(ids(65)) == 64
        for call in (lambda: old.prefix.admit(new.cache, ids(50)), lambda: old.prefix.observe(new.cache, 0, ids(50))):
            with pytest.raises(ValueError, match="another PrefixCache of the manager has taken the place of this one"):
                call()

    def test_refusals_change_nothing(self):
        cached = Cached(64)
        manager = cached.manager
        prefix = cached.prefix
        slot, _ = cached.admit(ids(50))
        for _ in range(3):
            manager.admit()
        before = host_state(manager)
        metrics = prefix.metrics
        for error, message, call in [
            (CacheFullError, "1 slots are needed", lambda: cached.admit(ids(50))),
            (ValueError, "needs 97 tokens, max_context=96", lambda: cached.admit(ids(97))),
            (ValueError, "outside the vocabulary", lambda: cached.admit([999])),
            (ValueError, "slot 0 holds 3 full blocks of 16", lambda: prefix.observe(cached.cache, slot, ids(47))),
            (ValueError, "slot=7 is not admitted", lambda: prefix.observe(cached.cache, 7, ids(47))),
            (ValueError, "n_blocks=-1 must be at least 0", lambda: prefix.evict(-1)),
        ]:
            with pytest.raises(error, match=message):
                call()
        assert host_state(manager) == before and prefix.metrics == metrics and not cached.cache.lengths.is_deleted()


def test_released_at_once_a_prefix_keeps_its_beginning_longest():
    cached = Cached()
    cached.run(ids(64), keep=True)
    cached.manager.release_all()
    cached.prefix.evict(1)
    assert cached.hit(ids(65)) == 48
