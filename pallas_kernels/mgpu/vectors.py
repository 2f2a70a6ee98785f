"""Vector operations that Mosaic lacks: exchanges between threads, partial loads and stores.

A vector [128 * n], n = 1, 2 or 4, is spread over a warpgroup: thread t holds values n * t .. n * t + n - 1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.mlir import THREADS as THREADS, WARP, Scalar
from pallas_kernels.runtime.launch import primitive


SLICE = 64  # in `store_channels`, the first channel is a multiple of this number


def layout(size: int):
    """Returns the layout of a vector of `size` = 128, 256 or 512 values."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)


def _layout(shape):
    return layout(*shape)


inline = functools.partial(mlir.inline, layout=_layout)
emits = functools.partial(mlir.emits, layout=_layout)


def load(ref) -> jax.Array:
    """Loads a vector [size] from `ref`, a reference to shared or global memory."""
    return plgpu.load(ref, layout=layout(ref.shape[0]), optimized=False)


def channels(size: int) -> jax.Array:
    """Returns the vector of the int32 indices 0 .. size - 1."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout(size))


@primitive
def exchange(x: jax.Array, distance: int, scratch) -> jax.Array:
    """Returns a vector y with y[c] = x[c ^ distance].

    Args:
      x: [size] of a 32-bit type.
      distance: a power of two below `size`.
      scratch: [size] float32 in shared memory that only this warpgroup uses; needed for distances of size / 4 or more.
    """
    return x[lax.iota(jnp.int32, x.shape[0]) ^ distance]


@emits(exchange, returns=lambda x, distance, scratch: x)
def _emit_exchange(x, distance, scratch):
    per_thread = x.layout.vec_size
    (register,) = x.registers
    if distance < per_thread:
        return [vector.shuffle(register, register, [i ^ distance for i in range(per_thread)])]
    if distance < per_thread * WARP:
        return [mgpu.utils.shfl_bfly(value, distance // per_thread) for value in mlir.values(x)]
    (first_channel,) = map(Scalar, x.layout.linear_thread_idxs())
    mgpu.utils.warpgroup_barrier()
    vector.store(register, scratch, [first_channel])
    mgpu.utils.warpgroup_barrier()
    return [vector.load(register.type, scratch, [first_channel ^ distance])]


def butterfly(combine, x: jax.Array, first: int, last: int, scratch) -> jax.Array:
    """Reduces groups of channels of x [size] by exchanges at the distances first, first / 2, .. last.

    A group has 2 * first / last channels, whose indices differ only in the bits `first`, `first / 2`, .. `last`. Each
    channel of the result holds the reduction of the channel's group.

    Args:
      combine: elementwise function of two vectors, such as `jnp.maximum`.
      x: [size] of a 32-bit type.
      first: largest distance, a power of two.
      last: smallest distance, a power of two.
      scratch: as in `exchange`.
    """
    distance = first
    while distance >= last:
        x = combine(x, exchange(x, distance, scratch))
        distance //= 2
    return x


def take_in(layout: Callable[..., Any]) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns a primitive `take(ref, index)` for indices whose register layout is `layout(index.shape)`."""

    @primitive
    def take(ref, index: jax.Array) -> jax.Array:
        """Gathers `ref[index]` from a reference [n] to 32-bit values in global memory. A negative index gives 0."""
        return jnp.where(index >= 0, ref[...][index], jnp.zeros((), ref.dtype))

    @mlir.emits(take, layout=layout, returns=lambda ref, index: jax.ShapeDtypeStruct(index.shape, ref.dtype))
    def _(ref, index):
        kind = ref.type.element_type
        for number in mlir.values(index):
            inside = number.is_at_least(0)
            value = llvm.load(kind, mlir.element(ref, inside.where(number, 0)))
            yield inside.where(value, 0)

    return take


take = take_in(_layout)


