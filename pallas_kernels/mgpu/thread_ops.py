"""Functions that emit instructions for one thread, on 32-bit values (`mlir.Scalar`).

There are instructions for shared memory and its atomics, shuffles, barriers, and the shared memory of other blocks of
the cluster. `mlir.inline` puts a function that calls these functions into a kernel.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, math, nvvm, scf

from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.mlir import Scalar


def vector_layout(shape: tuple[int, ...]):
    """Returns the register layout of arrays of 128 values, or of a multiple of 512 values, one or four per register."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1 if shape == (128,) else 4)


def ptx(code: str, *args, in_out: Sequence[Scalar] = (), pure: bool = False) -> Scalar:
    """Emits PTX instructions with one 32-bit result, `$0`, on `args`, which are `$1`, `$2`, ...; see `mlir.ptx`."""
    return mlir.ptx(code, *args, results=mlir.int_type(), in_out=in_out, pure=pure)


pure = partial(ptx, pure=True)


def ptx_words(count: int, code: str, *args) -> list[Scalar]:
    """Emits PTX instructions with `count` 32-bit results, `$0`, `$1`, ..; `args` are `$count`, ..; see `mlir.ptx`."""
    return mlir.ptx(code, *args, results=[mlir.int_type()] * count)


# --- threads ---


def thread() -> Scalar:
    """Returns this thread's index in its block."""
    return Scalar(nvvm.read_ptx_sreg_tid_x(results=[mlir.int_type()]))


def lane() -> Scalar:
    """Returns this thread's index in its warp."""
    return thread() & 31


def warp() -> Scalar:
    """Returns this warp's index in its block. All lanes have to call it, and the compiler knows that they agree."""
    return Scalar(mgpu.utils.warp_idx())


# --- control ---


def when(condition: Scalar) -> contextlib.AbstractContextManager:
    """Returns a context. The code that is emitted within it runs only in threads where the condition holds."""
    return mgpu.utils.when(condition)


def loop(count: Scalar | int, body: Callable[..., Iterable[Scalar] | None], *carried: Scalar) -> list[Scalar]:
    """Emits a loop `carried = body(i, *carried)` over i = 0 .. count - 1. Returns the final carried values."""
    for_op: Any = scf.ForOp(Scalar(0), Scalar(count), Scalar(1), carried)
    with ir.InsertionPoint(for_op.body):
        results = body(Scalar(for_op.induction_variable), *map(Scalar, for_op.inner_iter_args))
        scf.yield_(list(results or ()))
    return list(map(Scalar, for_op.results))


def for_each(total: int, visit: Callable[[Scalar], None], thread: Scalar | None = None) -> None:
    """Emits code that visits the indices 0 .. total - 1. Thread t of a warpgroup visits t, t + 128, t + 256, ..

    `visit` is a function of an index. `thread` is the thread's index in the warpgroup; None to compute it.
    """
    thread = thread or mlir.thread()
    for first in range(0, total, mlir.THREADS):
        number = thread + first
        if first + mlir.THREADS <= total:
            visit(number)
        else:
            with when(number < total):
                visit(number)


def replace_if(condition: Scalar, values: Sequence[Any], others: Callable[[], Sequence[Any]]) -> list[Any]:
    """Returns the MLIR values of `others()` if the condition holds, else `values`.

    The code of `others` runs only if the condition holds.
    """
    branch: Any = scf.IfOp(condition, [value.type for value in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(others())
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return list(map(Scalar, branch.results))


sync = partial(mlir.ptx, "bar.sync 0;")  # synchronizes the block's threads, and orders their accesses to shared memory
cluster_arrive = partial(mlir.ptx, "barrier.cluster.arrive.release.aligned;")
# Waits until all threads of the cluster have arrived, and orders their accesses to the shared memory of all blocks.
cluster_wait = partial(mlir.ptx, "barrier.cluster.wait.acquire.aligned;")


# --- memory; addresses are in bytes ---


def shared(ref, offset: Scalar | int = 0) -> Scalar:
    """Returns the address of 32-bit word `offset` of a reference to shared memory."""
    base = Scalar(llvm.ptrtoint(mlir.int_type(), mlir.shared_pointer(ref)))
    return base + (offset << 2)


# Function of (address, index of a block in the cluster) that returns the address of the same place in that block.
peer = partial(ptx, "mapa.shared::cluster.u32 $0, $1, $2;")
load = partial(ptx, "ld.shared.u32 $0, [$1];")
# Functions of (address, value). `fetch_add`, `add`, `add_peer` and `set_bits` are atomic. `fetch_add` returns the old
# value. `store_peer` and `add_peer` take an address from `peer`.
store = partial(mlir.ptx, "st.shared.u32 [$0], $1;")
store_peer = partial(mlir.ptx, "st.shared::cluster.u32 [$0], $1;")
fetch_add = partial(ptx, "atom.shared.add.u32 $0, [$1], $2;")
add = partial(mlir.ptx, "red.shared.add.u32 [$0], $1;")
add_peer = partial(mlir.ptx, "red.relaxed.cluster.shared::cluster.add.u32 [$0], $1;")
set_bits = partial(mlir.ptx, "red.shared.or.b32 [$0], $1;")


def load_vector(address: Scalar) -> list[Scalar]:
    """Loads four 32-bit values from shared memory; the address is a multiple of 16 bytes."""
    return ptx_words(4, "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", address)


def store_vector(address: Scalar, values: Sequence[Scalar]) -> None:
    """Stores four 32-bit values to shared memory; the address is a multiple of 16 bytes."""
    mlir.ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", address, *values)


def load_global(ref, index: Scalar | int) -> Scalar:
    """Loads element `index` of a contiguous reference to 32-bit values in global memory."""
    base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(ref))
    return ptx("{ .reg .b64 a; mad.wide.u32 a, $2, 4, $1; ld.global.u32 $0, [a]; }", base, index)


def store_global(ref, index: Scalar | int, value: Scalar | int) -> None:
    """Stores to element `index` of a contiguous reference to 32-bit values in global memory."""
    base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(ref))
    mlir.ptx("{ .reg .b64 a; mad.wide.u32 a, $1, 4, $0; st.global.u32 [a], $2; }", base, index, value)


