"""The manager: what batches hold, their sizes, and that every refusal leaves the manager as it was."""

import copy
import dataclasses
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.host import CacheFullError, KVCacheManager
from tests.paths import TINY


CONFIG = DSV4Config.from_hf(TINY)
BLOCK = 16


def make(**changes):
    sizes = dict(num_blocks=12, max_requests=4, max_context=128, block_tokens=BLOCK)
    return KVCacheManager(CONFIG, **{**sizes, **changes})


def ids(n, start=0):
    return [(start + i) % CONFIG.vocab_size for i in range(n)]


def state(manager):
    return copy.deepcopy((manager.requests.states, vars(manager.requests.allocator)))


def rows(array):
    """The rows of an array that are not padding."""
    array = np.asarray(array)
    return array[(array >= 0).reshape(len(array), -1).all(axis=1)].tolist()


@pytest.fixture
def unchanged():
    """Checks on leaving the test that the manager is as it was when handed over."""
    managers = []
    yield lambda manager: managers.append((manager, state(manager)))
    for manager, before in managers:
        assert state(manager) == before


class TestSizes:
    def test_memory_buys_what_fits(self):
        flash = DSV4Config.v4_flash()
        manager = KVCacheManager(flash, memory="20GiB", max_requests=32, max_context=1 << 20)
        schema = manager.schema
        assert schema.memory_bytes() <= 20 * 2**30 < schema.memory_bytes() + schema.block_bytes
        assert manager.free_blocks == manager.requests.allocator.num_blocks == schema.num_blocks

    def test_memory_takes_no_more_than_slots_can_use(self):
        manager = KVCacheManager(CONFIG, memory="1GiB", max_requests=3, max_context=40, block_tokens=BLOCK)
        assert manager.schema.num_blocks == 3 * 3

    def test_the_cache_has_the_schemas_bytes(self):
        manager = make()
        cache = manager.init_cache()
        assert isinstance(cache, KVCache)
        assert cache.nbytes == manager.schema.memory_bytes()

    @pytest.mark.parametrize("choice", [dict(), dict(memory="1GiB", num_blocks=3)])
    def test_exactly_one_of_memory_and_num_blocks(self, choice):
        with pytest.raises(ValueError, match="give exactly one of memory and num_blocks"):
            KVCacheManager(CONFIG, max_context=32, block_tokens=BLOCK, **choice)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(num_blocks=0), "num_blocks=0"),
            (dict(num_blocks=-1), "num_blocks=-1"),
            (dict(max_requests=0), "max_requests=0"),
            (dict(max_context=-4), "max_context=-4"),
            (dict(max_query_tokens=0), "max_query_tokens=0"),
            (dict(block_tokens=24), "block_tokens=24"),
            (dict(kv_format="v5"), "v5"),
            (dict(num_blocks=None, memory="20 gigs"), "20 gigs"),
            (dict(num_blocks=None, memory=1000), "memory=1000 holds no block"),
        ],
    )
    def test_sizes_that_make_no_cache(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make(**changes)


class TestAdmit:
    def test_lowest_slot_first_and_again_after_release(self):
        manager = make()
        assert [manager.admit() for _ in range(3)] == [0, 1, 2]
        manager.release(1)
        assert manager.free_slots == 2
        assert [manager.admit(), manager.admit()] == [1, 3]
        assert manager.length(3) == 0

    def test_reserves_nothing(self):
        manager = make()
        manager.admit(ids(40))
        assert manager.free_blocks == 12

    @pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.uint8), jnp.array])
    def test_any_whole_numbers(self, kind):
        assert make().admit(kind([0, 5, CONFIG.vocab_size - 1])) == 0

    @pytest.mark.parametrize(
        ("prompt", "num_tokens", "message"),
        [
            ([], None, "prompt_ids is empty"),
            ([1, 160], None, r"prompt_ids\[1\]=160 is outside the vocabulary: ids go from 0 to 159"),
            ([-1], None, r"prompt_ids\[0\]=-1 is outside the vocabulary"),
            (np.array([[1, 2]]), None, r"prompt_ids has shape \(1, 2\)"),
            (ids(129), None, "needs 129 tokens, max_context=128"),
            (None, 129, "needs 129 tokens, max_context=128"),
            ([1], 129, "needs 129 tokens, max_context=128"),
            (None, 0, "num_tokens=0 must be at least 1"),
            (ids(81), None, "needs 81 tokens, the whole cache holds 80"),
        ],
    )
    def test_requests_that_can_never_run(self, prompt, num_tokens, message, unchanged):
        manager = make(num_blocks=5)
        unchanged(manager)
        # Not CacheFullError: waiting would not help.
        with pytest.raises(ValueError, match=message) as caught:
            manager.admit(prompt, num_tokens=num_tokens)
        assert not isinstance(caught.value, CacheFullError)

    @pytest.mark.parametrize(
        ("prompt", "error", "message"),
        [
            (3, ValueError, r"prompt_ids has shape \(\)"),
            ([[1, 2], [3, 4]], ValueError, r"prompt_ids has shape \(2, 2\)"),
            ([1.0], TypeError, "prompt_ids must hold whole numbers, not float64"),
            ([True], TypeError, "prompt_ids must hold whole numbers, not bool"),
            ("12", TypeError, "prompt_ids='12' is text: encode it first"),
            ([2**70], TypeError, "prompt_ids must hold whole numbers"),
        ],
    )
    def test_ids_are_whole_numbers_in_a_row(self, prompt, error, message):
        with pytest.raises(error, match=message):
            make().check_ids(prompt)

    def test_no_slot_left(self, unchanged):
        manager = make(max_requests=2)
        manager.admit()
        manager.admit()
        unchanged(manager)
        with pytest.raises(CacheFullError, match="1 slots are needed, 0 of 2 are free"):
            manager.admit([1])


