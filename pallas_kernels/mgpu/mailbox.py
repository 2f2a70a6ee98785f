"""Mailboxes: buffers through which the GPUs of one process add up values, written by peers without any barrier.

Each GPU owns a mailbox, memory that never moves and whose address all GPUs know. A thread sends its values by storing
them into its slots of every mailbox. It receives values by polling the mailbox of its GPU. Calls of `exchange` are
counted. A thread stores a word of values, 4 bytes, and the count of the call together, as 8 bytes at once. So the
receiver knows that a word has come when the call's count is beside it, and slots need not be cleared. The counter of
calls is part of the mailbox, so different kernels, programs and models can share a mailbox.

Two generations of slots, for even and for odd calls, are enough. A GPU sends the values of call n + 2 into the slots of
call n after it has received the values of call n + 1 from all other GPUs. By then, every other GPU has started call
n + 1, and so finished call n. This holds for each thread block by itself: a block has its own slots and counter, and
exchanges values only with the blocks of the same index on the other GPUs.

Before its first exchange, a program has to run a collective of XLA over all its GPUs. XLA loads all kernels of the
program before the collective. Otherwise, CUDA would load a kernel at its first launch. CUDA cannot load a kernel while
another kernel of the same GPU waits for other GPUs.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith

from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.mlir import THREADS, Scalar
from pallas_kernels.runtime.checks import check_array, check_rules


GENERATIONS = 2  # number of sets of slots, which calls use in turns
BLOCKS = 128  # number of thread blocks whose slots and counters form a bank of the mailbox
BANKS = 2  # number of banks in a mailbox
MAX_BLOCKS = BANKS * BLOCKS  # maximum number of thread blocks of a kernel; the GPU runs them all at once
ROUNDS = 4  # maximum number of units that a thread exchanges in a call
UNIT = 8  # number of bfloat16 values in a unit, which is 16 bytes
SLOT_BYTES = 16  # a slot is two 32-bit words of values, each followed by the 32-bit count of the call
SLOTS_PER_UNIT = 2
# Indices of entries of the table, see `check_table`.
OWN = 1  # index of the address of this GPU's mailbox
PEERS = 2  # index of the address of the mailbox of rank 0; the other ranks' addresses follow in order
# A thread traps after this number of polls, about half a minute, because another GPU has probably failed.
MAX_POLLS = 1 << 25


class Unit(NamedTuple):
    """Eight bfloat16 values that a thread replaces by their sums over the GPUs."""

    active: Scalar  # a condition of one bit: whether this thread exchanges the unit
    load: Callable[[], list[Scalar]]  # returns the thread's values, four words of two bfloat16
    store: Callable[[list[Scalar]], None]  # stores the sum, four words of two bfloat16


def check_table(table: jax.Array, *, interpret: bool) -> None:
    """Raises NotImplementedError unless the table of mailboxes is for 2 to 8 GPUs and the kernel is not interpreted.

    The table is [2 * (2 + GPUs)] uint32. Two words, the low word first, form an entry of 64 bits. The entries are this
    GPU's rank, the address of this GPU's mailbox, and the addresses of all GPUs' mailboxes in the order of ranks.
    """
    check_array("table", table, jnp.uint32, None)
    ranks = _num_ranks(table)
    check_rules({"several GPUs: it is not interpreted": not interpret, f"2 to 8 GPUs, got {ranks}": 2 <= ranks <= 8})


def _num_ranks(table):
    """Returns the number of GPUs of a table of mailboxes, given as an array or as the type of a reference."""
    return table.shape[0] // 2 - PEERS


def slot_offset(generation, rank, round_: int, block, thread, *, ranks: int):
    """Returns the offset of a unit's first slot from the start of its bank, in bytes.

    The unit's second slot is THREADS * SLOT_BYTES bytes further.

    Args:
      generation: 0 or 1, count of the call modulo 2.
      rank: rank of the sender.
      round_: index of the unit among the thread's units.
      block: index of the thread block in the bank.
      thread: index of the thread in its block.
      ranks: number of GPUs.
    """
    row = ((generation * ranks + rank) * ROUNDS + round_) * BLOCKS + block
    return (row * (SLOTS_PER_UNIT * THREADS) + thread) * SLOT_BYTES


def counter_offset(block, *, ranks: int):
    """Returns the offset of a thread block's counter of calls from the start of its bank, in bytes.

    `block` is the index of the thread block in the bank, and `ranks` the number of GPUs.
    """
    return block * 4 + GENERATIONS * ranks * ROUNDS * BLOCKS * SLOTS_PER_UNIT * THREADS * SLOT_BYTES


def mailbox_bytes(ranks: int) -> int:
    """Returns the number of bytes of a GPU's mailbox, all of which have to be zero before the first call."""
    return BANKS * _bank_bytes(ranks)


def _bank_bytes(ranks):
    return counter_offset(BLOCKS, ranks=ranks)


