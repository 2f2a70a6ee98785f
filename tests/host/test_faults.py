"""An exception at any point of any host operation: the operation is then as if it had never been asked for."""

import inspect
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dsv4_jax.host
from dsv4_jax.host import PrefixCache, load_request, offload, resume, save_request
from tests.host.books import BLOCK, book, ids, make, step
from tests.ops.pools import same_bytes


HOST = str(Path(dsv4_jax.host.__file__).parent)


class Fault(Exception):
    """What is injected."""


TRANSFERS = {inspect.unwrap(f).__code__ for f in (jax.device_put, jax.device_get)}


class Inject:
    """Raises `Fault` as the n-th function of the host package, or transfer, is called."""

    def __init__(self, n):
        self.left = n

    def __enter__(self):
        sys.setprofile(self.profile)

    def __exit__(self, *_):
        sys.setprofile(None)

    def profile(self, frame, event, _):
        code = frame.f_code
        # A generator that goes on is no call.
        if event == "call" and frame.f_lasti <= 0 and (code.co_filename.startswith(HOST) or code in TRANSFERS):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise Fault


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

    def state(self):
        nodes = [
            (node.digest, node.block, node.children, node.snapshot is None, node.used, node.hits)
            for node in self.prefix._nodes.values()
        ]
        return book(self.manager), nodes, self.prefix.metrics, sorted(p.name for p in self.path.parent.iterdir())

    def consistent(self):
        """Every reference has an owner and the tree knows its children."""
        held = np.zeros(self.manager.schema.num_blocks, int)
        for page in self.manager._requests.values():
            np.add.at(held, page.blocks, 1)
        nodes = self.prefix._nodes.values()
        np.add.at(held, [node.block for node in nodes], 1)
        free, references = self.manager.allocator.state()
        assert references == held.tolist() and sorted(free) == np.flatnonzero(held == 0).tolist()
        assert [n.children for n in nodes] == [sum(m.parent is n for m in nodes) for n in nodes]
        assert self.prefix.metrics.blocks == len(nodes)
        assert self.prefix.metrics.snapshots == sum(n.snapshot is not None for n in nodes)


OPERATIONS = {
    "admit": lambda w: w.manager.admit(ids(5)),
    "allocate": lambda w: w.manager.allocate(0, 2 * BLOCK),
    "prepare": lambda w: w.manager.prepare_forward({0: ids(9, 40), 1: ids(1, 48)}, reserve=2),
    "advance": lambda w: w.manager.advance(0, 3),
    "rewind": lambda w: w.manager.rewind(0, 2),
    "release": lambda w: w.manager.release(1),
    "fork": lambda w: w.manager.fork(w.cache, 0, 3),
    "truncate": lambda w: w.manager.truncate(w.cache, 0, 38),
    "truncate a shared block": lambda w: w.manager.truncate(w.cache, 1, 46),
    "truncate to a snapshot": lambda w: w.manager.truncate(w.cache, 0, 20),
    "hit": lambda w: w.prefix.admit(w.cache, ids(60, 90)),
    "miss": lambda w: w.prefix.admit(w.cache, ids(60, 7)),
    "evict": lambda w: w.prefix.evict(2),
    "save": lambda w: save_request(w.path, w.manager, w.cache, 0, ids(40)),
    "load": lambda w: load_request(w.path, w.manager, w.cache),
    "offload": lambda w: offload(w.manager, w.cache, 0),
    "resume": lambda w: resume(w.manager, w.cache, w.parked),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_anywhere_undoes_the_operation(name, tmp_path):
    world, bytes_before, n = World(tmp_path), None, 0
    while True:
        before = world.state()
        bytes_before = bytes_before or jax.tree.map(np.array, world.cache)
        try:
            with Inject(n):
                OPERATIONS[name](world)
        except Fault:
            world.consistent()
            # Cached blocks may have been given up for the operation.
            same = slice(None) if world.prefix.metrics.evicted_blocks == before[2].evicted_blocks else slice(3, None)
            assert world.state()[same] == before[same], f"after a fault at call {n} of {name}"
            if n % 5 == 0:
                same_bytes(world.cache, bytes_before)
            n += 1
        else:
            break
    assert n >= 2
    world.consistent()
    if name != "save":
        assert world.state() != before


def test_a_fault_while_learning_loses_no_block(tmp_path):
    """`observe` may have learnt some blocks by then; asked again it learns the rest."""
    n, learnt = 0, set()
    while True:
        world = World(tmp_path)
        world.cache = step(world.manager, world.cache, 0, ids(40, 40))
        try:
            with Inject(n):
                world.prefix.observe(world.cache, 0, ids(80))
        except Fault:
            world.consistent()
            learnt.add(world.prefix.metrics.blocks)
            world.prefix.observe(world.cache, 0, ids(80))
            n += 1
        else:
            break
        world.consistent()
        assert [node.length for node in world.manager.request(0).sealed] == [16, 32, 48, 64, 80]
        assert world.manager.request(0).sealed[-1].snapshot is not None
        world.prefix.check(world.cache)
    assert len(learnt) > 1
