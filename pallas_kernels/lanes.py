"""One vector over a warpgroup: thread t holds values `v*t .. v*t + v - 1` of [128 * v], v = 1, 2 or 4.

What Mosaic has no operation for, as inline code: exchanges between threads, and reads and writes of part of a row.
Interpreted, each is a line of jnp.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector


THREADS = 128
_WARP = 32


def layout(size: int):
    """The layout of a vector of `size` = 128, 256 or 512 values."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=size // THREADS)


def load(ref) -> jax.Array:
    """All of a [size] reference."""
    return plgpu.load(ref, layout=layout(ref.shape[0]), optimized=False)


def channels(size: int) -> jax.Array:
    """0 .. size - 1."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout(size))


def exchange(x: jax.Array, distance: int, scratch, *, interpret: bool) -> jax.Array:
    """The value of channel `c ^ distance` at every channel c.

    Args:
      x: [size] of a 32-bit type.
      distance: a power of two below size.
      scratch: [size] float32 shared memory of this warpgroup, for exchanges between warps.
    """
    if interpret:
        return x[lax.iota(jnp.int32, x.shape[0]) ^ distance]
    held = x.shape[0] // THREADS
    where = layout(x.shape[0])

    @plgpu.inline_mgpu(arg_types=(where, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, where))
    def swap(_, x, scratch):
        (register,) = x.registers
        if distance < held:
            swapped = vector.shuffle(register, register, [i ^ distance for i in range(held)])
        elif distance < held * _WARP:
            swapped = register
            for i in range(held):
                value = mgpu.utils.shfl_bfly(vector.extract(register, [], [i]), distance // held)
                swapped = vector.insert(value, swapped, [], [i])
        else:
            (at,) = x.layout.linear_thread_idxs()
            mgpu.utils.warpgroup_barrier()
            vector.store(register, scratch, [at])
            mgpu.utils.warpgroup_barrier()
            swapped = vector.load(register.type, scratch, [arith.xori(at, _index(distance))])
        return mgpu.FragmentedArray(_registers=np.array([swapped]), _layout=x.layout, _is_signed=x.is_signed)

    return swap(x, scratch)


def butterfly(combine, x: jax.Array, first: int, last: int, scratch, *, interpret: bool) -> jax.Array:
    """x combined with its exchanges at distances first, first / 2, ..., last: the same value throughout each block."""
    distance = first
    while distance >= last:
        x = combine(x, exchange(x, distance, scratch, interpret=interpret))
        distance //= 2
    return x


def load_tail(ref, size: int, repeat: int, *, interpret: bool) -> jax.Array:
    """[size] with `ref` [n] repeated element by element in the last `n * repeat` channels, zeros before."""
    start = size - ref.shape[0] * repeat
    if interpret:
        return jnp.concatenate([jnp.zeros((start,), ref.dtype), jnp.repeat(ref[...], repeat)])
    where = layout(size)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((size,), ref.dtype, where))
    def go(_, ref):
        held, element = size // THREADS, ref.type.element_type
        threads: Any = where.to_mgpu()
        (at,) = threads.linear_thread_idxs()
        register = llvm.mlir_undef(ir.VectorType.get((held,), element))
        for i in range(held):
            channel = arith.addi(at, _index(i))
            inside = arith.cmpi(arith.CmpIPredicate.uge, channel, _index(start))
            safe = arith.select(inside, arith.subi(channel, _index(start)), _index(0))
            value = llvm.load(element, _pointer(ref, arith.divui(safe, _index(repeat))))
            value = arith.select(inside, value, mgpu.utils.c(0.0, element))
            register = vector.insert(value, register, [], [i])
        return mgpu.FragmentedArray(_registers=np.array([register]), _layout=where.to_mgpu(), _is_signed=None)

    return go(ref)


def store(ref, x: jax.Array, *, start: int = 0, every: int = 1, interpret: bool) -> None:
    """Writes channels start, start + every, ... of x to all of `ref` [n]."""
    n = ref.shape[0]
    if interpret:
        ref[...] = x[start : start + n * every : every]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout(x.shape[0])))
    def go(_, ref, x):
        (register,) = x.registers
        (at,) = x.layout.linear_thread_idxs()
        held, bits = x.layout.vec_size, mgpu.utils.bitwidth(x.mlir_dtype)
        integer = ir.IntegerType.get_signless(bits)
        register = vector.bitcast(ir.VectorType.get((held,), integer), register)
        width = held if every == 1 else 1
        for i in range(0, held, max(width, min(every, held))):
            channel = arith.subi(arith.addi(at, _index(i)), _index(start))
            # Unsigned: channels before the first lie far past the end.
            inside = arith.cmpi(arith.CmpIPredicate.ult, channel, _index(n * every))
            if every > held:
                first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(channel, _index(every)), _index(0))
                inside = arith.andi(inside, first)
            with mgpu.utils.when(inside):
                value = register if width == held else vector.extract(register, [], [i])
                pointer = _pointer(ref, arith.divui(channel, _index(every)))
                llvm.store(value, pointer, alignment=width * bits // 8)

    go(ref, x)


def divide_one(x: jax.Array, *, interpret: bool) -> jax.Array:
    """1 / x, [size] float32, correctly rounded: Mosaic's own division is approximate."""
    if interpret:
        return 1 / x
    where = layout(x.shape[0])

    @plgpu.inline_mgpu(arg_types=(where,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, where))
    def go(_, x):
        (register,) = x.registers
        for i in range(x.layout.vec_size):
            value = vector.extract(register, [], [i])
            quotient: Any = llvm.inline_asm(value.type, [value], "rcp.rn.f32 $0, $1;", "=f,f")
            register = vector.insert(quotient, register, [], [i])
        return mgpu.FragmentedArray(_registers=np.array([register]), _layout=x.layout, _is_signed=None)

    return go(x)


def _pointer(ref, index):
    base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))
    bits = mgpu.utils.bitwidth(ref.type.element_type)
    offset = arith.index_cast(ir.IntegerType.get_signless(64), index)
    return mgpu.utils.getelementptr(base, [offset], ir.IntegerType.get_signless(bits))


def _index(value):
    return mgpu.utils.c(value, ir.IndexType.get())
