"""Mailboxes, through which the GPUs of one process add up: each stores its values into the memory of all others.

Each GPU has a mailbox, memory that never moves and whose address all know. A value travels with the number of the call,
both in 8 bytes that are written at once, so there are no barriers, and nothing has to be cleared: a thread reads its
places again until all hold the number of its call. The number is counted in the mailbox itself, so it follows what ran
on the GPU, whatever the host did or did not launch, and several programs, kernels and models share a mailbox.

The program must have waited for all its GPUs before, by a collective of XLA's: CUDA loads a kernel on one GPU only when
no kernel waits on another (its "lazy loading"), and XLA loads all of a program's before the collective.

Two generations of places are enough. A GPU sends call n + 2, into the places of call n, after it has received call
n + 1 of all others; these had then begun call n + 1, so had ended call n. This holds for each block of threads by
itself, which has its own places and counter: blocks meet their equals on the other GPUs alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.checks import check_array, check_rules


GENERATIONS = 2
BLOCKS = 128  # all of which run at once
ROUNDS = 4  # most that a thread goes through
UNIT = 8  # values of a thread and round
PLACE = 16  # bytes: two words, each followed by the number of the call
HALVES = 2  # places of a unit
OWN, PEERS = 1, 2  # in the table: this GPU's mailbox, and the first of all
PATIENCE = 1 << 25  # times that a thread looks, half a minute: then another GPU has failed, and this one stops too


def check_table(table: jax.Array, *, interpret: bool) -> int:
    """The number of GPUs that a table of mailboxes names.

    Args:
      table: [2 * (2 + GPUs)] uint32, low and high halves of: this GPU's number among them; the address of its mailbox;
        the addresses of all mailboxes, by number. See `mailbox_bytes`.
      interpret: has to be False: the interpreter knows one GPU.

    Raises:
      NotImplementedError: these are not 2 to 8, or are interpreted.
    """
    check_array("table", table, jnp.uint32, None)
    ranks = gpus(table)
    check_rules({"several GPUs: it is not interpreted": not interpret, f"2 to 8 GPUs, got {ranks}": 2 <= ranks <= 8})
    return ranks


def gpus(table: Any) -> int:
    """How many GPUs an array or a reference of `check_table` names."""
    return table.shape[0] // 2 - PEERS


def place(generation: Any, rank: Any, step: int, block: Any, thread: Any, *, ranks: int) -> Any:
    """Bytes before the first place of a unit in a mailbox; the second is THREADS * PLACE further on."""
    row = ((generation * ranks + rank) * ROUNDS + step) * BLOCKS + block
    return (row * (HALVES * THREADS) + thread) * PLACE


def counter(block: Any, *, ranks: int) -> Any:
    """Bytes before the counter of a block of threads in a mailbox."""
    return block * 4 + GENERATIONS * ranks * ROUNDS * BLOCKS * HALVES * THREADS * PLACE


def mailbox_bytes(ranks: int) -> int:
    """Of each GPU's mailbox; zeros at first."""
    return counter(BLOCKS, ranks=ranks)


def exchange(
    block: U32,
    table: Any,
    steps: Sequence[tuple[U32, Callable[[], list[U32]], Callable[[list[U32]], None]]],
    *,
    ranks: int,
) -> None:
    """Code of one thread: sends units of 8 values, then receives those of all GPUs, and adds them up in their order.

    Sums are float32 and rounded once.

    Args:
      block: number of the block of threads, below `BLOCKS`.
      table: as for `check_table`, in global memory.
      steps: up to `ROUNDS`, of each: whether this thread takes part; what loads its unit, four words of bfloat16; what
        stores the sum's.
      ranks: GPUs.
    """
    addresses = [load_address(mlir.at(mlir.global_pointer(table), 8 * i)) for i in range(PEERS + ranks)]
    rank, own, peers = U32(arith.trunci(mlir.int_type(), addresses[0])), addresses[OWN], addresses[PEERS:]
    thread = U32(mlir.thread())
    own_counter = further(own, counter(block, ranks=ranks))
    call = U32(mlir.ptx("ld.volatile.global.u32 $0, [$1];", own_counter, results=mlir.int_type())) + 1
    thread_ops.sync()  # all threads have read the counter
    with thread_ops.when(thread.equals(0)):
        mlir.ptx("st.volatile.global.u32 [$0], $1;", own_counter, call.value)
    generation = call & (GENERATIONS - 1)

    for step, (here, load, _) in enumerate(steps):
        with thread_ops.when(here):
            mine = load()
            to = place(generation, rank, step, block, thread, ranks=ranks)
            for peer in peers:
                send(further(peer, to), mine, call)

    for step, (here, _, store) in enumerate(steps):
        with thread_ops.when(here):
            start = further(own, place(generation, 0, step, block, thread, ranks=ranks))
            apart = place(0, 1, 0, 0, 0, ranks=ranks)
            values = [[x for word in four for x in words.unpack(word)] for four in receive(start, call, ranks, apart)]
            total = [functools.reduce(arith.addf, terms) for terms in zip(*values, strict=True)]
            store([words.pack(*total[i : i + 2]) for i in range(0, UNIT, 2)])


def load_address(pointer: Any) -> Any:
    return mlir.ptx("ld.global.nc.b64 $0, [$1];", pointer, results=mlir.int_type(64))


def further(address: Any, offset: Any) -> Any:
    """An address some bytes further on."""
    return arith.addi(address, arith.extui(mlir.int_type(64), U32(offset).value))


def send(address: Any, four: list[U32], call: U32) -> None:
    """Stores four words, each with the number of the call, into the two places from an address on."""
    for half in range(HALVES):
        low, high = (word.value for word in four[2 * half : 2 * half + 2])
        code = f"""{{ .reg .b64 a, b; mov.b64 a, {{$1, $3}}; mov.b64 b, {{$2, $3}};
            st.relaxed.sys.global.v2.b64 [$0 + {half * THREADS * PLACE}], {{a, b}}; }}"""
        mlir.ptx(code, address, low, high, call.value)


def receive(address: Any, call: U32, ranks: int, apart: int) -> list[list[U32]]:
    """Waits for four words of each GPU, in places that begin `apart` bytes after each other."""
    count = 2 * HALVES * ranks
    loads, checks = [], []
    for i in range(HALVES * ranks):
        rank, half = divmod(i, HALVES)
        at = rank * apart + half * THREADS * PLACE
        loads.append(f"ld.relaxed.sys.global.v2.b64 {{a{i}, b{i}}}, [${count} + {at}];")
        for j, name in enumerate("ab"):
            checks.append(f"mov.b64 {{${2 * i + j}, f}}, {name}{i}; setp.eq.and.u32 p, f, ${count + 1}, p;")
    code = f"""{{ .reg .b64 a<{count}>, b<{count}>; .reg .b32 f, n; .reg .pred p, q;
        mov.u32 n, 0;
        AGAIN: {" ".join(loads)}
        setp.eq.u32 p, n, n; {" ".join(checks)}
        @p bra DONE;
        add.u32 n, n, 1;
        setp.gt.u32 q, n, {PATIENCE}; @q trap;
        bra AGAIN;
        DONE: }}"""
    found = [U32(x) for x in mlir.ptx(code, address, call.value, results=[mlir.int_type()] * count)]
    return [found[i : i + 4] for i in range(0, count, 4)]