class TestPrepareForward:
    def test_arrays_that_did_not_change_stay_on_the_device(self):
        manager = make(max_query_tokens=2)
        slot = manager.admit()
        first, second = (manager.prepare_forward({slot: [3]}) for _ in range(2))
        assert second.token_ids is first.token_ids and second.slots is first.slots
        assert (rows(first.reset_slots), rows(second.reset_slots)) == ([slot], [])
        manager.rewind(slot, 1)
        third = manager.prepare_forward({slot: [4]})
        assert rows(third.token_ids)[0] == 4 and third.reset_slots is second.reset_slots
        # A batch is known by its positions.
        assert third.positions is not second.positions and rows(third.positions) == rows(second.positions) == [1]
        third.slots.delete()
        assert rows(manager.prepare_forward({slot: [4]}).slots) == [slot]

    def test_contents(self):
        manager = make()
        a = manager.admit()
        b = manager.admit()
        batch = manager.prepare_forward({b: ids(18, 7), a: [3]})
        assert rows(batch.slots) == [b] * 18 + [a]
        assert rows(batch.positions) == [*range(18), 0]
        assert np.asarray(batch.token_ids)[:19].tolist() == [*ids(18, 7), 3]
        assert rows(batch.new_blocks) == [[b, 0, 0], [b, 1, 1], [a, 0, 2]]
        assert rows(batch.reset_slots) == [b, a]
        assert (manager.length(a), manager.length(b), manager.free_blocks) == (1, 18, 9)

        batch = manager.prepare_forward({a: [4], b: [5]})
        assert rows(batch.slots) == [a, b]
        assert rows(batch.positions) == [1, 18]
        assert rows(batch.new_blocks) == rows(batch.reset_slots) == []

    def test_types(self):
        batch = make_one_batch()
        arrays = jax.tree.leaves(batch)
        assert len(arrays) == 5
        assert all(isinstance(x, jax.Array) and x.dtype == jnp.int32 for x in arrays)

    def test_blocks_open_at_the_border(self):
        manager = make()
        slot = manager.admit()
        opened = [len(rows(manager.prepare_forward({slot: [1]}).new_blocks)) for _ in range(2 * BLOCK + 1)]
        assert [i for i, n in enumerate(opened) if n] == [0, BLOCK, 2 * BLOCK]

    def test_a_reused_slot_is_reset_once(self):
        manager = make()
        slot = manager.admit()
        manager.prepare_forward({slot: ids(20)})
        manager.release(slot)
        assert manager.admit() == slot
        assert rows(manager.prepare_forward({slot: [1]}).reset_slots) == [slot]
        assert rows(manager.prepare_forward({slot: [1]}).reset_slots) == []

    @pytest.mark.parametrize(("total", "padded"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (33, 64), (64, 64)])
    def test_buckets(self, total, padded):
        manager = make()
        batch = manager.prepare_forward({manager.admit(): ids(total)})
        assert batch.token_ids.shape == batch.positions.shape == batch.slots.shape == (padded,)
        assert batch.new_blocks.shape == (4 + -(-padded // BLOCK), 3)
        assert batch.reset_slots.shape == (4,)

    def test_shapes_do_not_depend_on_company(self):
        manager = make()
        slots = [manager.admit() for _ in range(4)]
        alone = manager.prepare_forward({slots[0]: [1]})
        full = manager.prepare_forward({slot: [1] for slot in slots})
        # The same static fields, shapes and dtypes: the same compiled program.
        assert jax.tree.structure(alone) == jax.tree.structure(full)
        assert [x.aval for x in jax.tree.leaves(alone)] == [x.aval for x in jax.tree.leaves(full)]

    @pytest.mark.parametrize(
        ("before", "now", "reserve"),
        [(BLOCK, 1, 0), (BLOCK - 1, 2, 0), (BLOCK, BLOCK + 1, 0), (BLOCK, 1, BLOCK), (3, BLOCK, 2 * BLOCK + 1)],
    )
    def test_new_blocks_suffice_when_every_request_crosses_borders(self, before, now, reserve):
        manager = make(num_blocks=64, max_requests=8)
        slots = [manager.admit() for _ in range(8)]
        manager.prepare_forward({slot: ids(before) for slot in slots})
        opened = rows(manager.prepare_forward({slot: ids(now) for slot in slots}, reserve=reserve).new_blocks)
        held = -(-before // BLOCK)
        assert len(opened) == 8 * (-(-(before + now + reserve) // BLOCK) - held)
        assert {index for _, index, _ in opened} == set(range(held, held + len(opened) // 8))

    def test_prefill_flag(self):
        manager = make(max_query_tokens=3)
        a = manager.admit()
        b = manager.admit()
        assert not manager.prepare_forward({a: ids(3), b: ids(1)}).prefill
        assert manager.prepare_forward({a: ids(1), b: ids(4)}).prefill

    def test_with_a_prefill_size_there_are_two_sizes(self):
        manager = make(max_requests=4, num_blocks=64, max_query_tokens=2)
        slots = [manager.admit() for _ in range(4)]

        def shape(*counts, size=9):
            batch = manager.prepare_forward({s: ids(n) for s, n in zip(slots, counts, strict=False)}, prefill_size=size)
            return len(batch.slots), batch.prefill

        assert shape(1) == shape(2, 1, 1) == (4, False)
        assert shape(3) == shape(2, 2, 1) == shape(6, 1, 1, 1) == (9, True)
        with pytest.raises(ValueError, match="prefill_size=9 is less than the step's 10 tokens"):
            shape(7, 1, 1, 1)
        assert shape(7, 1, 1, 1, size=None) == (16, True)

    def test_transfers_are_explicit(self):
        with jax.transfer_guard("disallow"):
            make_one_batch()

    @pytest.mark.parametrize(
        ("tokens", "reserve", "error", "message"),
        [
            ({}, 0, ValueError, "tokens is empty"),
            ({0: [1], 1: []}, 0, ValueError, r"tokens\[1\] is empty"),
            ({0: [1], 1: [1, 160]}, 0, ValueError, r"tokens\[1\]\[1\]=160 is outside the vocabulary"),
            ({0: [1], 1: np.array([0.5])}, 0, TypeError, r"tokens\[1\] must hold whole numbers"),
            ({0: [1], 2: [1]}, 0, ValueError, r"slot=2 is not admitted; admitted slots: \[0, 1\]"),
            ({0: [1], 1: ids(122)}, 0, ValueError, "slot 1 holds 7 tokens and cannot take 122 more: max_context=128"),
            ({0: [1], 1: [1]}, 121, ValueError, "slot 1 holds 7 tokens and cannot take 122 more"),
            ({0: [1]}, -1, ValueError, "reserve=-1 must be at least 0"),
            ({0: ids(50), 1: ids(50)}, 0, CacheFullError, "7 blocks are needed, 3 of 4 are free"),
            ({0: [1], 1: [1]}, 50, CacheFullError, "7 blocks are needed, 3 of 4 are free"),
        ],
    )
    def test_refusals_change_nothing(self, tokens, reserve, error, message, unchanged):
        manager = make(num_blocks=4, max_requests=3)
        manager.admit()
        manager.prepare_forward({manager.admit(): ids(7)})
        unchanged(manager)
        with pytest.raises(error, match=message):
            manager.prepare_forward(tokens, reserve=reserve)

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ([[1, 2]], r"tokens must map slots to token ids, \{slot: ids\}, got a list"),
            ({0.0: [1]}, "slot=0.0 must be a whole number"),
        ],
    )
    def test_slots_are_whole_numbers_that_map_to_ids(self, tokens, message):
        manager = make()
        manager.admit()
        with pytest.raises(TypeError, match=message):  # without the tests' own type checks
            inspect.unwrap(KVCacheManager.prepare_forward)(manager, tokens)

    def test_after_a_refusal_the_rest_still_fits(self):
        manager = make(num_blocks=2)
        a = manager.admit()
        b = manager.admit()
        manager.prepare_forward({a: ids(BLOCK)})
        with pytest.raises(CacheFullError):
            manager.prepare_forward({a: [1], b: [1]})
        assert rows(manager.prepare_forward({b: [1]}).new_blocks) == [[b, 0, 1]]


def make_one_batch():
    manager = make()
    return manager.prepare_forward({manager.admit([1, 2]): [1, 2]}, reserve=20)


class TestReservation:
    def test_allocate_makes_later_steps_sure(self):
        manager = make(num_blocks=4)
        a = manager.admit()
        b = manager.admit()
        manager.allocate(a, 3 * BLOCK)
        assert manager.free_blocks == 1
        with pytest.raises(CacheFullError):
            manager.prepare_forward({b: ids(BLOCK + 1)})
        manager.prepare_forward({b: ids(BLOCK)})
        manager.prepare_forward({a: ids(3 * BLOCK)})
        assert manager.free_blocks == 0

    def test_allocated_blocks_reach_the_device_when_a_step_needs_them(self):
        manager = make()
        slot = manager.admit()
        manager.allocate(slot, 100)
        assert manager.block_table[slot, 0] == -1
        assert rows(manager.prepare_forward({slot: [1]}).new_blocks) == [[slot, 0, 0]]
        assert rows(manager.prepare_forward({slot: ids(BLOCK)}).new_blocks) == [[slot, 1, 1]]
        assert manager.block_table[slot].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]

    def test_allocate_twice_reserves_once(self):
        manager = make()
        slot = manager.admit()
        manager.allocate(slot, 17)
        manager.allocate(slot, 17)
        assert manager.free_blocks == 10

    @pytest.mark.parametrize(
        ("slot", "num_tokens", "error", "message"),
        [
            (0, -1, ValueError, "num_tokens=-1 must be at least 0"),
            (0, 129, ValueError, "max_context=128"),
            (3, 1, ValueError, "slot=3 is not admitted"),
            (0, 65, CacheFullError, "5 blocks are needed, 4 of 4 are free"),
        ],
    )
    def test_refusals(self, slot, num_tokens, error, message, unchanged):
        manager = make(num_blocks=4)
        manager.admit()
        unchanged(manager)
        with pytest.raises(error, match=message):
            manager.allocate(slot, num_tokens)

    def test_reserve_publishes_the_loops_blocks_and_advance_counts_the_tokens(self):
        manager = make()
        slot = manager.admit()
        batch = manager.prepare_forward({slot: ids(10)}, reserve=30)
        assert rows(batch.new_blocks) == [[slot, i, i] for i in range(3)]
        manager.advance(slot, 30)
        assert manager.length(slot) == 40
        assert rows(manager.prepare_forward({slot: [1]}).positions) == [40]

    def test_advance_stays_within_what_the_device_knows(self, unchanged):
        manager = make()
        slot = manager.admit()
        manager.allocate(slot, 64)
        manager.prepare_forward({slot: ids(10)})
        unchanged(manager)
        with pytest.raises(ValueError, match="num_tokens=7 on the device: its blocks had room for 6"):
            manager.advance(slot, 7)
        with pytest.raises(ValueError, match="num_tokens=-1 must be at least 0"):
            manager.advance(slot, -1)

    def test_advance_stays_within_the_context(self):
        manager = make(max_context=20)
        slot = manager.admit()
        manager.prepare_forward({slot: ids(18)})
        with pytest.raises(ValueError, match="room for 2"):
            manager.advance(slot, 3)
        manager.advance(slot, 2)

    def test_the_devices_block_table_is_the_managers(self):
        manager = make()
        cache = manager.init_cache()
        a = manager.admit()
        b = manager.admit()
        manager.allocate(a, 100)
        for tokens, reserve in [({a: ids(20), b: [1]}, 0), ({b: ids(16)}, 33), ({a: [1]}, 0)]:
            cache = cache.begin_step(manager.prepare_forward(tokens, reserve=reserve))
            chex.assert_trees_all_equal(cache.block_table, manager.block_table)
        manager.release(a)
        a = manager.admit()
        cache = cache.begin_step(manager.prepare_forward({a: [1]}))
        chex.assert_trees_all_equal(cache.block_table, manager.block_table)
        assert cache.lengths.tolist() == [1, 17, 0, 0]

    def test_block_table_is_a_copy(self):
        manager = make()
        slot = manager.admit()
        manager.prepare_forward({slot: [1]})
        manager.block_table[:] = 99
        assert manager.block_table[slot, 0] == 0


class TestRewind:
    def test_within_the_spare_rows(self):
        manager = make(max_query_tokens=4)
        slot = manager.admit()
        manager.prepare_forward({slot: ids(17)})
        manager.rewind(slot, 3)
        assert (manager.length(slot), manager.free_blocks) == (14, 10)
        batch = manager.prepare_forward({slot: ids(4)})
        assert rows(batch.positions) == [14, 15, 16, 17]
        assert rows(batch.new_blocks) == []  # the block was kept

    def test_counts_from_the_longest_length(self, unchanged):
        manager = make(max_query_tokens=4)
        slot = manager.admit()
        manager.prepare_forward({slot: ids(17)}, reserve=3)
        manager.advance(slot, 3)
        manager.rewind(slot, 2)
        manager.prepare_forward({slot: [1]})
        unchanged(manager)
        with pytest.raises(ValueError, match="rewind num_tokens=3: it holds 19, its rings reach back to 17"):
            manager.rewind(slot, 3)

    @pytest.mark.parametrize(("reserve", "reached"), [(3, 17), (4, 18), (12, 20)])
    def test_after_a_loop_that_may_have_written_refused_drafts(self, reserve, reached):
        """They lie behind the tokens that the loop returned, up to the end of its blocks."""
        config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
        manager = KVCacheManager(config, num_blocks=4, max_context=17 + reserve, block_tokens=16, max_query_tokens=4)
        slot = manager.admit()
        manager.prepare_forward({slot: ids(17)}, reserve=reserve)
        manager.advance(slot, 3)
        assert (manager.length(slot), manager.min_length(slot)) == (20, reached)

    def test_of_a_batch_before_the_newest(self):
        """Two refused drafts of three tokens; then those of the batch that was prepared behind them."""
        manager = make(max_query_tokens=3)
        slot = manager.admit()
        for _ in range(3):
            manager.prepare_forward({slot: ids(3)})
        manager.rewind(slot, 2, is_followed=True)
        # The device has rows up to position 6, the newest ones behind the first token of the batch before.
        assert (manager.length(slot), manager.min_length(slot)) == (7, 5)
        manager.rewind(slot, 2)
        with pytest.raises(ValueError, match="it holds 5, its rings reach back to 5"):
            manager.rewind(slot, 1)
        other = manager.admit()
        for _ in range(3):
            manager.prepare_forward({other: ids(3)})
        manager.rewind(other, 2)
        with pytest.raises(ValueError, match="it holds 7, its rings reach back to 7"):
            manager.rewind(other, 2)

    def test_never_below_nothing(self):
        manager = make(max_query_tokens=4)
        slot = manager.admit()
        manager.prepare_forward({slot: ids(2)})
        with pytest.raises(ValueError, match="it holds 2, its rings reach back to 0"):
            manager.rewind(slot, 3)
        manager.rewind(slot, 2)
        assert manager.length(slot) == 0

    @pytest.mark.parametrize(
        ("slot", "num_tokens", "message"),
        [(0, 1, "the spare rows of max_query_tokens=1"), (0, -1, "num_tokens=-1"), (2, 0, "slot=2 is not admitted")],
    )
    def test_refusals(self, slot, num_tokens, message, unchanged):
        manager = make()
        manager.prepare_forward({manager.admit(): ids(5)})
        manager.rewind(0, 0)
        unchanged(manager)
        with pytest.raises(ValueError, match=message):
            manager.rewind(slot, num_tokens)


class TestRelease:
    def test_frees_slot_and_blocks(self):
        manager = make()
        slot = manager.admit()
        manager.allocate(slot, 100)
        manager.prepare_forward({slot: ids(20)})
        manager.release(slot)
        assert (manager.free_slots, manager.free_blocks) == (4, 12)
        assert (manager.block_table == -1).all()

    @pytest.mark.parametrize("use", [lambda m: m.release(0), lambda m: m.length(0), lambda m: m.advance(0, 0)])
    def test_a_released_slot_is_not_admitted(self, use, unchanged):
        manager = make()
        manager.release(manager.admit())
        unchanged(manager)
        with pytest.raises(ValueError, match=r"slot=0 is not admitted; admitted slots: \[\]"):
            use(manager)


def test_acquire_is_a_view_and_allocates_nothing(unchanged):
    manager = make()
    batch = manager.prepare_forward({manager.admit(): ids(3)})
    unchanged(manager)
    handle = manager.acquire(manager.init_cache(), 1, batch)
    assert handle.spec == manager.schema.layers[1]
    assert handle.batch is batch


def test_equal_bytes_of_another_dtype_are_put_again():
    devices = make().devices
    arrays = [devices.put_changed([np.zeros(2, dtype)])[0] for dtype in (np.int32, np.float32, np.int32)]
    assert [array.dtype for array in arrays] == [np.int32, np.float32, np.int32] and arrays[2] is arrays[0]
