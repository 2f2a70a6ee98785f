"""Inline MLIR and PTX in Pallas kernels.

Pallas has no operation for some instructions (shuffles, loads with a cache hint, stores to another block of a cluster).
`inline` puts code that emits MLIR for one thread into a kernel, and turns its results into Pallas arrays. The other
functions are called within such code.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector


WARP = 32  # threads of a warp
THREADS = 128  # threads of a warpgroup, which Pallas calls a thread


def inline(emit: Callable, *args: Any, layout: Callable[..., Any] | None = None, returns: Any = None) -> Any:
    """Puts the MLIR that `emit` writes for one thread into a Pallas kernel; returns an array for each result.

    Args:
      emit: a function of a memref for each reference and a `FragmentedArray` for each array (see `scalar` and
        `values`). It returns a result for each of `returns`: an MLIR scalar for shape (), otherwise the values of the
        array that this thread holds, in the layout's order, as a list of registers (MLIR vectors) or MLIR scalars.
      args: references and arrays, or pairs (reference or array, its `plgpu.RefType` or layout).
      layout: shape -> layout, the default for arrays. Scalars are the same in all threads (WG_SPLAT).
      returns: None, or one object or a tuple of objects with a `shape` and a `dtype`. Objects whose layout is not the
        default are `plgpu.ShapeDtypeStruct`.
    """

    def layout_of(shape):
        return layout(shape) if layout is not None and shape else plgpu.Layout.WG_SPLAT

    def type_of(arg):
        return layout_of(arg.shape) if isinstance(arg, jax.Array) else plgpu.RefType()

    pairs = [arg if isinstance(arg, tuple) else (arg, type_of(arg)) for arg in args]
    several = isinstance(returns, tuple)
    kinds: Any = tuple(
        x if isinstance(x, plgpu.ShapeDtypeStruct) else plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout_of(x.shape))
        for x in (returns if several else [] if returns is None else [returns])
    )

    @plgpu.inline_mgpu(arg_types=tuple(kind for _, kind in pairs), return_type=kinds or None)
    def run(_, *operands):
        results = emit(*operands)
        if returns is None:
            return None
        return tuple(_array(x, kind) for x, kind in zip(results if several else [results], kinds, strict=True))

    results = run(*(value for value, _ in pairs))
    return results if several or returns is None else results[0]


def emits(primitive: Any, *layouts: Any, layout: Callable[..., Any] | None = None, returns: Any = None) -> Callable:
    """Registers code for one thread, such as `inline` takes, as a primitive's implementation for the GPU.

    Args:
      primitive: the primitive. Its static arguments are keywords, and the code gets them as they are. The elements of
        its arguments that are tuples are arguments of the code.
      layouts: layouts of the code's first arguments, None for the default.
      layout: as in `inline`.
      returns: as in `inline`, or a function of the primitive's arguments.
    """

    def register(emit):
        def run(*args, **static):
            flat = [x for arg in args for x in (arg if isinstance(arg, (tuple, list)) else [arg])]
            pairs = [x if kind is None else (x, kind) for x, kind in itertools.zip_longest(flat, layouts)]
            kinds = returns(*args, **static) if callable(returns) else returns
            return inline(functools.partial(emit, **static), *pairs, layout=layout, returns=kinds)

        primitive.mosaic(run)
        return emit

    return register


def _array(parts, kind):
    """Returns the `FragmentedArray` of the values that a thread holds."""
    signed = mgpu.utils.is_signed(kind.dtype)
    if not kind.shape:
        return mgpu.FragmentedArray.splat(parts, (), is_signed=signed)
    layout = kind.layout.to_mgpu()
    parts = list(parts)
    registers = np.empty(layout.registers_shape(kind.shape), dtype=object)
    if not isinstance(parts[0].type, ir.VectorType):
        size = len(parts) // math.prod(registers.shape)
        parts = [pack(parts[i : i + size]) for i in range(0, len(parts), size)]
    for at, register in zip(np.ndindex(registers.shape), parts, strict=True):
        registers[at] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def ptx(
    code: str,
    *operands: Any,
    results: Any = (),
    in_out: Sequence[Any] = (),
    pure: bool = False,
    convergent: bool | None = None,
) -> Any:
    """Emits PTX instructions.

    Args:
      code: the instructions. `$0`, `$1`, ... are the results, then the operands, then `in_out`.
      operands: MLIR integers, floats and pointers.
      results: an MLIR type, or a sequence of types.
      in_out: values that the first results hold before the instructions.
      pure: whether the results depend on the operands alone, so that compilers may move, merge and drop the code.
      convergent: whether compilers must keep the set of threads that execute the code together; default `not pure`.

    Returns:
      An MLIR value, or a list of values if `results` is a sequence.
    """
    types = [results] if isinstance(results, ir.Type) else list(results)
    if not types:
        packed = ir.Type.parse("!llvm.void")
    else:
        packed = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    constraints = [f"={_constraint(kind)}" for kind in types] + [_constraint(x.type) for x in operands]
    constraints += [str(i) for i in range(len(in_out))]
    convergent = not pure if convergent is None else convergent
    done: Any = llvm.inline_asm(
        packed, [*operands, *in_out], code, ",".join(constraints), has_side_effects=not pure, convergent=convergent
    )
    if isinstance(results, ir.Type):
        return done
    return [done] if len(types) == 1 else [llvm.extractvalue(kind, done, [i]) for i, kind in enumerate(types)]


def _constraint(kind):
    if isinstance(kind, llvm.PointerType):
        return "l" if kind.address_space in (0, 1) else "r"
    return {"i1": "b", "i16": "h", "i32": "r", "i64": "l", "f32": "f"}[str(kind)]


f32_type = ir.F32Type.get
constant = mgpu.utils.c  # (number, MLIR type)
shared_pointer = mgpu.utils.memref_ptr  # of a reference to shared memory


def int_type(bits: int = 32) -> Any:
    return ir.IntegerType.get_signless(bits)


def vector_type(length: int, element: Any) -> Any:
    """The type of a register of `length` values."""
    return ir.VectorType.get((length,), element)


def i32(value: int) -> Any:
    """Returns a 32-bit constant of a signed or an unsigned number."""
    return constant(value - (1 << 32) if value >= 1 << 31 else value, int_type())


def i64(value: int) -> Any:
    return constant(value, int_type(64))


def f32(value: float) -> Any:
    return constant(value, f32_type())


def index(value: int) -> Any:
    """Returns a constant of MLIR's index type."""
    return constant(value, ir.IndexType.get())


