"""Any operations on any requests, done to a cache and to the naive model, whose bytes are compared after each."""

import dataclasses
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv4_jax.host import CacheFullError, KVCacheManager, PrefixCache, load_request, offload, resume, save_request
from tests.cache.naive import NaiveRequest, Tables, run_step
from tests.cache.reference import poisoned_cache
from tests.host.faults import by_age, consistent


PREFILL = 32  # tokens of a step that is no decode step
MUCH = 1 << 30


class Life:
    """A cache whose bytes begin as NaN, its manager and prefix cache, and the naive model of all its requests.

    Operations take two numbers that choose what they are done to; those that find nothing to do do nothing.
    """

    def __init__(self, manager: KVCacheManager, seed: int = 0, every: int | None = 1, snapshots: int = 6):
        self.manager = manager
        self.schema = manager.schema
        self.tables = Tables(self.schema, seed=11)
        self.device_tables = manager.devices.put((self.tables.inputs, self.tables.weights, self.tables.token_map))
        probe = PrefixCache(manager, key="life", max_bytes=MUCH)
        manager.requests.evictor = None
        self.prefix = PrefixCache(manager, key="life", every=every, max_bytes=snapshots * probe.bytes_per_snapshot)
        self.cache = poisoned_cache(self.schema)
        if manager.mesh is not None:
            self.cache = jax.device_put(self.cache, self.cache.shardings(manager.mesh))
        self.lengths = np.full(self.schema.max_requests, -7, np.int32)
        self.rng = np.random.default_rng(seed)
        self.texts = self.rng.integers(0, self.schema.config.vocab_size, (3, self.schema.max_context))
        self.requests: dict[int, NaiveRequest] = {}
        self.cached = {name: [np.array(x) for x in jax.tree.leaves(g.paged)] for name, g in self.cache.groups.items()}
        self.cached_by = {}  # block -> the node whose entries `cached` has
        self.pending: dict[int, list[int]] = {}  # ids to be run before anything else
        self.histories: list[list[int]] = []  # of requests that ended: some come back
        self.offloaded = []
        self.saved = []
        self.folder = tempfile.TemporaryDirectory()
        self.compared = self.differing = 0  # bytes
        self.done = dict.fromkeys(OPERATIONS, 0)
        self.refused = 0

    def apply(self, name: str, a: int, b: int) -> None:
        """One operation, then every byte of every request."""
        before = self.host_state()
        # Nothing may read the device's lengths: a rewind leaves them behind.
        self.cache = dataclasses.replace(self.cache, lengths=self.manager.devices.put(self.lengths, "slots"))
        try:
            if getattr(self, name)(a, b) is not False:
                self.done[name] += 1
        except CacheFullError:
            self.refused += 1
            assert before == self.host_state(), f"{name} changed the host's state and then refused"
        self.check(name)

    def host_state(self):
        """All the manager knows."""
        return self.manager.requests.states, self.manager.requests.allocator.state()

    # --- operations; False = there was nothing to do ---

    def admit(self, a, b):
        ids = self.prompt(a, b)
        slot, hit, self.cache = self.prefix.admit(self.cache, ids)
        assert hit % self.schema.block_tokens == 0 and hit < len(ids)
        self.requests[slot] = NaiveRequest(self.tables)
        self.requests[slot].extend(ids[:hit])
        self.requests[slot].min_length = hit
        self.pending[slot] = ids[hit:]

    def chunk(self, a, b):
        """Some tokens to some requests."""
        share = PREFILL // max(1, len(self.requests))
        counts = np.random.default_rng((a, b)).integers(0, share + 1, self.schema.max_requests)
        return self.step({slot: int(counts[slot]) for slot in self.requests})

    def decode(self, a, b):
        """One token to every request."""
        return self.step({slot: 1 for slot in self.requests})

    def draft(self, a, b):
        """A draft of any length, of which any number of tokens is rejected."""
        if (slot := self.pick(a)) is None or self.pending[slot]:
            return False
        count = min(1 + b % self.schema.max_query_tokens, self.room(slot))
        if not count or self.step({slot: count}, observe=False) is False:
            return False
        rejected = b // 7 % count
        self.manager.rewind(slot, rejected)
        self.requests[slot].cut(len(self.requests[slot].ids) - rejected)
        self.observe(slot)

    def fork(self, a, b):
        if (slot := self.pick(a)) is None or not self.requests[slot].ids:
            return False
        slots, self.cache = self.manager.fork(self.cache, slot, 1 + b % 2)
        for child in slots:
            self.requests[child] = self.requests[slot].copy()
            self.pending[child] = list(self.pending[slot])

    def truncate(self, a, b):
        if (slot := self.pick(a)) is None:
            return False
        request = self.requests[slot]
        length = b % (len(request.ids) + 1)
        free = length >= request.min_length
        start, self.cache = self.manager.truncate(self.cache, slot, length)
        assert start == length if free else start <= length and start % self.schema.block_tokens == 0
        # Later operations run the tokens in between again, and half of the time go on with other ones.
        self.pending[slot] = request.ids[start:length] + (self.other_ids(slot, length) if b // 64 % 2 else [])
        request.cut(start)
        request.min_length = request.min_length if free else start

    def rewind(self, a, b):
        """Some tokens back by arithmetic alone, and on with others; refused where others read what would be written."""
        if (slot := self.pick(a)) is None:
            return False
        request = self.requests[slot]
        block_tokens = self.schema.block_tokens
        length = len(request.ids) - b % (len(request.ids) - request.min_length + 1)
        blocks = self.manager.requests.state(slot).blocks[length // block_tokens :]
        if any(self.manager.requests.allocator.references(block) > 1 for block in blocks):
            with pytest.raises(ValueError, match="is shared; use truncate"):
                self.manager.rewind(slot, len(request.ids) - length)
            _, self.cache = self.manager.truncate(self.cache, slot, length)
        else:
            self.manager.rewind(slot, len(request.ids) - length)
        request.cut(length)
        self.pending[slot] = self.other_ids(slot, length)

    def evict(self, a, b):
        free = self.manager.free_blocks
        oldest = by_age(self.manager, self.prefix._tree.nodes.values())
        freed = self.prefix.evict(a % 4)
        assert freed == min(a % 4, len(oldest)) and self.manager.free_blocks == free + freed
        assert [node.alive for node in oldest] == [i >= freed for i in range(len(oldest))]

    def cancel(self, a, b):
        """Ends a request for good, or preempts it: its history may be admitted again."""
        if (slot := self.pick(a)) is None:
            return False
        self.manager.release(slot)
        if history := self.requests.pop(slot).ids + self.pending.pop(slot):
            self.histories = [*self.histories[-5:], history]

    def offload(self, a, b):
        if (slot := self.pick(a)) is None or not self.requests[slot].ids or len(self.offloaded) > 3:
            return False
        parked, self.cache = offload(self.manager, self.cache, slot)
        self.offloaded.append((parked, self.requests.pop(slot), self.pending.pop(slot)))

    def resume(self, a, b):
        if not self.offloaded:
            return False
        parked, request, pending = self.offloaded[a % len(self.offloaded)]
        slot, self.cache = resume(self.manager, self.cache, parked)
        self.offloaded.pop(a % len(self.offloaded))
        self.requests[slot] = request
        self.pending[slot] = pending

    def save(self, a, b):
        if (slot := self.pick(a)) is None or not self.requests[slot].ids:
            return False
        path = Path(self.folder.name) / f"{b % 3}.safetensors"
        request = self.requests[slot].copy()
        save_request(path, self.manager, self.cache, slot, request.ids)
        self.saved = [kept for kept in self.saved if kept[0] != path] + [(path, request, list(self.pending[slot]))]

    def load(self, a, b):
        if not self.saved:
            return False
        path, request, pending = self.saved[a % len(self.saved)]
        slot, tokens, self.cache = load_request(path, self.manager, self.cache)
        assert tokens.tolist() == request.ids
        self.requests[slot] = request.copy()
        self.pending[slot] = list(pending)

    # --- their parts ---

    def pick(self, a):
        slots = sorted(self.requests)
        return slots[a % len(slots)] if slots else None

    def room(self, slot):
        return self.schema.max_context - len(self.requests[slot].ids)

    def prompt(self, a, b):
        """A new prompt, one that others begin with too, or a history with a new tail."""
        if self.histories and a % 3 == 0:
            ids = list(self.histories[a // 3 % len(self.histories)])[: self.schema.max_context - 1]
        else:
            ids = self.texts[a % 3][: 1 + a // 3 % (self.schema.max_context - 8)].tolist()
        return [*ids, b % 8]

    def other_ids(self, slot, at):
        return self.texts[(slot + 2) % 3][at : at + 3].tolist()

    def next_ids(self, slot, count):
        """What a request runs next: what is pending, else what a text says, seldom with a word of another."""
        if self.pending[slot]:
            return self.pending[slot][:count]
        at = len(self.requests[slot].ids)
        ids = self.texts[slot % 3][at : at + count].copy()
        if self.rng.random() < 0.2:
            changed = self.rng.integers(len(ids))
            ids[changed] = self.texts[(slot + 1) % 3][at + changed]
        return ids.tolist()

    def step(self, counts, observe=True):
        counts = {slot: min(count, self.room(slot)) for slot, count in counts.items()}
        tokens = {slot: self.next_ids(slot, count) for slot, count in counts.items() if count}
        if not tokens:
            return False
        batch = self.manager.prepare_forward(tokens, prefill_size=PREFILL)
        ngrams, self.cache = run_step(self.device_tables, self.cache, batch)
        for slot, ids in tokens.items():
            self.requests[slot].extend(ids)
        if ngrams is not None and self.manager.mesh is None:  # tokens of a mesh are not in the order of `batch.slots`
            self.check_ngrams(batch, np.asarray(ngrams))
        for slot, ids in tokens.items():
            self.pending[slot] = self.pending[slot][len(ids) :]
            if observe:
                self.observe(slot)
        lengths = np.asarray(self.cache.lengths)
        assert all(lengths[slot] == self.manager.length(slot) for slot in tokens)

    def check_ngrams(self, batch, ngrams):
        """Of every token, whatever happened to its request before; padding has those of the start of a request."""
        slots = np.asarray(batch.slots)
        assert (ngrams[slots < 0] == self.tables.token_map[self.schema.config.engram.pad_token_id]).all()
        for slot in set(slots[slots >= 0].tolist()):
            mine = slots == slot
            positions = np.asarray(batch.positions)[mine].tolist()
            np.testing.assert_array_equal(ngrams[mine], self.tables.ngrams(self.requests[slot].ids, positions))

    def observe(self, slot):
        request = self.requests[slot]
        self.prefix.observe(self.cache, slot, request.ids)
        for index, node in enumerate(self.manager.requests.state(slot).cached_blocks):
            if (before := self.cached_by.get(node.block)) is not node:
                assert before is None or not before.alive, f"block {node.block} was cached twice"
                self.cached_by[node.block] = node
                for kind, leaves in request.entries.items():
                    for want, x in zip(self.cached[kind], leaves, strict=True):
                        n = want.shape[2]
                        want[:, node.block] = x[:, index * n : (index + 1) * n]

    # --- the comparison ---

    def check(self, name: str) -> None:
        """Raises AssertionError where the cache, the manager or a request is not what it must be."""
        pools = jax.tree.map(np.asarray, self.cache)
        table = self.manager.block_table
        assert set(self.manager.slots) == self.requests.keys()
        for slot, request in self.requests.items():
            assert (self.manager.length(slot), self.manager.min_length(slot)) == (len(request.ids), request.min_length)
            assert not request.ids or pools.block_table[slot].tolist() == table[slot].tolist()
            # Each part of a mesh numbers its blocks from 0.
            first = self.manager.shards.of(slot) * self.manager.shards.blocks
            wrong, compared = request.differing_bytes(pools, slot, table[slot] + first)
            self.compared += compared
            self.differing += sum(wrong.values())
            assert not wrong, f"after {name}: slot {slot} at {len(request.ids)} tokens differs: {wrong}"
        cached = [node.block for node in self.prefix._tree.nodes.values()]
        for kind, leaves in self.cached.items():
            for have, want in zip(jax.tree.leaves(pools.groups[kind].paged), leaves, strict=True):
                have = have[:, cached]
                want = want[:, cached]
                self.compared += want.nbytes
                if have.tobytes() != want.tobytes():
                    self.differing += int((have.view(np.uint8) != want.view(np.uint8)).sum())
                    raise AssertionError(f"after {name}: cached blocks differ in {kind}")
        consistent(self.manager, self.prefix)

    def drain(self) -> None:
        """Ends everything; every slot and block must come back."""
        for slot in list(self.requests):
            self.manager.release(slot)
        self.prefix.evict(self.schema.num_blocks)
        assert self.manager.free_blocks == self.schema.num_blocks
        assert self.manager.free_slots == self.schema.max_requests
        assert dataclasses.astuple(self.prefix.metrics)[4:7] == (0, 0, 0)
        self.folder.cleanup()


OPERATIONS = {
    "admit": 4, "chunk": 6, "decode": 6, "draft": 6, "fork": 2, "truncate": 3, "rewind": 3, "evict": 1, "cancel": 3,
    "offload": 2, "resume": 2, "save": 1, "load": 1,
}  # fmt: skip


def random_operations(seed: int, n: int):
    """(name, a, b) for `Life.apply`, n times."""
    rng = np.random.default_rng(seed)
    names = list(OPERATIONS)
    weights = np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
    for _ in range(n):
        yield names[rng.choice(len(names), p=weights)], *rng.integers(MUCH, size=2).tolist()
