"""Code for one thread: instructions on `U32`.

The instructions cover shared memory and its atomics, shuffles, barriers, and the shared memory of the cluster's other
blocks. `inline` puts such code into a kernel.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
      emit: a function of the arguments, in which a reference is a memref, a scalar or an array [128] a U32, and another
        array a list of this thread's MLIR values. It returns None, a U32, or such a list.
      args: pytrees of references, scalars, and arrays of 128 values or a multiple of 512. A bool becomes 0 or 1.
      returns: shape and dtype of the result, int32[128] for a U32. The values of a list lie in no order that one may
        rely on, but a thread that gets the array as an argument finds its own in the list's order.
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
    """Returns the register layout of `inline`'s arrays."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1 if shape == (128,) else 4)


def ptx(code: str, *args, in_out: Sequence[U32] = (), pure: bool = False) -> U32:
    """Returns the result `$0` of instructions on `args`, which are `$1`, `$2`, ...; see `mlir.ptx`."""
    return U32(mlir.ptx(code, *args, results=mlir.int_type(), in_out=in_out, pure=pure))


pure = partial(ptx, pure=True)


def ptx_words(count: int, code: str, *args) -> list[U32]:
    """Returns the results `$0`, `$1`, ... of instructions on `args`, whose numbers follow."""
    return [U32(x) for x in mlir.ptx(code, *args, results=[mlir.int_type()] * count)]


# --- threads ---


def thread() -> U32:
    """Returns this thread's number in its block."""
    return U32(nvvm.read_ptx_sreg_tid_x(results=[mlir.int_type()]))


def lane() -> U32:
    """Returns this thread's number in its warp."""
    return thread() & 31


def warp() -> U32:
    """Returns this warp's number in its block, as a uniform value; all lanes have to call it."""
    return U32(mgpu.utils.warp_idx())


# --- control ---


@contextlib.contextmanager
def when(condition: U32) -> Iterator[None]:
    """Makes the code emitted within it run only where the condition holds."""
    with mgpu.utils.when(condition.value):
        yield


def loop(count: U32 | int, body: Callable[..., Iterable[U32] | None], *carried: U32) -> list[U32]:
    """Repeats `carried = body(i, *carried)` for i = 0 .. count - 1; returns the last carried values."""
    start, stop, step = (U32(x).value for x in (0, count, 1))
    for_op: Any = scf.ForOp(start, stop, step, [x.value for x in carried])
    with ir.InsertionPoint(for_op.body):
        results = body(U32(for_op.induction_variable), *map(U32, for_op.inner_iter_args))
        scf.yield_([x.value for x in results or ()])
    return [U32(result) for result in for_op.results]


def for_each(total: int, visit: Callable[[U32], None], thread: U32 | None = None) -> None:
    """Calls `visit` for 0 .. total - 1, of which each thread of the warpgroup takes every 128th.

    `thread` is its number in the warpgroup, if known.
    """
    thread = thread or mlir.thread()
    for start in range(0, total, mlir.THREADS):
        number = thread + start
        if start + mlir.THREADS <= total:
            visit(number)
        else:
            with when(number < total):
                visit(number)