def to_i64(x: Any) -> Any:
    """Converts a signed integer or an index to 64 bits."""
    kind = int_type(64)
    return arith.index_cast(kind, x) if isinstance(x.type, ir.IndexType) else arith.extsi(kind, x)


def values(x: Any) -> list[Any]:
    """Returns the MLIR scalars of a register, or all that this thread holds of a `FragmentedArray`."""
    if isinstance(x, mgpu.FragmentedArray):
        return [value for register in x.registers.flat for value in values(register)]
    if not isinstance(x.type, ir.VectorType):
        return [x]
    return [vector.extract(x, [], [i]) for i in range(ir.VectorType(x.type).shape[0])]


def scalar(x: Any) -> Any:
    """Returns the only MLIR scalar of a register, or that this thread holds of a `FragmentedArray`."""
    (value,) = values(x)
    return value


def pack(scalars: Iterable[Any]) -> Any:
    """Packs MLIR scalars into a register."""
    scalars = list(scalars)
    return vector.from_elements(vector_type(len(scalars), scalars[0].type), scalars)


def thread(bits: int = 32) -> Any:
    """Returns this thread's number in its warpgroup, as an integer of 32 or 64 bits."""
    kind = int_type(bits)
    return arith.remui(arith.index_cast(kind, gpu.thread_id(gpu.Dimension.x)), constant(THREADS, kind))


def global_pointer(ref: Any) -> Any:
    """Returns a pointer to a reference to global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), shared_pointer(ref))


def at(pointer: Any, offset: Any, element: Any = None) -> Any:
    """Returns a pointer moved by `offset`, an int or an MLIR integer, in bytes or in elements of an MLIR type."""
    return mgpu.utils.getelementptr(pointer, [offset], int_type(8) if element is None else element)
