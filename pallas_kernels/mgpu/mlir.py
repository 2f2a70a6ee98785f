"""Inline MLIR and PTX in Pallas kernels.

Pallas has no operation for some instructions (shuffles, loads with a cache hint, stores to another block of a cluster).
`inline` puts a function that emits MLIR for one thread into a kernel, and turns the function's results into Pallas
arrays. `emits` registers such a function as the code of a primitive. The other functions of this module are called
within a function that emits MLIR.
"""

import inspect
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

from pallas_kernels.runtime.pytrees import on_leaves


WARP = 32  # number of threads in a warp
THREADS = 128  # number of threads in a warpgroup, which Pallas calls a thread


def inline(emit: Callable, *args, layout: Callable[..., Any] | None = None, returns=None):
    """Puts the MLIR that `emit` writes for one thread into a Pallas kernel.

    Args:
      emit: function of one argument for each of `args`: a memref for a reference, a `Scalar` for an integer or bool
        scalar, and a `FragmentedArray` for an array (see `scalar` and `values`). `emit` returns a result for each of
        `returns`. For shape (), the result is an MLIR scalar. For other shapes, it is a list of the values that this
        thread holds, in the layout's order, as registers (MLIR vectors) or MLIR scalars.
      args: references and arrays, or pairs (reference, its `plgpu.RefType`) and (array, its layout).
      layout: function from a shape to a layout, for arrays that come without a layout. Scalars are the same in all
        threads (WG_SPLAT).
      returns: None, or one object or a tuple of objects with a `shape` and a `dtype`. For a result whose layout is not
        `layout(shape)`, the object is a `plgpu.ShapeDtypeStruct`, which names the layout.

    Returns:
      An array, or a tuple of arrays, like `returns`; None if `returns` is None.
    """

    def layout_of(shape):
        return layout(shape) if layout is not None and shape else plgpu.Layout.WG_SPLAT

    def type_of(arg):
        return layout_of(arg.shape) if isinstance(arg, jax.Array) else plgpu.RefType()

    def with_layout(struct):
        if isinstance(struct, plgpu.ShapeDtypeStruct):
            return struct
        return plgpu.ShapeDtypeStruct(struct.shape, struct.dtype, layout_of(struct.shape))

    pairs = [arg if isinstance(arg, tuple) else (arg, type_of(arg)) for arg in args]
    several = isinstance(returns, tuple)
    structs = returns if several else (returns,)
    kinds: Any = () if returns is None else tuple(with_layout(struct) for struct in structs)

    @plgpu.inline_mgpu(arg_types=tuple(kind for _, kind in pairs), return_type=kinds or None)
    def run(_, *operands):
        emitted = emit(*map(_operand, operands))
        if returns is None:
            return None
        results = emitted if several else [emitted]
        return tuple(_array(x, kind) for x, kind in zip(results, kinds, strict=True))

    results = run(*(value for value, _ in pairs))
    return results if several or returns is None else results[0]


def emits(primitive, *layouts, layout: Callable[..., Any] | None = None, returns=None) -> Callable:
    """Returns a decorator that registers a function as a primitive's code for the GPU.

    The function emits MLIR for one thread. It gets the primitive's arguments, which may be pytrees. References and
    arrays in the arguments are replaced as in `inline`; everything else is passed on unchanged.

    Args:
      primitive: the primitive, see `runtime.launch`.
      layouts: layouts of the references and arrays in the arguments, in order: a layout for an array, a `plgpu.RefType`
        for a reference, or None for the default. Trailing layouts may be left out. Instead of layouts, a function from
        the primitive's arguments to a tuple of layouts may be given.
      layout: as in `inline`.
      returns: as in `inline`, or a function from the primitive's arguments to such a value.
    """

    def register(emit):
        def run(*args, **kwargs):
            emit_operands, operands = on_operands(emit, *args, **kwargs)
            chosen = layouts[0](*args, **kwargs) if layouts and inspect.isfunction(layouts[0]) else layouts
            pairs = (x if kind is None else (x, kind) for x, kind in itertools.zip_longest(operands, chosen))
            kinds = returns(*args, **kwargs) if callable(returns) else returns
            return inline(emit_operands, *pairs, layout=layout, returns=kinds)

        primitive.mosaic(run)
        return emit

    return register


def on_operands(function: Callable, *args, **kwargs) -> tuple[Callable, list[Any]]:
    """Binds all arguments of a function except arrays and references.

    Returns:
      (call, operands). `operands` is the list of the arrays and references within `args` and `kwargs`, and
      `call(*operands)` is `function(*args, **kwargs)`.
    """
    return on_leaves(function, args, kwargs, lambda leaf: isinstance(leaf, jax.Array) or hasattr(leaf, "at"))