# --- bits and warps ---


count_bits = partial(ptx, "popc.b32 $0, $1;")
# Returns the index of the lowest bit that is set, or 32 if no bit is set.
lowest_bit = partial(ptx, "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }")
# Clears all bits except the highest set bit; returns 0 for 0.
highest_bit = partial(ptx, "{ .reg .b32 r; clz.b32 r, $1; shr.u32 $0, 0x80000000, r; }")


def ordered_key(bits: Scalar) -> Scalar:
    """Returns an unsigned integer that rises with the float32 with these bits.

    All bits of a negative float are flipped, and the sign bit of any other float.
    """
    return bits ^ ((0 - (bits >> 31)) | (1 << 31))


# Each function returns a reduction over the lanes of a warp; every lane gets the result.
warp_sum = partial(ptx, "redux.sync.add.u32 $0, $1, 0xffffffff;")
warp_min = partial(ptx, "redux.sync.min.u32 $0, $1, 0xffffffff;")
warp_max = partial(ptx, "redux.sync.max.u32 $0, $1, 0xffffffff;")


def shuffle_xor(x: Scalar, bit: int) -> Scalar:
    """Returns the x of the lane whose index differs from this lane's in one bit, 1, 2, 4, 8 or 16."""
    return Scalar(mgpu.utils.shfl_bfly(x, bit))


def warp_prefix_sum(x: Scalar) -> Scalar:
    """Returns the inclusive prefix sum of x over the lanes of a warp."""
    code = """{ .reg .pred p; .reg .b32 r; shfl.sync.up.b32 r|p, $1, $2, 0, 0xffffffff; @!p mov.b32 r, 0;
        add.u32 $0, r, $1; }"""
    for distance in (1, 2, 4, 8, 16):
        x = ptx(code, x, distance)
    return x


def block_prefix_sum(x: Scalar, scratch: Scalar, warps: int) -> tuple[Scalar, Scalar]:
    """Returns (the sum of x over the threads of the block with lower indices, the sum over all threads of the block).

    The function synchronizes the block. Until the next synchronization, no thread may access the scratch memory.

    Args:
      x: the value of this thread.
      scratch: address of a 32-bit word for each warp in shared memory.
      warps: number of warps of the block, up to 32.
    """
    up_to = warp_prefix_sum(x)
    own_warp = warp()
    with when(lane().equals(31)):
        store(scratch + (own_warp << 2), up_to)
    sync()
    sums = (lane() < warps).where(load(scratch + (lane() << 2)), 0)
    before = warp_sum((lane() < own_warp).where(sums, 0))
    return before + up_to - x, warp_sum(sums)


# --- float32 ---


def multiply(x, y):
    """Returns x * y of MLIR float32. Compilers never contract this product and an addition to an FMA."""
    return mlir.ptx("mul.rn.f32 $0, $1, $2;", x, y, results=mlir.f32_type(), pure=True)


def fma(x, y, z):
    """Returns x * y + z of MLIR float32, rounded once."""
    return Scalar(math.fma(x, y, z))


def sum_lanes(x, lanes: int = 32):
    """Returns the sum of an MLIR float32 over `lanes` consecutive lanes, a power of two. Each lane gets the sum."""
    while lanes > 1:
        lanes //= 2
        x = x + shuffle_xor(x, lanes)
    return x


def lane_sums(terms: Sequence[Any]) -> Scalar:
    """Sums each of 32 terms over the lanes of a warp. Lane i gets the bits of the sum of term i.

    A term is an MLIR float32, or None if it is 0 in all lanes.
    """
    terms = list(terms)
    while len(terms) > 1:
        half = len(terms) // 2
        upper = (lane() & half) > 0
        zero = Scalar(0.0)

        # Lanes whose indices differ only in the bit `half` are partners. The lane with the bit set keeps `high` and
        # sends `low` to its partner. The partner keeps `low` and sends `high`.
        def exchange(low, high, half=half, upper=upper, zero=zero):
            if low is None and high is None:
                return None
            low = zero if low is None else low
            high = zero if high is None else high
            kept = upper.where(high, low)
            sent = upper.where(low, high)
            return kept + shuffle_xor(sent, half)

        terms = [exchange(low, high) for low, high in zip(terms[:half], terms[half:], strict=True)]
    return terms[0].bits()
