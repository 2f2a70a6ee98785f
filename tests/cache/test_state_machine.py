"""Any life of any requests: after every step the whole cache equals the naive model, byte for byte."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.host import CacheFullError, KVCacheManager
from tests.cache.reference import Reads, ReferenceCache, poisoned_cache, random_token, random_weights
from tests.ops.pools import same_bytes
from tests.paths import TINY


WINDOW = LayerSpec()
CSA = LayerSpec.csa()
HCA = LayerSpec.hca(16)


def config_of(*specs):
    """The packaged model with other layers."""
    return DSV4Config.from_hf(TINY).with_layers(specs)


# Layer numbers differ from the layers' places in the stacks of their kinds.
CONFIG = config_of(CSA, WINDOW, CSA, HCA)
SMALL = config_of(WINDOW, CSA, HCA)
SLOTS = 3
BLOCKS = 8
BLOCK = 16
CONTEXT = 64
QUERY = 3


@functools.partial(jax.jit, donate_argnames="cache")
def run_step(cache, batch, inputs, weights):
    """Writes every layer as a model would; returns the cache and what the tokens see."""
    cache = cache.begin_step(batch)
    reads = []
    for layer, (x, parts) in enumerate(zip(inputs, weights, strict=True)):
        handle = cache.handle(layer, batch).write_swa(x.window)
        if parts:
            index = (x.index_kv, x.index_gate, parts[1]) if len(parts) == 2 else None
            handle = handle.flush(x.kv, x.gate, parts[0], index=index)
        entries = () if handle.spec.group is None else handle.gather_all_compressed_kv()
        reads.append(Reads(*handle.gather_swa_kv(), *entries))
        cache = handle.cache
    return cache, tuple(reads)


def pad(array, size, value=-1):
    array = np.asarray(array)
    return np.pad(array, ((0, size - len(array)), *((0, 0),) * (array.ndim - 1)), constant_values=value)


class Pair:
    """A cache with its manager, and the model: every operation is done to both and compared."""

    def __init__(self, config=CONFIG, kv_format="v4", dtype=jnp.bfloat16):
        self.manager = KVCacheManager(
            config, num_blocks=BLOCKS, max_requests=SLOTS, max_context=CONTEXT, block_tokens=BLOCK,
            kv_format=kv_format, dtype=dtype, max_query_tokens=QUERY,
        )  # fmt: skip
        self.rng = np.random.default_rng(11)
        self.weights = random_weights(self.manager.schema, self.rng)
        self.cache = poisoned_cache(self.manager.schema)
        self.reference = ReferenceCache(self.cache, self.weights)
        self.reserved = {}  # slot -> blocks
        self.high_water = {}  # slot -> the longest it has been

    def length(self, slot):
        return len(self.reference.requests[slot].tokens)

    def admit(self):
        slot = next((s for s in range(SLOTS) if s not in self.reserved), None)
        if slot is None:
            return self.refuses(CacheFullError, "1 slots are needed, 0 of 3 are free", self.manager.admit)
        assert self.manager.admit() == slot
        self.reference.admit(slot)
        self.reserved[slot] = self.high_water[slot] = 0

    def release(self, slot):
        self.manager.release(slot)
        self.reference.release(slot)
        del self.reserved[slot], self.high_water[slot]

    def rewind(self, slot, count):
        if count > self.length(slot) - max(0, self.high_water[slot] - (QUERY - 1)):
            return self.refuses(ValueError, "cannot rewind", self.manager.rewind, slot, count)
        self.manager.rewind(slot, count)
        self.reference.rewind(slot, count)

    def allocate(self, slot, count):
        if self.reserve({slot: count}, self.manager.allocate, slot, count):
            self.manager.allocate(slot, count)

    def step(self, counts):
        """Brings so many random tokens to each slot, {slot: count}; whether there was room for them."""
        ids = {slot: [0] * count for slot, count in counts.items()}
        if not self.reserve(counts, self.manager.prepare_forward, ids):
            return False
        batch = self.manager.prepare_forward(ids)
        tokens = {slot: [random_token(self.manager.schema, self.rng) for _ in new] for slot, new in ids.items()}
        expected = self.reference.step(tokens, [row for row in batch.new_blocks.tolist() if row[0] >= 0])
        for slot in counts:
            self.high_water[slot] = max(self.high_water[slot], self.length(slot))
        self.cache, reads = self.run(batch, [token for new in tokens.values() for token in new])
        real = sum(counts.values())
        same_bytes(jax.tree.map(lambda *rows: np.stack(rows), *expected), jax.tree.map(lambda x: x[:real], reads))
        assert not any(np.asarray(x[real:]).any() for x in jax.tree.leaves(reads)), "padding tokens see something"
        self.check()
        return True

    def run(self, batch, tokens):
        """Runs the batch padded to one of three sizes, so that few programs are compiled."""
        assert batch.prefill == (max(np.bincount(batch.slots[batch.slots >= 0])) > QUERY)
        size = 128 if batch.prefill else len(batch.slots) if len(batch.slots) == SLOTS else 16
        sizes = dict(token_ids=size, positions=size, slots=size, new_blocks=SLOTS + 128 // BLOCK)
        batch = dataclasses.replace(batch, **{name: pad(getattr(batch, name), n) for name, n in sizes.items()})
        # Padding tokens bring NaN: whatever lets it through shows.
        inputs = jax.tree.map(lambda *rows: pad(np.stack(rows), size, np.nan), *tokens)
        return run_step(self.cache, batch, inputs, self.weights)

    def reserve(self, counts, operation, *args):
        """Whether blocks for so many more tokens can be had; checks the refusal if not."""
        if any(self.length(slot) + count > CONTEXT for slot, count in counts.items()):
            return self.refuses(ValueError, "max_context=64", operation, *args)
        wanted = {slot: max(self.reserved[slot], -(-(self.length(slot) + n) // BLOCK)) for slot, n in counts.items()}
        if sum((self.reserved | wanted).values()) > BLOCKS:
            return self.refuses(CacheFullError, r"\d blocks are needed, \d of 8 are free", operation, *args)
        self.reserved |= wanted
        return True

    def refuses(self, error, message, operation, *args):
        before = copy.deepcopy((self.manager.requests.states, vars(self.manager.requests.allocator)))
        with pytest.raises(error, match=message):
            operation(*args)
        assert before == (self.manager.requests.states, vars(self.manager.requests.allocator))
        return False

    def check(self):
        same_bytes(self.reference.pools, self.cache)
        assert self.manager.free_slots == SLOTS - len(self.reserved)
        assert self.manager.free_blocks == BLOCKS - sum(self.reserved.values())
        for slot, request in self.reference.requests.items():
            assert self.manager.length(slot) == self.length(slot)
            row = self.manager.block_table[slot].tolist()
            assert row == request.blocks + [-1] * (CONTEXT // BLOCK - len(request.blocks))


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def live(self, slot):
        """A live slot for any number."""
        slots = sorted(self.pair.reserved)
        return slots[slot % len(slots)]

    @rule()
    def admit(self):
        self.pair.admit()

    @precondition(lambda self: self.pair.reserved)
    @rule(counts=st.tuples(*[st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 17, 40])] * SLOTS), fit=st.integers(0, 7))
    def step(self, counts, fit):
        room = {slot: CONTEXT - self.pair.length(slot) if fit else CONTEXT for slot in self.pair.reserved}
        counts = {slot: min(counts[slot], most) for slot, most in room.items()}
        counts = {slot: count for slot, count in counts.items() if count}
        if counts:
            self.pair.step(counts)

    @precondition(lambda self: self.pair.reserved)
    @rule(steps=st.integers(1, 6))
    def decode(self, steps):
        """Every request one token at a time."""
        for _ in range(steps):
            self.pair.step({slot: 1 for slot in self.pair.reserved})

    @precondition(lambda self: self.pair.reserved)
    @rule(refused=st.lists(st.tuples(*[st.integers(0, QUERY - 1)] * SLOTS), min_size=1, max_size=6))
    def speculate(self, refused):
        """Every request proposes as many tokens as a decode step takes, and forgets those that are refused."""
        for counts in refused:
            if self.pair.step({slot: QUERY for slot in self.pair.reserved}):
                for slot in self.pair.reserved:
                    self.pair.rewind(slot, counts[slot])

    @precondition(lambda self: self.pair.reserved)
    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(0, QUERY))
    def rewind(self, slot, count):
        self.pair.rewind(self.live(slot), count)

    @precondition(lambda self: self.pair.reserved)
    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(0, 40))
    def allocate(self, slot, count):
        self.pair.allocate(self.live(slot), count)

    @precondition(lambda self: self.pair.reserved)
    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot):
        self.pair.release(self.live(slot))

    @invariant()
    def the_cache_equals_the_model(self):
        self.pair.check()


CacheMachine.TestCase.settings = settings(max_examples=6, stateful_step_count=16, deadline=None)
TestAnyLifeOfRequests = CacheMachine.TestCase


@pytest.mark.parametrize(
    ("config", "kv_format", "dtype"),
    [
        (CONFIG, "v4", jnp.bfloat16),
        (SMALL, "v41", jnp.bfloat16),
        (SMALL, "per_entry", jnp.bfloat16),
        (SMALL, "plain", jnp.float32),
    ],
    ids=["v4", "v41", "per_entry", "plain"],
)
def test_one_life_in_every_format(config, kv_format, dtype):
    """Phases, ring wrap, rewinds to a window's last token, running out of blocks, reuse of a slot and its blocks."""
    pair = Pair(config, kv_format, dtype)
    for _ in range(SLOTS):
        pair.admit()
    for counts in ({0: 25, 1: 7, 2: 17}, {0: 1, 1: 1, 2: 1}, {0: 5, 1: 24}, {0: 2, 1: 1}):
        assert pair.step(counts)
    # From 33 tokens back to 31: the next one closes windows of both rates, which reach back to the rings' oldest rows.
    for slot in (0, 1):
        assert pair.length(slot) == 33
        pair.rewind(slot, QUERY - 1)
    assert pair.step({0: 1, 1: 1})
    assert not pair.step({2: 20})
    pair.release(0)
    pair.admit()
    assert pair.step({0: 2})
    pair.rewind(0, 2)
    assert pair.step({0: 21, 2: 14})
    assert pair.step({2: 1, 0: 1})
