"""Functions that emit instructions for one thread, on 32-bit values (`mlir.U32`).

There are instructions for shared memory and its atomics, shuffles, barriers, and the shared memory of other blocks of
the cluster. `inline` puts a function that calls these functions into a kernel.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, scf

from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.mlir import U32


def inline(emit: Callable, *args, returns: jax.ShapeDtypeStruct | None = None):
    """Puts code for one thread into a kernel, as `mlir.inline` does, with U32 for integers.

    Args:
      emit: function of `args`. It gets a memref for a reference, a U32 for a scalar or for this thread's value of an
        array [128], and a list of this thread's MLIR values for another array. It returns None, a U32, or a list of
        MLIR values.
      args: pytrees of references, scalars, and arrays of 128 values or a multiple of 512. A bool becomes 0 or 1.
      returns: shape and dtype of the result, int32 [128] for a U32; None for no result. The order of a list's values in
        the result is unspecified. If the result is passed to `inline` again, each thread gets its list back.
    """
    emit_operands, operands = mlir.on_operands(emit, *args)

    def unpacked(operand):
        if not isinstance(operand, mgpu.FragmentedArray):
            return operand
        values = mlir.values(operand)
        return U32(values[0]) if len(values) == 1 else values

    def run(*operands):
        result = emit_operands(*map(unpacked, operands))
        return [result] if isinstance(result, U32) else result

    operands = (x.astype(jnp.int32) if x.dtype == bool else x for x in operands)
    return mlir.inline(run, *operands, layout=vector_layout, returns=returns)


def vector_layout(shape: tuple[int, ...]):
    """Returns the register layout of the arrays that `inline` takes and returns."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1 if shape == (128,) else 4)


def ptx(code: str, *args, in_out: Sequence[U32] = (), pure: bool = False) -> U32:
    """Emits PTX instructions with one 32-bit result, `$0`, on `args`, which are `$1`, `$2`, ...; see `mlir.ptx`."""
    return U32(mlir.ptx(code, *args, results=mlir.int_type(), in_out=in_out, pure=pure))


pure = partial(ptx, pure=True)


def ptx_words(count: int, code: str, *args) -> list[U32]:
    """Emits PTX instructions with `count` 32-bit results, `$0`, `$1`, ..; `args` are `$count`, ..; see `mlir.ptx`."""
    return [U32(x) for x in mlir.ptx(code, *args, results=[mlir.int_type()] * count)]


# --- threads ---


def thread() -> U32:
    """Returns this thread's index in its block."""
    return U32(nvvm.read_ptx_sreg_tid_x(results=[mlir.int_type()]))


def lane() -> U32:
    """Returns this thread's index in its warp."""
    return thread() & 31


def warp() -> U32:
    """Returns this warp's index in its block. All lanes have to call it, and the compiler knows that they agree."""
    return U32(mgpu.utils.warp_idx())


# --- control ---


def when(condition: U32) -> contextlib.AbstractContextManager:
    """Returns a context. The code that is emitted within it runs only in threads where the condition holds."""
    return mgpu.utils.when(condition.value)


def loop(count: U32 | int, body: Callable[..., Iterable[U32] | None], *carried: U32) -> list[U32]:
    """Emits a loop `carried = body(i, *carried)` over i = 0 .. count - 1. Returns the final carried values."""
    for_op: Any = scf.ForOp(mlir.i32(0), U32(count).value, mlir.i32(1), [x.value for x in carried])
    with ir.InsertionPoint(for_op.body):
        results = body(U32(for_op.induction_variable), *map(U32, for_op.inner_iter_args))
        scf.yield_([x.value for x in results or ()])
    return [U32(result) for result in for_op.results]


def for_each(total: int, visit: Callable[[U32], None], thread: U32 | None = None) -> None:
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