def _operand(x):
    """Returns a `Scalar` for an integer or bool scalar, and other operands as they are."""
    if isinstance(x, mgpu.FragmentedArray) and not x.shape and isinstance(x.mlir_dtype, ir.IntegerType):
        return scalar(x)
    return x


def _array(parts, kind):
    """Returns the `FragmentedArray` of type `kind` whose values in this thread are `parts`, see `inline`."""
    signed = mgpu.utils.is_signed(kind.dtype)
    if not kind.shape:
        return mgpu.FragmentedArray.splat(parts, (), is_signed=signed)
    layout = kind.layout.to_mgpu()
    parts = list(parts)
    registers = np.empty(layout.registers_shape(kind.shape), dtype=object)
    if not isinstance(parts[0].type, ir.VectorType):
        size = len(parts) // math.prod(registers.shape)
        parts = [pack(parts[i : i + size]) for i in range(0, len(parts), size)]
    for position, register in zip(np.ndindex(registers.shape), parts, strict=True):
        registers[position] = register
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def ptx(
    code: str,
    *operands,
    results=(),
    in_out: Sequence[Any] = (),
    pure: bool = False,
    convergent: bool | None = None,
) -> Any:
    """Emits PTX instructions.

    Args:
      code: the instructions. `$0`, `$1`, ... stand for the results, then for the operands, then for `in_out`.
      operands: MLIR integers, floats and pointers, or Python numbers as `Scalar` takes them.
      results: an MLIR type, or a sequence of types.
      in_out: initial values of the first results, for instructions that read and write a register.
      pure: whether the results depend on the operands alone, so that compilers may move, merge and drop the code.
      convergent: whether compilers must not move the code into a branch, as for a barrier or a shuffle, which threads
        execute together; None: True unless `pure`.

    Returns:
      A `Scalar`, or a list of them if `results` is a sequence.
    """
    operands = [Scalar(x) for x in operands]
    types = [results] if isinstance(results, ir.Type) else list(results)
    if not types:
        packed = ir.Type.parse("!llvm.void")
    else:
        packed = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    constraints = [f"={_constraint(kind)}" for kind in types] + [_constraint(x.type) for x in operands]
    constraints += [str(i) for i in range(len(in_out))]
    convergent = not pure if convergent is None else convergent
    value: Any = llvm.inline_asm(
        packed, [*operands, *in_out], code, ",".join(constraints), has_side_effects=not pure, convergent=convergent
    )
    if isinstance(results, ir.Type):
        return Scalar(value)
    values = [value] if len(types) == 1 else [llvm.extractvalue(kind, value, [i]) for i, kind in enumerate(types)]
    return [Scalar(value) for value in values]


def _constraint(kind):
    if isinstance(kind, llvm.PointerType):
        return "l" if kind.address_space in (0, 1) else "r"
    return {"i1": "b", "i16": "h", "i32": "r", "i64": "l", "f32": "f"}[str(kind)]


def _operator(integers: Any, floats: Any = None) -> "Callable[[Scalar, Any], Scalar]":
    """Returns an operator of `Scalar`, given MLIR's operations on integers and on floats, or None for no operation."""

    def apply(x, y):
        operation = floats if isinstance(x.type, ir.FloatType) else integers
        return Scalar(operation(x, _constant(y, x.type)))

    return apply


def _comparison(predicate: str) -> "Callable[[Scalar, Any], Scalar]":
    return _operator(lambda x, y: arith.cmpi(getattr(arith.CmpIPredicate, predicate), x, y))


