"""Exceptions at any point, and what must hold after them."""

import sys
from pathlib import Path

import numpy as np

import dsv4_jax.engine
import dsv4_jax.host


HOST = tuple(str(path) for path in Path(dsv4_jax.host.__file__).parent.rglob("*.py"))
ENGINE = tuple(
    str(Path(dsv4_jax.engine.__file__).with_name(f"{n}.py"))
    for n in ("scheduler", "engine", "requests", "runner", "steps")
)


class Fault(BaseException):
    """Comes from outside, as a KeyboardInterrupt does.

    Attributes:
      function: in which it came.
    """

    def __init__(self, code, line):
        super().__init__(f"{Path(code.co_filename).name}:{line}")
        self.function = code.co_name


class Inject:
    """Raises `Fault` at the n-th line that runs in some files: before it, or with `opcodes` in the middle of it."""

    def __init__(self, n: int, files: tuple[str, ...] = HOST, opcodes: bool = False):
        self.left = n
        self.files = frozenset(files)
        self.event = "opcode" if opcodes else "line"

    def __enter__(self):
        self.before = sys.gettrace()
        # CPython 3.12 looks only here whether anybody wants to hear of opcodes.
        sys._getframe().f_trace_opcodes = self.event == "opcode"
        sys.settrace(self.enter)

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self.trace

    def trace(self, frame, event, _):
        # Opcodes without a line are those of a generator that is being forgotten: errors there go nowhere.
        if event == self.event and frame.f_lineno is not None:
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise Fault(frame.f_code, frame.f_lineno)
        return self.trace


def consistent(manager, prefix=None):
    """Every reference has an owner, and the prefix tree's counters are what one would count."""
    allocator = manager.requests.allocator
    held = np.zeros(allocator.num_blocks, int)
    nodes = []
    for state in manager.requests.states.values():
        np.add.at(held, state.blocks, 1)
    if prefix is not None:
        tree = prefix._tree
        nodes = list(tree.nodes.values())
        np.add.at(held, [node.block for node in nodes], 1)
    free, references = allocator.state()
    assert references == held.tolist() and sorted(free) == np.flatnonzero(held == 0).tolist()
    if prefix is None:
        return
    assert all(tree.nodes[tree.key(node)] is node and node.alive for node in nodes)
    assert len({n.last_used for n in nodes}) == len(nodes)
    assert all(n.in_use == (allocator.references(n.block) > 1) for n in nodes)
    order = by_age(manager, nodes)
    for part in range(allocator.num_shards):
        mine = [n for n in order if allocator.shard(n.block) == part]
        assert list(tree.idle[part].items()) == [(n.block, n) for n in mine]
        assert not mine or tree.oldest([part]) is mine[0]
    snapshots = sum(n.snapshot is not None for n in nodes)
    assert (prefix.metrics.blocks, prefix.metrics.snapshots) == (len(nodes), snapshots)
    assert prefix.metrics.snapshot_bytes <= prefix.max_bytes


def age(node):
    return node.last_used


def by_age(manager, nodes):
    """Nodes whose blocks no request holds, in the order in which they are given up."""
    references = manager.requests.allocator.references
    return sorted((node for node in nodes if references(node.block) == 1), key=age)