def replace_if(condition: U32, values: Sequence[Any], others: Callable[[], Sequence[Any]]) -> list[Any]:
    """Returns the MLIR values of `others()` if the condition holds, else `values`.

    The code of `others` runs only if the condition holds.
    """
    branch: Any = scf.IfOp(condition.value, [value.type for value in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(others())
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return list(branch.results)


sync = partial(mlir.ptx, "bar.sync 0;")  # synchronizes the block's threads, and orders their accesses to shared memory
cluster_arrive = partial(mlir.ptx, "barrier.cluster.arrive.release.aligned;")
# Waits until all threads of the cluster have arrived, and orders their accesses to the shared memory of all blocks.
cluster_wait = partial(mlir.ptx, "barrier.cluster.wait.acquire.aligned;")


# --- memory; addresses are in bytes ---


def shared(ref, offset: U32 | int = 0) -> U32:
    """Returns the address of 32-bit word `offset` of a reference to shared memory."""
    base = U32(llvm.ptrtoint(mlir.int_type(), mlir.shared_pointer(ref)))
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


def load_vector(address: U32) -> list[U32]:
    """Loads four 32-bit values from shared memory; the address is a multiple of 16 bytes."""
    return ptx_words(4, "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", address)


def store_vector(address: U32, values: Sequence[U32]) -> None:
    """Stores four 32-bit values to shared memory; the address is a multiple of 16 bytes."""
    mlir.ptx("st.shared.v4.u32 [$0], {$1, $2, $3, $4};", address, *values)


def load_global(ref, index: U32 | int) -> U32:
    """Loads element `index` of a contiguous reference to 32-bit values in global memory."""
    base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(ref))
    return ptx("{ .reg .b64 a; mad.wide.u32 a, $2, 4, $1; ld.global.u32 $0, [a]; }", base, index)


def store_global(ref, index: U32 | int, value: U32 | int) -> None:
    """Stores to element `index` of a contiguous reference to 32-bit values in global memory."""
    base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(ref))
    mlir.ptx("{ .reg .b64 a; mad.wide.u32 a, $1, 4, $0; st.global.u32 [a], $2; }", base, index, value)


# --- bits and warps ---


count_bits = partial(ptx, "popc.b32 $0, $1;")
# Returns the index of the lowest bit that is set, or 32 if no bit is set.
lowest_bit = partial(ptx, "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }")
# Clears all bits except the highest set bit; returns 0 for 0.
highest_bit = partial(ptx, "{ .reg .b32 r; clz.b32 r, $1; shr.u32 $0, 0x80000000, r; }")
# Each function returns a reduction over the lanes of a warp; every lane gets the result.
warp_sum = partial(ptx, "redux.sync.add.u32 $0, $1, 0xffffffff;")
warp_min = partial(ptx, "redux.sync.min.u32 $0, $1, 0xffffffff;")
warp_max = partial(ptx, "redux.sync.max.u32 $0, $1, 0xffffffff;")


def warp_prefix_sum(x: U32) -> U32:
    """Returns the inclusive prefix sum of x over the lanes of a warp."""
    code = """{ .reg .pred p; .reg .b32 r; shfl.sync.up.b32 r|p, $1, $2, 0, 0xffffffff; @!p mov.b32 r, 0;
        add.u32 $0, r, $1; }"""
    for distance in (1, 2, 4, 8, 16):
        x = ptx(code, x, distance)
    return x


def block_prefix_sum(x: U32, scratch: U32, warps: int) -> tuple[U32, U32]:
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


def bits(value) -> U32:
    """Returns the bits of an MLIR float32."""
    return U32(arith.bitcast(mlir.int_type(), value))


def as_float(x: U32):
    """Returns the MLIR float32 with these bits."""
    return arith.bitcast(mlir.f32_type(), x.value)


def multiply(x, y):
    """Returns x * y of MLIR float32. Compilers never contract this product and an addition to an FMA."""
    return mlir.ptx("mul.rn.f32 $0, $1, $2;", x, y, results=mlir.f32_type(), pure=True)


def fma(x, y, z):
    """Returns x * y + z of MLIR float32, rounded once."""
    return math.fma(x, y, z)


def sum_lanes(x, lanes: int = 32):
    """Returns the sum of an MLIR float32 over `lanes` consecutive lanes, a power of two. Each lane gets the sum."""
    while lanes > 1:
        lanes //= 2
        x = arith.addf(x, mgpu.utils.shfl_bfly(x, lanes))
    return x


def lane_sums(terms: Sequence[Any]) -> U32:
    """Sums each of 32 terms over the lanes of a warp. Lane i gets the bits of the sum of term i.

    A term is an MLIR float32, or None if it is 0 in all lanes.
    """
    terms = list(terms)
    while len(terms) > 1:
        half = len(terms) // 2
        upper = (lane() & half) > 0
        zero = mlir.f32(0.0)

        # Lanes whose indices differ only in the bit `half` are partners. The lane with the bit set keeps `high` and
        # sends `low` to its partner. The partner keeps `low` and sends `high`.
        def exchange(low, high, half=half, upper=upper, zero=zero):
            if low is None and high is None:
                return None
            low = zero if low is None else low
            high = zero if high is None else high
            kept = arith.select(upper.value, high, low)
            sent = arith.select(upper.value, low, high)
            return arith.addf(kept, mgpu.utils.shfl_bfly(sent, half))

        terms = [exchange(low, high) for low, high in zip(terms[:half], terms[half:], strict=True)]
    return bits(terms[0])
