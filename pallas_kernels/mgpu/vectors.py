"""Vectors over a warpgroup: thread t holds values `n*t .. n*t + n - 1` of [128 * n], n = 1, 2 or 4.

Primitives that Mosaic has no operation for: exchanges between threads, and loads and stores of part of a row.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.mlir import THREADS as THREADS, WARP
from pallas_kernels.runtime.launch import primitive


SLICE = 64  # a thread's channels in `store_channels` begin at a multiple of so many


def layout(size: int):
    """The layout of a vector of `size` = 128, 256 or 512 values."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)


inline = functools.partial(mlir.inline, layout=lambda shape: layout(*shape))


def load(ref) -> jax.Array:
    """All of a [size] reference."""
    return plgpu.load(ref, layout=layout(ref.shape[0]), optimized=False)


def channels(size: int) -> jax.Array:
    """0 .. size - 1."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout(size))


@primitive
def exchange(x: jax.Array, distance: int, scratch) -> jax.Array:
    """x [size] of a 32-bit type: at every channel c the value of channel `c ^ distance`, a power of two below size.

    `scratch`: [size] float32 shared memory of this warpgroup, for exchanges between warps: distances from size / 4.
    """
    return x[lax.iota(jnp.int32, x.shape[0]) ^ distance]


@exchange.mosaic
def _(x, distance, scratch):
    held = x.shape[0] // THREADS

    def in_thread(x):
        (register,) = x.registers
        return [vector.shuffle(register, register, [i ^ distance for i in range(held)])]

    def in_warp(x):
        return [mgpu.utils.shfl_bfly(value, distance // held) for value in mlir.values(x)]

    def in_warpgroup(x, scratch):
        (register,), (at,) = x.registers, x.layout.linear_thread_idxs()
        mgpu.utils.warpgroup_barrier()
        vector.store(register, scratch, [at])
        mgpu.utils.warpgroup_barrier()
        return [vector.load(register.type, scratch, [arith.xori(at, mlir.index(distance))])]

    if distance >= held * WARP:
        return inline(in_warpgroup, x, scratch, returns=x)
    return inline(in_thread if distance < held else in_warp, x, returns=x)


def butterfly(combine, x: jax.Array, first: int, last: int, scratch) -> jax.Array:
    """x combined with its exchanges at distances first, first / 2, ..., last: the same value throughout each block."""
    distance = first
    while distance >= last:
        x = combine(x, exchange(x, distance, scratch))
        distance //= 2
    return x


@primitive
def take(ref, index: jax.Array) -> jax.Array:
    """[size] of `ref[index]`, zero where the index is negative; `ref` [n] of 32-bit values in global memory."""
    return jnp.where(index >= 0, ref[...][index], jnp.zeros((), ref.dtype))


@take.mosaic
def _(ref, index):
    def emit(ref, index):
        element = ref.type.element_type

        def one(at):
            inside = arith.cmpi(arith.CmpIPredicate.sge, at, mlir.i32(0))
            safe = mlir.to_i64(arith.select(inside, at, mlir.i32(0)))
            value = llvm.load(element, mlir.at(mlir.global_pointer(ref), safe, element))
            return arith.select(inside, value, mlir.constant(0, element))

        return [one(at) for at in mlir.values(index)]

    return inline(emit, ref, index, returns=jax.ShapeDtypeStruct(index.shape, ref.dtype))


@primitive
def load_repeated(ref, size: int) -> jax.Array:
    """[size] with `ref` [n], float32 in shared memory, over and over; n a multiple of what a thread holds."""
    return jnp.tile(ref[...], size // ref.shape[0])


@load_repeated.mosaic
def _(ref, size):
    def emit(ref):
        threads: Any = layout(size).to_mgpu()
        (at,) = threads.linear_thread_idxs()
        at = arith.remui(at, mlir.index(ref.type.shape[0]))
        return [vector.load(mlir.vector_type(size // THREADS, ref.type.element_type), ref, [at])]

    return inline(emit, ref, returns=jax.ShapeDtypeStruct((size,), ref.dtype))


@primitive
def store_channels(ref, x: jax.Array, channel: jax.Array, *, every: int = 1) -> None:
    """`ref[i] = x` where the channel is `every * i`, for every i of `ref` [n] in global memory.

    `channel`: [size] int32, consecutive, the first a multiple of 64. x: [size], equal where a channel is equal.
    """
    n = ref.shape[0]
    for at in range(0, x.shape[0], SLICE):
        first = channel[at]

        @pl.when((first >= 0) & (first < n * every) & (first % every == 0))
        def _(at=at, first=first):
            values = x[at : at + SLICE : every]
            ref[pl.ds(first // every, values.shape[0])] = values


@store_channels.mosaic
def _(ref, x, channel, *, every=1):
    end = ref.shape[0] * every

    def emit(ref, x, channel):
        (register,), numbers = x.registers, mlir.values(channel)
        held, bits = x.layout.vec_size, mgpu.utils.bitwidth(x.mlir_dtype)
        register = vector.bitcast(mlir.vector_type(held, mlir.int_type(bits)), register)
        width = held if every == 1 else 1
        for i in range(0, held, max(width, min(every, held))):
            # Unsigned: channels before the first lie far past the end.
            inside = arith.cmpi(arith.CmpIPredicate.ult, numbers[i], mlir.i32(end))
            if every > held:
                phase = arith.remui(numbers[i], mlir.i32(every))
                inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.eq, phase, mlir.i32(0)))
            with mgpu.utils.when(inside):
                value = register if width == held else vector.extract(register, [], [i])
                at = mlir.to_i64(arith.divui(numbers[i], mlir.i32(every)))
                pointer = mlir.at(mlir.global_pointer(ref), at, mlir.int_type(bits))
                llvm.store(value, pointer, alignment=width * bits // 8)

    inline(emit, ref, x, channel)


# --- over threads ---


@primitive
def thread() -> jax.Array:
    """[128] int32, the threads 0 .. 127 of a warpgroup, read anew by each call: not kept in registers across loops."""
    return channels(THREADS)


@thread.mosaic
def _():
    def emit():
        number = mlir.ptx("mov.u32 $0, %tid.x;", results=mlir.int_type(), convergent=False)
        return [arith.andi(number, mlir.i32(THREADS - 1))]

    return inline(emit, returns=jax.ShapeDtypeStruct((THREADS,), jnp.int32))


@primitive
def ballot(x: jax.Array) -> jax.Array:
    """int32 scalar whose bit i tells whether x is not 0 in lane i; x [128] int32, the same in every warp."""
    return jnp.sum(jnp.where(x[:WARP] != 0, jnp.int32(1) << lax.iota(jnp.int32, WARP), 0))


ballot.mosaic(lambda x: _vote(x, "vote.sync.ballot.b32 $0, p, 0xffffffff;"))


@primitive
def any_in_warp(x: jax.Array) -> jax.Array:
    """bool scalar: whether x [128] int32 is not 0 in some thread of the warp; interpreted, of the warpgroup.

    Warps may differ: what they run by it must not wait for other warps.
    """
    return jnp.any(x != 0)


any_in_warp.mosaic(lambda x: _vote(x, "vote.sync.ballot.b32 $0, p, 0xffffffff;") != 0)


def lowest_bit(bits: jax.Array) -> jax.Array:
    """Number of the lowest bit set."""
    return 31 - lax.clz(bits & -bits)


@primitive
def count(x: jax.Array) -> jax.Array:
    """int32 scalar: in how many threads of the warpgroup x [128] int32 is not 0."""
    return jnp.sum(jnp.where(x != 0, 1, 0))


count.mosaic(lambda x: _vote(x, "bar.red.popc.u32 $0, $2, 128, p;"))


def _vote(x, code):
    def emit(x):
        value, barrier = mlir.scalar(x), mgpu.utils.warpgroup_barrier_idx(sync=False)
        code_of = "{ .reg .pred p; setp.ne.s32 p, $1, 0; " + code + " }"
        return mlir.ptx(code_of, value, barrier, results=mlir.int_type(), convergent=False)

    return inline(emit, x, returns=jax.ShapeDtypeStruct((), jnp.int32))