class Scalar(ir.Value):
    """A number that the kernel computes, an MLIR value with Python's operators. Conditions are integers of one bit.

    `Scalar(x)` takes an MLIR value, or a Python number, which becomes an integer of 32 bits or a float32. The second
    operand of an operator may be a Python number, which gets the type of the first. Integers are unsigned, except those
    of `is_below`, `is_at_least`, `signed_minimum` and `signed_maximum`.
    """

    def __init__(self, value: Any):
        super().__init__(_constant(value, f32_type() if isinstance(value, float) else int_type()))

    __add__ = __radd__ = _operator(arith.addi, arith.addf)
    __sub__ = _operator(arith.subi, arith.subf)
    __mul__ = _operator(arith.muli, arith.mulf)
    __truediv__ = _operator(None, arith.divf)
    __floordiv__ = _operator(arith.divui)
    __mod__ = _operator(arith.remui)
    __and__ = _operator(arith.andi)
    __or__ = _operator(arith.ori)
    __xor__ = _operator(arith.xori)
    __lshift__ = _operator(arith.shli)
    __rshift__ = _operator(arith.shrui)
    __lt__, __le__, __gt__, __ge__ = (_comparison(predicate) for predicate in ("ult", "ule", "ugt", "uge"))
    equals = _comparison("eq")
    is_below, is_at_least = (_comparison(predicate) for predicate in ("slt", "sge"))
    minimum = _operator(arith.minui, arith.minimumf)
    maximum = _operator(arith.maxui, arith.maximumf)
    signed_minimum = _operator(arith.minsi)
    signed_maximum = _operator(arith.maxsi)

    def __rsub__(self, other: int | float) -> "Scalar":
        return Scalar(_constant(other, self.type)) - self

    def where(self, yes: Any, no: Any) -> "Scalar":
        """Returns `yes` if this condition holds, else `no`: MLIR values, or Python numbers."""
        kind = Scalar(yes if isinstance(yes, ir.Value) else no).type
        return Scalar(arith.select(self, _constant(yes, kind), _constant(no, kind)))

    def bits(self) -> "Scalar":
        """Returns the bits of a float32."""
        return Scalar(arith.bitcast(int_type(), self))

    def as_float(self) -> "Scalar":
        """Returns the float32 with these bits."""
        return Scalar(arith.bitcast(f32_type(), self))


f32_type = ir.F32Type.get
shared_pointer = mgpu.utils.memref_ptr  # function of a reference to shared memory that returns an LLVM pointer


def int_type(bits: int = 32):
    return ir.IntegerType.get_signless(bits)


def vector_type(length: int, element):
    """Returns the MLIR type of a register of `length` values of the MLIR type `element`."""
    return ir.VectorType.get((length,), element)


def _constant(x, kind):
    """Returns a Python number as a constant of an MLIR type, and an MLIR value as it is."""
    if isinstance(x, ir.Value):
        return x
    if kind == int_type():
        x = (x + (1 << 31)) % (1 << 32) - (1 << 31)  # unsigned numbers from 2**31 on are passed as negative ones
    return mgpu.utils.c(x, kind)


def to_i64(x) -> Scalar:
    """Converts a signed integer or an MLIR index to an MLIR integer of 64 bits."""
    kind = int_type(64)
    x = Scalar(x)
    return Scalar(arith.index_cast(kind, x) if isinstance(x.type, ir.IndexType) else arith.extsi(kind, x))


def to_u64(x: Scalar | int) -> Scalar:
    """Converts an unsigned integer to an MLIR integer of 64 bits."""
    return Scalar(arith.extui(int_type(64), Scalar(x)))


def values(x) -> list[Scalar]:
    """Returns the values in x: a scalar, a register, or the part of a `FragmentedArray` that this thread holds."""
    if isinstance(x, mgpu.FragmentedArray):
        return [value for register in x.registers.flat for value in values(register)]
    if not isinstance(x.type, ir.VectorType):
        return [Scalar(x)]
    return [Scalar(vector.extract(x, [], [i])) for i in range(ir.VectorType(x.type).shape[0])]


def scalar(x):
    """Returns this thread's value of x, see `values`. The thread must hold exactly one value."""
    (value,) = values(x)
    return value


def pack(scalars: Iterable[Any]):
    """Packs MLIR scalars into a register, an MLIR vector."""
    scalars = list(scalars)
    return vector.from_elements(vector_type(len(scalars), scalars[0].type), scalars)


def thread() -> Scalar:
    """Returns this thread's index in its warpgroup."""
    return _thread(int_type())


def wide_thread():
    """Returns this thread's index in its warpgroup, as an MLIR integer of 64 bits."""
    return _thread(int_type(64))


def _thread(kind):
    return Scalar(arith.index_cast(kind, gpu.thread_id(gpu.Dimension.x))) % THREADS


def global_pointer(ref):
    """Returns an LLVM pointer to the memory of a reference to global memory."""
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), shared_pointer(ref))


def at(pointer, offset, element=None):
    """Returns the pointer `pointer + offset`.

    `offset` is a Python integer or an MLIR value: a number of elements of the MLIR type `element`, or a number of bytes
    if `element` is None.
    """
    return mgpu.utils.getelementptr(pointer, [offset], int_type(8) if element is None else element)


def element(ref, index, size: int | None = None):
    """Returns a pointer to an element of a contiguous reference to global memory.

    Args:
      ref: contiguous reference of any shape.
      index: row-major index of the element, a signed integer.
      size: number of bytes of an element; None for the size of the reference's element type.
    """
    if size is None:
        return at(global_pointer(ref), to_i64(index), ref.type.element_type)
    return at(global_pointer(ref), to_i64(index) * size)
