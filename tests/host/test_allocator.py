"""The block allocator: nothing is handed out twice, nothing is lost, failures change nothing."""

import copy

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from dsv4_jax.host import BlockAllocator, CacheFullError


def state(allocator):
    return copy.deepcopy(vars(allocator))


class AllocatorMachine(RuleBasedStateMachine):
    """Against the plainest model: a list of every reference held, one entry each."""

    held = Bundle("held")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.allocator = BlockAllocator(num_blocks)
        self.references = []

    @rule(target=held, n=st.integers(0, 5))
    def acquire(self, n):
        free = self.allocator.num_free
        if n > free:
            before = state(self.allocator)
            with pytest.raises(CacheFullError, match=f"{n} blocks are needed, {free} of"):
                self.allocator.acquire(n)
            assert state(self.allocator) == before
            return multiple()
        blocks = self.allocator.acquire(n)
        assert len(blocks) == n == len(set(blocks))
        assert not set(blocks) & set(self.references)
        assert all(0 <= block < self.allocator.num_blocks for block in blocks)
        self.references += blocks
        return multiple(*blocks)

    @rule(target=held, block=held)
    def share(self, block):
        self.allocator.share([block])
        self.references.append(block)
        return block

    @rule(block=consumes(held))
    def release(self, block):
        self.allocator.release([block])
        self.references.remove(block)

    @rule(data=st.data())
    def release_of_a_free_block(self, data):
        free = sorted(set(range(self.allocator.num_blocks)) - set(self.references))
        if free:
            before = state(self.allocator)
            with pytest.raises(ValueError, match="has 0 references"):
                self.allocator.release([*self.references[:1], data.draw(st.sampled_from(free))])
            assert state(self.allocator) == before

    @invariant()
    def conserved(self):
        assert self.allocator.num_free == self.allocator.num_blocks - len(set(self.references))
        for block in range(self.allocator.num_blocks):
            assert self.allocator.references(block) == self.references.count(block)


TestAllocatorMachine = AllocatorMachine.TestCase


def test_first_blocks_are_in_order_and_the_last_freed_comes_next():
    allocator = BlockAllocator(4)
    assert allocator.acquire(3) == [0, 1, 2]
    allocator.release([1])
    assert allocator.acquire(2) == [1, 3]


def test_a_shared_block_is_free_after_its_last_owner():
    allocator = BlockAllocator(2)
    [block] = allocator.acquire(1)
    allocator.share([block, block])
    allocator.release([block, block])
    assert (allocator.num_free, allocator.references(block)) == (1, 1)
    allocator.release([block])
    assert (allocator.num_free, allocator.references(block)) == (2, 0)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda a: a.release([0, 0]), "block 0 is released 2 times but has 1 references"),
        (lambda a: a.release([0, 2]), "block 2 is released 1 times but has 0 references"),
        (lambda a: a.release([0, 7]), "block=7 is unknown: ids go from 0 to 2"),
        (lambda a: a.release([0, -1]), "block=-1 is unknown"),
        (lambda a: a.share([0, 2]), "block 2 is free"),
        (lambda a: a.share([0, 3]), "block=3 is unknown"),
        (lambda a: a.acquire(-1), "n=-1 must be at least 0"),
        (lambda a: a.acquire(2), "2 blocks are needed, 1 of 3 are free"),
        (lambda a: a.references(3), "block=3 is unknown"),
    ],
)
def test_misuse_says_what_is_wrong_and_changes_nothing(misuse, message):
    allocator = BlockAllocator(3)
    allocator.acquire(2)
    before = state(allocator)
    with pytest.raises(ValueError, match=message):
        misuse(allocator)
    assert state(allocator) == before


@pytest.mark.parametrize("num_blocks", [0, -3])
def test_no_allocator_without_blocks(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be at least 1"):
        BlockAllocator(num_blocks)