@primitive
def load_repeated(ref, size: int) -> jax.Array:
    """Loads n float32 values from shared memory, and repeats them until they fill a vector [size].

    `ref` is a reference [n]. n is a multiple of size / 128 and divides `size`.
    """
    return jnp.tile(ref[...], size // ref.shape[0])


@emits(load_repeated, returns=lambda ref, size: jax.ShapeDtypeStruct((size,), ref.dtype))
def _(ref, size):
    threads: Any = layout(size).to_mgpu()
    (first_channel,) = map(Scalar, threads.linear_thread_idxs())
    place = first_channel % ref.type.shape[0]
    return [vector.load(mlir.vector_type(size // THREADS, ref.type.element_type), ref, [place])]


@primitive
def store_channels(ref, x: jax.Array, channel: jax.Array, *, every: int = 1) -> None:
    """Stores the values of some channels: `ref[i] = x[j]` for each j with `channel[j] == every * i` and 0 <= i < n.

    Args:
      ref: [n] in global memory.
      x: [size] values.
      channel: [size] int32, consecutive indices of channels; the first is a multiple of 64 and may be negative.
      every: distance between stored channels; only channels that are multiples of `every` are stored.
    """
    n = ref.shape[0]
    for begin in range(0, x.shape[0], SLICE):
        first_channel = channel[begin]

        @pl.when((first_channel >= 0) & (first_channel < n * every) & (first_channel % every == 0))
        def _(begin=begin, first_channel=first_channel):
            values = x[begin : begin + SLICE : every]
            ref[pl.ds(first_channel // every, values.shape[0])] = values


@emits(store_channels)
def _emit_store_channels(ref, x, channel, *, every=1):
    end = ref.type.shape[0] * every
    (register,) = x.registers
    channels_of_thread = mlir.values(channel)
    per_thread = x.layout.vec_size
    bits = mgpu.utils.bitwidth(x.mlir_dtype)
    register = vector.bitcast(mlir.vector_type(per_thread, mlir.int_type(bits)), register)
    width = per_thread if every == 1 else 1  # number of values in a store
    step = max(width, min(every, per_thread))
    for i in range(0, per_thread, step):
        number = channels_of_thread[i]
        # The comparison treats its operands as unsigned integers, so a negative channel is not below `end`.
        inside = number < end
        if every > per_thread:
            inside = inside & (number % every).equals(0)
        with mgpu.utils.when(inside):
            value = register if width == per_thread else vector.extract(register, [], [i])
            llvm.store(value, mlir.element(ref, number // every), alignment=width * bits // 8)


# --- over threads ---


@primitive
def thread() -> jax.Array:
    """Returns the index of each thread in the warpgroup, [128] int32.

    Each call reads the index again from a special register, so that no other register holds the index during a loop.
    """
    return channels(THREADS)


@emits(thread, returns=jax.ShapeDtypeStruct((THREADS,), jnp.int32))
def _():
    number = mlir.ptx("mov.u32 $0, %tid.x;", results=mlir.int_type(), convergent=False)
    return [number & (THREADS - 1)]


@primitive
def opaque(x: jax.Array) -> jax.Array:
    """Returns the int32 scalar x, but hides from the compiler that the result equals x.

    Within a loop, the compiler therefore recomputes values that depend on the result, and does not hoist them out of
    the loop into registers.
    """
    return x


@emits(opaque, returns=lambda x: x)
def _(x):
    return mlir.ptx("mov.b32 $0, $1;", x, results=mlir.int_type())


@primitive
def ballot(x: jax.Array) -> jax.Array:
    """Returns an int32 scalar with bit i set if lane i of x is not 0. x, [128] int32, must be equal in all warps."""
    return jnp.sum(jnp.where(x[:WARP] != 0, jnp.int32(1) << lax.iota(jnp.int32, WARP), 0))


ballot.mosaic(lambda x: _vote(x, "vote.sync.ballot.b32 $0, p, 0xffffffff;"))


@primitive
def any_in_warp(x: jax.Array) -> jax.Array:
    """Returns whether x, [128] int32, is nonzero in at least one thread of the warp (interpreted: of the warpgroup).

    The warps' results may differ, so code that depends on the result must not wait for other warps.
    """
    return jnp.any(x != 0)


any_in_warp.mosaic(lambda x: _vote(x, "vote.sync.ballot.b32 $0, p, 0xffffffff;") != 0)


def lowest_bit(bits: jax.Array) -> jax.Array:
    """Returns the index of the lowest set bit of integers that are not 0."""
    return 31 - lax.clz(bits & -bits)


@primitive
def count(x: jax.Array) -> jax.Array:
    """Returns the number of nonzero elements of x, [128] int32 with one element in each thread of the warpgroup."""
    return jnp.sum(jnp.where(x != 0, 1, 0))


count.mosaic(lambda x: _vote(x, "bar.red.popc.u32 $0, $2, 128, p;"))


def _vote(x, vote):
    """Returns the int32 scalar result `$0` of the PTX instruction `vote`, in which p is x != 0.

    In the instruction, `$2` is the index of the warpgroup's hardware barrier.
    """

    def emit(x):
        value = mlir.scalar(x)
        barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
        code = "{ .reg .pred p; setp.ne.s32 p, $1, 0; " + vote + " }"
        return mlir.ptx(code, value, barrier, results=mlir.int_type(), convergent=False)

    return inline(emit, x, returns=jax.ShapeDtypeStruct((), jnp.int32))
