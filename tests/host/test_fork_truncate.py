"""Fork and truncate: states and block table. Their bytes are compared in tests/cache/test_life.py."""

import chex
import pytest

from dsv4_jax.cache.request_rows import copy_request, write_request
from dsv4_jax.host import CacheFullError, PrefixCache, capture, resume
from tests.host.managers import BLOCK, host_state, ids, make, step


def begun(manager, n):
    slot = manager.admit()
    return slot, step(manager, manager.init_cache(), slot, ids(n))


class TestFork:
    def test_full_blocks_are_shared_and_the_open_one_is_copied(self):
        manager = make()
        slot, cache = begun(manager, 2 * BLOCK + 3)
        slots, cache = manager.fork(cache, slot, 2)
        assert slots == [1, 2]
        assert manager.block_table[:3, :3].tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
        chex.assert_trees_all_equal(cache.block_table, manager.block_table)
        assert cache.lengths.tolist() == [35, 35, 35, 0]
        assert [manager.length(s) for s in range(3)] == [35] * 3
        assert [manager.min_length(s) for s in range(3)] == [33] * 3
        assert [manager.requests.allocator.references(b) for b in range(5)] == [3, 3, 1, 1, 1]

    def test_at_a_border_nothing_is_copied(self):
        manager = make(num_blocks=2)
        slot, cache = begun(manager, 2 * BLOCK)
        slots, _ = manager.fork(cache, slot, 3)
        assert manager.free_blocks == 0 and len(slots) == 3

    def test_everything_comes_back(self):
        manager = make()
        slot, cache = begun(manager, 20)
        (child,), cache = manager.fork(cache, slot, 1)
        (grandchild,), cache = manager.fork(cache, child, 1)
        for held, released in zip((3, 2, 0), (slot, child, grandchild), strict=True):
            manager.release(released)
            assert manager.free_blocks == 12 - held

    def test_reservations_are_not_inherited(self):
        manager = make()
        slot = manager.admit()
        manager.allocate(slot, 90)
        (child,), _ = manager.fork(step(manager, manager.init_cache(), slot, ids(20)), slot, 1)
        assert len(manager.requests.state(child).blocks) == 2

    @pytest.mark.parametrize("max_query_tokens", [1, 3])
    def test_a_restored_token_does_not_run_again(self, max_query_tokens):
        """The rows that it would read were not restored with it."""
        manager = make(max_query_tokens=max_query_tokens)
        prefix = PrefixCache(manager, key="none")
        prompt = ids(2 * BLOCK + 1)
        slot = manager.admit()
        cache = step(manager, manager.init_cache(), slot, prompt[:-1])
        prefix.observe(cache, slot, prompt[:-1])
        hit, num_hit, cache = prefix.admit(cache, prompt)
        assert num_hit == 2 * BLOCK
        with pytest.raises(ValueError, match=f"length=31: the rows of slot {hit} were restored for a length of 32 or"):
            manager.fork(cache, hit, 1, length=31)
        cache = step(manager, cache, hit, prompt[-1:])
        (child,), cache = manager.fork(cache, hit, 1, length=2 * BLOCK)
        assert manager.length(child) == 2 * BLOCK
        small = make(max_query_tokens=1)
        slot, cache = resume(small, small.init_cache(), capture(manager, cache, slot))
        with pytest.raises(ValueError, match="length=31: the rows of slot 0 were restored for a length of 32 or more"):
            capture(small, cache, slot, length=31)

    def test_one_program_for_any_number(self):
        manager = make()
        slot, cache = begun(manager, 20)
        (child,), cache = manager.fork(cache, slot, 1)
        programs = copy_request._cache_size()
        _, cache = manager.fork(cache, slot, 2)
        manager.release(child)
        manager.fork(step(manager, cache, slot, ids(1)), slot, 1)
        assert copy_request._cache_size() == programs

    @pytest.mark.parametrize(
        ("slot", "n", "error", "message"),
        [
            (0, 0, ValueError, "n=0 must be at least 1"),
            (0, -1, ValueError, "n=-1"),
            (3, 1, ValueError, r"slot=3 is not admitted; admitted slots: \[0, 1\]"),
            (1, 1, ValueError, "slot 1 holds no tokens yet"),
            (0, 3, CacheFullError, "3 slots are needed, 2 of 4 are free"),
            (0, 2, CacheFullError, "2 blocks are needed, 1 of 3 are free"),
        ],
    )
    def test_refusals_change_nothing(self, slot, n, error, message):
        manager = make(num_blocks=3)
        _, cache = begun(manager, 20)
        manager.admit()
        before = host_state(manager)
        with pytest.raises(error, match=message):
            manager.fork(cache, slot, n)
        assert host_state(manager) == before and not cache.lengths.is_deleted()

    def test_a_finished_request_has_no_children(self):
        manager = make()
        slot, cache = begun(manager, 20)
        manager.release(slot)
        with pytest.raises(ValueError, match="slot=0 is not admitted"):
            manager.fork(cache, slot, 1)


