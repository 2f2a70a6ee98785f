"""Exceptions at any point, and what must hold after them."""

import functools
import gc
import sys
import threading
from pathlib import Path
from types import CodeType, FunctionType

import numpy as np

import dsv4_jax.engine
import dsv4_jax.host


HOST = tuple(str(path) for path in Path(dsv4_jax.host.__file__).parent.rglob("*.py"))
ENGINE = tuple(
    str(Path(dsv4_jax.engine.__file__).with_name(f"{n}.py"))
    for n in ("scheduler", "engine", "requests", "runner", "steps")
)
TOOL = 4  # of `sys.monitoring`: none of those with a purpose
monitoring = sys.monitoring
EVENTS = monitoring.events


class Fault(BaseException):
    """Comes from outside, as a KeyboardInterrupt does.

    Attributes:
      function: in which it came.
    """

    def __init__(self, code, line):
        super().__init__(f"{Path(code.co_filename).name}:{line}")
        self.function = code.co_name


class Inject:
    """Raises `Fault` at the n-th line that runs in some files: before it, or with `opcodes` in the middle of it.

    Only these files' code is watched: `sys.settrace` hears of every call, and most are JAX's.
    """

    def __init__(self, n: int, files: tuple[str, ...] = HOST, opcodes: bool = False):
        self.left = n
        self.files = frozenset(files)
        if opcodes:
            self.callbacks = {EVENTS.INSTRUCTION: self.opcode}
        else:
            self.callbacks = {EVENTS.LINE: self.at, EVENTS.JUMP: self.jump}
        self.thread = threading.get_ident()

    def __enter__(self):
        if monitoring.get_tool(TOOL) is None:
            monitoring.use_tool_id(TOOL, "faults")
        events = sum(self.callbacks)
        for code in codes():
            if monitoring.get_local_events(TOOL, code) != events:
                monitoring.set_local_events(TOOL, code, events)
        for event, callback in self.callbacks.items():
            monitoring.register_callback(TOOL, event, callback)

    def __exit__(self, *_):
        for event in self.callbacks:
            monitoring.register_callback(TOOL, event, None)

    def at(self, code, line):
        # Opcodes without a line are those of a generator that is being forgotten: errors there go nowhere.
        if code.co_filename in self.files and line is not None and threading.get_ident() == self.thread:
            self.left -= 1
            if self.left == -1:
                raise Fault(code, line)

    def opcode(self, code, offset):
        self.at(code, lines_of(code).get(offset))

    def jump(self, code, offset, target):
        """A loop within one line begins again, which is no LINE event."""
        lines = lines_of(code)
        if target < offset and lines.get(offset) == lines.get(target):
            self.at(code, lines[target])


@functools.cache
def codes():
    """Returns the code of all functions of HOST and ENGINE."""
    functions = [x for x in gc.get_objects() if type(x) is FunctionType]
    found = [function.__code__ for function in functions if function.__code__.co_filename in HOST + ENGINE]
    for code in found:  # also of those that it adds
        found += [constant for constant in code.co_consts if type(constant) is CodeType]
    return found


@functools.cache
def lines_of(code):
    """Returns {offset of an instruction: its line or None}."""
    return {at: line for begin, end, line in code.co_lines() for at in range(begin, end, 2)}


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
