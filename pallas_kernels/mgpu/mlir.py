"""What kernels need to emit MLIR and PTX by hand: constants, pointers, thread numbers, inline code, register arrays.

Pallas has no operation for some instructions (shuffles, loads with a cache hint, stores to another block of a cluster).
`inline` puts code that emits MLIR for one thread into a kernel, and turns its results into Pallas arrays. The other
functions are for use within such code.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector


WARP = 32  # threads
THREADS = 128  # of a warpgroup, which is what Pallas calls a thread


def inline(emit: Callable, *args: Any, layout: Callable[..., Any] | None = None, returns: Any = None) -> Any:
    """Puts code that `emit` writes in MLIR for one thread into a Pallas kernel; returns an array for each result.

    Args:
      emit: is called with a memref for each reference and a `FragmentedArray` for each array (see `scalar` and
        `values`). It returns a result for each of `returns`: an MLIR scalar for shape (), otherwise this thread's part
        of the array in the order of its layout, as a list of registers (MLIR vectors) or of MLIR scalars.
      args: references and arrays, or pairs (reference or array, its `plgpu.RefType` or layout).
      layout: shape -> layout, of arrays for which none is given. Scalars are the same in all threads (WG_SPLAT).
      returns: None, or one or a tuple of objects with a `shape`, a `dtype` and, for one without `layout`'s, a `layout`.
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


def _array(parts, kind):
    """The register array of what a thread holds."""
    signed = mgpu.utils.is_signed(kind.dtype)
    if not kind.shape:
        return mgpu.FragmentedArray.splat(parts, (), is_signed=signed)
    layout, parts = kind.layout.to_mgpu(), list(parts)
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
    """PTX instructions; returns an MLIR value if `results` is a type, a list if it is a sequence of types.

    In `code`, `$0`, `$1`, ... are the results, then the operands (MLIR integers, floats and pointers), then `in_out`,
    what the first results hold before. `pure`: they depend on their operands alone, so that the compiler may move,
    merge and drop them. `convergent`: it must not change which threads execute them together; by default if not pure.
    """
    types = [results] if isinstance(results, ir.Type) else list(results)
    match types:
        case []:
            packed = ir.Type.parse("!llvm.void")
        case [packed]:
            pass
        case _:
            packed = llvm.StructType.get_literal(types)
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


def int_type(bits: int = 32) -> Any:
    return ir.IntegerType.get_signless(bits)


def f32_type() -> Any:
    return ir.F32Type.get()


def vector_type(length: int, element: Any) -> Any:
    """The type of a register of `length` values."""
    return ir.VectorType.get((length,), element)


def i32(value: int) -> Any:
    """A 32-bit constant, given as a signed or an unsigned number."""
    return constant(value - (1 << 32) if value >= 1 << 31 else value, int_type())


def i64(value: int) -> Any:
    return constant(value, int_type(64))


def f32(value: float) -> Any:
    return constant(value, f32_type())


def index(value: int) -> Any:
    """A constant to index with."""
    return constant(value, ir.IndexType.get())


def constant(value: int | float, kind: Any) -> Any:
    """A constant of an MLIR type."""
    return mgpu.utils.c(value, kind)


def to_i64(x: Any) -> Any:
    """A signed integer, or an index, as a 64-bit one."""
    kind = int_type(64)
    return arith.index_cast(kind, x) if isinstance(x.type, ir.IndexType) else arith.extsi(kind, x)


def values(x: Any) -> list[Any]:
    """The MLIR scalars that this thread holds of a `FragmentedArray`, or those of one register."""
    if isinstance(x, mgpu.FragmentedArray):
        return [value for register in x.registers.flat for value in values(register)]
    if not isinstance(x.type, ir.VectorType):
        return [x]
    return [vector.extract(x, [], [i]) for i in range(ir.VectorType(x.type).shape[0])]


def scalar(x: Any) -> Any:
    """The only MLIR scalar that this thread holds of a `FragmentedArray`, or that of one register."""
    (value,) = values(x)
    return value


def pack(scalars: Iterable[Any]) -> Any:
    """A register of MLIR scalars."""
    scalars = list(scalars)
    return vector.from_elements(vector_type(len(scalars), scalars[0].type), scalars)


def thread(bits: int = 32) -> Any:
    """This thread's number in its warpgroup, as an integer of 32 or 64 bits."""
    kind = int_type(bits)
    return arith.remui(arith.index_cast(kind, gpu.thread_id(gpu.Dimension.x)), constant(THREADS, kind))


def global_pointer(ref: Any) -> Any:
    """A pointer to a reference to global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), shared_pointer(ref))


def shared_pointer(ref: Any) -> Any:
    """A pointer to a reference to shared memory."""
    return mgpu.utils.memref_ptr(ref)


def at(pointer: Any, offset: Any, element: Any = None) -> Any:
    """A pointer `offset` bytes, or `offset` elements of an MLIR type, further on; an MLIR integer or an int."""
    return mgpu.utils.getelementptr(pointer, [offset], int_type(8) if element is None else element)