def replace_if(condition: U32, values: Sequence[Any], others: Callable[[], Sequence[Any]]) -> list[Any]:
    """Returns `others()` if the condition holds, else `values`; both are MLIR values."""
    branch: Any = scf.IfOp(condition.value, [value.type for value in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(others())
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return list(branch.results)


sync = partial(mlir.ptx, "bar.sync 0;")  # the block's threads; orders their accesses to shared memory
cluster_arrive = partial(mlir.ptx, "barrier.cluster.arrive.release.aligned;")
# The cluster's threads have arrived; orders their accesses to the shared memory of all blocks.
cluster_wait = partial(mlir.ptx, "barrier.cluster.wait.acquire.aligned;")


# --- memory; addresses count bytes ---


def shared(ref, offset: U32 | int = 0) -> U32:
    """Returns the address of 32-bit word `offset` of a reference to shared memory."""
    base = U32(llvm.ptrtoint(mlir.int_type(), mlir.shared_pointer(ref)))
    return base + (offset << 2)


# (address, block) -> address of the same place in the shared memory of another block of the cluster.
peer = partial(ptx, "mapa.shared::cluster.u32 $0, $1, $2;")
load = partial(ptx, "ld.shared.u32 $0, [$1];")
# (address, value). `fetch_add`, `add` and `set_bits` are atomic; `fetch_add` returns the value before.
store = partial(mlir.ptx, "st.shared.u32 [$0], $1;")
store_peer = partial(mlir.ptx, "st.shared::cluster.u32 [$0], $1;")
fetch_add = partial(ptx, "atom.shared.add.u32 $0, [$1], $2;")
add = partial(mlir.ptx, "red.shared.add.u32 [$0], $1;")
add_peer = partial(mlir.ptx, "red.relaxed.cluster.shared::cluster.add.u32 [$0], $1;")
set_bits = partial(mlir.ptx, "red.shared.or.b32 [$0], $1;")


def load_vector(address: U32) -> list[U32]:
    """Loads four values, from a multiple of 16 bytes on."""
    return ptx_words(4, "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", address)


def store_vector(address: U32, values: Sequence[U32]) -> None:
    """Stores four values, from a multiple of 16 bytes on."""
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
# The number of the lowest bit that is set, or 32 if none is.
lowest_bit = partial(ptx, "{ .reg .b32 r; brev.b32 r, $1; clz.b32 $0, r; }")
# The number without its bits, but for the highest one that is set.
highest_bit = partial(ptx, "{ .reg .b32 r; clz.b32 r, $1; shr.u32 $0, 0x80000000, r; }")
# Over the lanes of the warp.
warp_sum = partial(ptx, "redux.sync.add.u32 $0, $1, 0xffffffff;")
warp_min = partial(ptx, "redux.sync.min.u32 $0, $1, 0xffffffff;")
warp_max = partial(ptx, "redux.sync.max.u32 $0, $1, 0xffffffff;")


def warp_prefix_sum(x: U32) -> U32:
    """Returns the sum over the lanes up to this one, itself included."""
    code = """{ .reg .pred p; .reg .b32 r; shfl.sync.up.b32 r|p, $1, $2, 0, 0xffffffff; @!p mov.b32 r, 0;
        add.u32 $0, r, $1; }"""
    for distance in (1, 2, 4, 8, 16):
        x = ptx(code, x, distance)
    return x


def block_prefix_sum(x: U32, scratch: U32, warps: int) -> tuple[U32, U32]:
    """Returns the sum of x over the threads before this one, and over all; synchronizes the block of up to 32 warps.

    `scratch` is the address of 32 bits for each warp, which no thread accesses until the next synchronization.
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
    """Returns x * y of MLIR float32, which compilers never contract with an addition to an FMA."""
    return mlir.ptx("mul.rn.f32 $0, $1, $2;", x, y, results=mlir.f32_type(), pure=True)


def fma(x, y, z):
    """Returns x * y + z of MLIR float32, rounded once."""
    return math.fma(x, y, z)


def sum_lanes(x, lanes: int = 32):
    """The sum of an MLIR float32 over each group of `lanes` consecutive lanes, in all of them."""
    while lanes > 1:
        lanes //= 2
        x = arith.addf(x, mgpu.utils.shfl_bfly(x, lanes))
    return x


def lane_sums(terms: Sequence[Any]) -> U32:
    """Returns in lane i the bits of the warp's sum of term i, for 32 terms: MLIR float32, or None for 0."""
    terms = list(terms)
    while len(terms) > 1:
        half = len(terms) // 2
        upper = (lane() & half) > 0
        zero = mlir.f32(0.0)

        def merged(low, high, half=half, upper=upper, zero=zero):
            if low is None and high is None:
                return None
            low, high = (zero if x is None else x for x in (low, high))
            kept, sent = (arith.select(upper.value, *pair) for pair in ((high, low), (low, high)))
            return arith.addf(kept, mgpu.utils.shfl_bfly(sent, half))

        terms = [merged(*pair) for pair in zip(terms[:half], terms[half:], strict=True)]
    return bits(terms[0])
