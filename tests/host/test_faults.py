"""An exception at any line of any host operation: it is then as if the operation had never begun, or had ended."""

import dataclasses

import jax
import numpy as np
import pytest

from dsv4_jax.host import PrefixCache, load_request, offload, resume, save_request
from tests.host.faults import Fault, Inject, consistent
from tests.host.managers import BLOCK, ids, make, step
from tests.ops.pools import same_bytes


class World:
    """A manager with a prefix cache and requests of all kinds, always the same."""

    def __init__(self, folder):
        self.manager = make(num_blocks=9, max_requests=5)
        self.prefix = PrefixCache(self.manager, key="", debug=True)
        self.cache = self.manager.init_cache()
        self.path = folder / "request"
        # Slot 0 holds 40 tokens, slot 1 shares its blocks, slot 2 has come and gone: its blocks are cached.
        for n, start in ((40, 0), (48, 0), (33, 90)):
            slot, hit, self.cache = self.prefix.admit(self.cache, ids(n, start))
            for at in range(hit, n, BLOCK):
                self.cache = step(self.manager, self.cache, slot, ids(n, start)[at : at + BLOCK])
                self.prefix.observe(self.cache, slot, ids(n, start))
        save_request(self.path, self.manager, self.cache, slot, ids(33, 90))
        self.parked, self.cache = offload(self.manager, self.cache, slot)
        self.bytes = jax.tree.map(np.array, self.cache)

    def state(self):
        """What callers see: requests, and files by name."""
        states = {
            slot: dataclasses.replace(state, cached_blocks=[node.digest for node in state.cached_blocks])
            for slot, state in self.manager.requests.states.items()
        }
        return states, {path.name for path in self.path.parent.iterdir()}

    def is_lost(self):
        return any(x.is_deleted() for x in jax.tree.leaves(self.cache))

    def drain(self):
        """Ends everything; every slot and block must come back."""
        for slot in self.manager.slots:
            self.manager.release(slot)
        self.prefix.evict(9)
        consistent(self.manager, self.prefix)
        assert (self.manager.free_slots, self.manager.free_blocks) == (5, 9)


OPERATIONS = {
    "admit": lambda w: w.manager.admit(ids(5)),
    "allocate": lambda w: w.manager.allocate(0, 2 * BLOCK),
    "chunk": lambda w: w.manager.prepare_forward({0: ids(9, 40), 1: ids(1, 48)}, reserve=2),
    "decode": lambda w: w.manager.prepare_forward({0: ids(1, 40), 1: ids(1, 48)}),
    "advance": lambda w: w.manager.advance(0, 3),
    "rewind": lambda w: w.manager.rewind(0, 2),
    "release": lambda w: w.manager.release(1),
    "fork": lambda w: w.manager.fork(w.cache, 0, 3),
    "truncate": lambda w: w.manager.truncate(w.cache, 0, 38),
    "truncate a shared block": lambda w: w.manager.truncate(w.cache, 1, 46),
    "truncate to a snapshot": lambda w: w.manager.truncate(w.cache, 0, 20),
    "hit": lambda w: w.prefix.admit(w.cache, ids(60, 90)),
    "miss": lambda w: w.prefix.admit(w.cache, ids(60, 7)),
    "save": lambda w: save_request(w.path.with_name("other"), w.manager, w.cache, 0, ids(40)),
    "load": lambda w: load_request(w.path, w.manager, w.cache),
    "offload": lambda w: offload(w.manager, w.cache, 0),
    "resume": lambda w: resume(w.manager, w.cache, w.parked),
}


@pytest.mark.parametrize("opcodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lines", "opcodes"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_anywhere_loses_nothing(name, opcodes, tmp_path):
    world = World(tmp_path)
    n = 0
    undone = 0
    # Every line is tested, and of the opcodes within lines some. Most of those around a file read or write it, and
    # change nothing else; those of a load end with a resume's.
    every = {"save": 5, "load": 23}.get(name, 3) if opcodes else 1
    before = world.state()
    OPERATIONS[name](world)
    after = world.state()
    assert before != after
    world.drain()
    for path in after[1] - before[1]:
        world.path.with_name(path).unlink()
    world = World(tmp_path)
    while True:
        try:
            with Inject(n, opcodes=opcodes):
                OPERATIONS[name](world)
        except Fault as fault:
            where = f"after a fault in step {n} of {name}, {fault}"
            consistent(world.manager, world.prefix)
            state = world.state()
            assert state in (before, after), where
            undone += state == before
            n += every
            if state == after or world.is_lost():
                # It had ended, or its launch had: whoever asked for it has no cache to go on with.
                world.drain()
                for path in state[1] - before[1]:
                    world.path.with_name(path).unlink()
                world = World(tmp_path)
            elif n % 8 == 0:
                same_bytes(world.cache, world.bytes)
        else:
            break
    assert world.state() == after and undone >= 3
    world.drain()


@pytest.mark.parametrize("opcodes", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lines", "opcodes"])
def test_a_fault_while_learning_or_giving_up_loses_no_block(opcodes):
    """`observe` and `evict` may have done a part by then; asked again they do the rest."""
    manager = make()
    prefix = PrefixCache(manager, key="", debug=True)
    cache = manager.init_cache()
    n = 0
    every = 5 if opcodes else 1
    faults = True
    counts = {"observe": set(), "evict": set()}

    def attempt(name, *args):
        operation = getattr(prefix, name)
        try:
            with Inject(n, opcodes=opcodes):
                operation(*args)
        except Fault:
            consistent(manager, prefix)
            counts[name].add(prefix.metrics.blocks)
            operation(*args)
            return True
        return False

    while faults:
        slot = manager.admit()
        cache = step(manager, cache, slot, ids(48))
        faults = attempt("observe", cache, slot, ids(48))
        consistent(manager, prefix)
        assert [node.length for node in manager.requests.state(slot).cached_blocks] == [16, 32, 48]
        assert manager.requests.state(slot).cached_blocks[-1].snapshot is not None
        prefix.check(cache)
        manager.release(slot)
        faults |= attempt("evict", 9)
        assert prefix.metrics.blocks == prefix.metrics.snapshots == 0 and manager.free_blocks == 12
        consistent(manager, prefix)
        n += every
    assert counts == {"observe": set(range(4)), "evict": set(range(4))}