def exchange(block: Scalar, blocks: int, table_gmem, units: Sequence[Unit]) -> None:
    """Emits code by which a thread sums each of its units, eight bfloat16 values, over the GPUs.

    Values are added in float32, in the order of ranks, and the sum is rounded to bfloat16. `Unit` says how a thread
    loads values and stores sums.

    Args:
      block: index of the thread block.
      blocks: number of thread blocks of the kernel, up to `MAX_BLOCKS`.
      table_gmem: table of mailboxes, see `check_table`.
      units: up to `ROUNDS` units of this thread.
    """

    def load_address(i):
        pointer = mlir.at(mlir.global_pointer(table_gmem), 8 * i)
        return mlir.ptx("ld.global.nc.b64 $0, [$1];", pointer, results=mlir.int_type(64))

    ranks = _num_ranks(table_gmem.type)
    addresses = [load_address(i) for i in range(PEERS + ranks)]
    rank = Scalar(arith.trunci(mlir.int_type(), addresses[0]))
    own_mailbox = addresses[OWN]
    peers = addresses[PEERS:]
    if blocks > BLOCKS:
        bank = (block // BLOCKS) * _bank_bytes(ranks)
        block = block % BLOCKS
        own_mailbox, *peers = (_add_offset(address, bank) for address in (own_mailbox, *peers))
    thread = mlir.thread()
    counter = _add_offset(own_mailbox, counter_offset(block, ranks=ranks))
    call = thread_ops.ptx("ld.volatile.global.u32 $0, [$1];", counter) + 1
    thread_ops.sync()  # waits until all threads of the block have read the counter
    with thread_ops.when(thread.equals(0)):
        mlir.ptx("st.volatile.global.u32 [$0], $1;", counter, call)
    generation = call & (GENERATIONS - 1)

    for round_, unit in enumerate(units):
        with thread_ops.when(unit.active):
            values = unit.load()
            offset = slot_offset(generation, rank, round_, block, thread, ranks=ranks)
            for peer in peers:
                _send(_add_offset(peer, offset), values, call)

    rank_stride = slot_offset(0, 1, 0, 0, 0, ranks=ranks)
    for round_, unit in enumerate(units):
        with thread_ops.when(unit.active):
            address = _add_offset(own_mailbox, slot_offset(generation, 0, round_, block, thread, ranks=ranks))
            received = _receive(address, call, ranks, rank_stride)
            values = [[x for word in four for x in words.unpack(word)] for four in received]
            total = [functools.reduce(operator.add, terms) for terms in zip(*values, strict=True)]
            unit.store([words.pack(*total[i : i + 2]) for i in range(0, UNIT, 2)])


def _add_offset(address, offset):
    return address + mlir.to_u64(offset)


def _send(address, four, call):
    """Stores four words, each with the count of the call, into a unit's two slots."""
    for slot in range(SLOTS_PER_UNIT):
        code = f"""{{ .reg .b64 a, b; mov.b64 a, {{$1, $3}}; mov.b64 b, {{$2, $3}};
            st.relaxed.sys.global.v2.b64 [$0 + {slot * THREADS * SLOT_BYTES}], {{a, b}}; }}"""
        mlir.ptx(code, address, *four[2 * slot : 2 * slot + 2], call)


def _receive(address, call, ranks, rank_stride):
    """Polls this GPU's mailbox until it holds this thread's unit from every rank.

    Args:
      address: 64-bit address of the first slot of rank 0's unit.
      call: count of the call, which complete slots hold.
      ranks: number of GPUs.
      rank_stride: distance in bytes from a rank's slots to the next rank's slots.

    Returns:
      A list with the four words of each rank's unit.
    """
    count = 2 * SLOTS_PER_UNIT * ranks  # number of words in the result; `address` is PTX operand `count`
    loads = []
    checks = []
    for i in range(SLOTS_PER_UNIT * ranks):
        rank, slot = divmod(i, SLOTS_PER_UNIT)
        offset = rank * rank_stride + slot * THREADS * SLOT_BYTES
        loads.append(f"ld.relaxed.sys.global.v2.b64 {{a{i}, b{i}}}, [${count} + {offset}];")
        for j, name in enumerate("ab"):
            # The lower half of 8 bytes is a word of values, and the upper half the count of the call that sent it.
            checks.append(f"mov.b64 {{${2 * i + j}, f}}, {name}{i}; setp.eq.and.u32 p, f, ${count + 1}, p;")
    code = f"""{{ .reg .b64 a<{count}>, b<{count}>; .reg .b32 f, n; .reg .pred p, q;
        mov.u32 n, 0;
        AGAIN: {" ".join(loads)}
        setp.eq.u32 p, n, n; {" ".join(checks)}
        @p bra DONE;
        add.u32 n, n, 1;
        setp.gt.u32 q, n, {MAX_POLLS}; @q trap;
        bra AGAIN;
        DONE: }}"""
    words_of_units = thread_ops.ptx_words(count, code, address, call)
    return [words_of_units[i : i + 4] for i in range(0, count, 4)]