class TestTruncate:
    def test_within_the_spare_rows_it_is_free(self):
        manager = make()
        slot, cache = begun(manager, 34)
        start, cache = manager.truncate(cache, slot, 32)
        assert (start, manager.length(slot), manager.min_length(slot)) == (32, 32, 32)
        assert manager.free_blocks == 10  # the third block is released
        chex.assert_trees_all_equal(cache.block_table, manager.block_table)
        assert cache.lengths.tolist() == [32, 0, 0, 0]
        cache = step(manager, cache, slot, ids(5))
        chex.assert_trees_all_equal(cache.block_table, manager.block_table)

    def test_further_back_without_snapshots_all_must_run_again(self):
        manager = make()
        slot, cache = begun(manager, 34)
        start, cache = manager.truncate(cache, slot, 31)
        assert (start, manager.length(slot), manager.min_length(slot), manager.free_blocks) == (0, 0, 0, 12)
        cache = step(manager, cache, slot, ids(31))
        assert cache.lengths.tolist() == [31, 0, 0, 0]

    def test_further_back_it_starts_at_the_last_snapshot(self):
        manager = make()
        prefix = PrefixCache(manager, key="")
        slot, cache = begun(manager, 16)
        for n in (16, 32, 48):
            prefix.observe(cache, slot, ids(n))
            cache = step(manager, cache, slot, ids(16, n))
        for length, start in [(62, 62), (50, 48), (48, 48), (47, 32), (20, 16), (15, 0)]:
            got, cache = manager.truncate(cache, slot, length)
            assert (got, manager.length(slot)) == (start, start)
            assert len(manager.requests.state(slot).cached_blocks) == start // BLOCK
            assert manager.min_length(slot) == min(62, start)

    def test_a_shared_block_that_will_be_written_is_copied(self):
        manager = make()
        slot, cache = begun(manager, 35)
        cache = step(manager, cache, slot, ids(13, 35))
        (child,), cache = manager.fork(cache, slot, 1)  # at 48 tokens: all three blocks are shared
        with pytest.raises(ValueError, match="the block of position 46 is shared; use truncate"):
            manager.rewind(child, 2)
        start, cache = manager.truncate(cache, child, 46)
        assert start == 46
        assert manager.block_table[:2, :3].tolist() == [[0, 1, 2], [0, 1, 3]]
        chex.assert_trees_all_equal(cache.block_table, manager.block_table)
        manager.rewind(child, 0)

    def test_one_program_each(self):
        manager = make()
        slot, cache = begun(manager, 34)
        _, cache = manager.truncate(cache, slot, 33)
        programs = write_request._cache_size()
        for length in (32, 20, 0):
            _, cache = manager.truncate(cache, slot, min(length, manager.length(slot)))
        assert write_request._cache_size() == programs

    @pytest.mark.parametrize(
        ("slot", "length", "error", "message"),
        [
            (0, 33, ValueError, "length=33 must be between 0 and the 32 tokens that slot 0 holds"),
            (0, -1, ValueError, "length=-1 must be between 0 and"),
            (2, 0, ValueError, "slot=2 is not admitted"),
            (0, 31, CacheFullError, "1 blocks are needed, 0 of 2 are free"),
        ],
    )
    def test_refusals_change_nothing(self, slot, length, error, message):
        manager = make(num_blocks=2)
        parent, cache = begun(manager, 32)
        _, cache = manager.fork(cache, parent, 1)
        before = host_state(manager)
        with pytest.raises(error, match=message):
            manager.truncate(cache, slot, length)
        assert host_state(manager) == before and not cache.lengths.is_deleted()
