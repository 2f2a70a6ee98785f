"""Functions of float32 whose results have the same bits with every compiler: XLA on CPU and GPU, Mosaic, interpreter.

The functions use additions, products, comparisons and integer operations, which every backend rounds in the same way.
They avoid the backends' divisions, square roots, exp, sin and cos, whose approximations differ. Compilers may contract
a product and an addition to an FMA. Therefore, a product that is an operand of an addition is either exact or made by
`product`, which prevents the contraction by a comparison (`fence`). Kernels pass another `product`, an instruction that
is never contracted and is faster than the comparison.

The functions `exp_negative`, `reciprocal`, `inverse_sqrt` and `cos_sin` use operations on bits, which have no
derivative. If the caller passes no `product`, the functions have the derivatives of e**x, 1 / x and so on. If the
caller passes a `product`, as kernels do, the functions have no derivative.

Unless a function says otherwise, arguments must be finite, and results are within about two units in the last place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.runtime.launch import primitive


# The next three constants fix the order of additions, on which the bits of sums depend. A softmax over at most
# MAX_SHORT rows sums all rows at once. A softmax over more rows sums each of CHUNKS chunks of consecutive rows, then
# adds up the chunks.
MAX_SHORT = 16
CHUNKS = 8
# A sum over channels sums each slice of SLICE consecutive channels, then adds up the slices.
SLICE = 64

LOWEST = -3.0e38  # a number below all finite values that occur
_LOG2E = 1.4426950408889634
# 1.5 * 2**23. Adding this number to a float32 rounds the float32 to an integer, which is in the low bits of the sum.
_ROUND = 12582912.0
# Coefficients of a polynomial for 2**f, |f| <= 1/2, without the constant term 1; largest relative error 2**-23.4.
_EXP2 = (0.6931469775915049, 0.24022242080355077, 0.05550733754236157, 0.009671512869934276, 0.001326472389622271)
# pi / 2 as a sum of numbers with 14, 14, 14 and 4 bits. Their products with integers of 10, 10, 10 and 20 bits are
# exact.
_HALF_PI = (1.5706787109375, 0.00011761486530303955, 9.920313459588215e-10, 5.684341886080802e-14)
_SIN = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
# Coefficients of a polynomial in -angle**2. With angle**2, LLVM would know the signs of the terms, and remove the
# `fence` of a product.
_COS = (4.166664568298827e-2, 1.388731625493765e-3, 2.443315711809948e-5)


def fence(x: jax.Array) -> jax.Array:
    """Returns x, as the result of a comparison that compilers cannot remove. x must be at least -3e38."""
    return jnp.maximum(x, LOWEST)


def product(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """Returns x * y, rounded to float32 before anything is added to it. The product must be at least -3e38."""
    return fence(x * y)


def product_in(layout: Callable[..., Any]) -> Callable[[jax.Array, jax.Array | float], jax.Array]:
    """Returns an implementation of `product` for kernels.

    The implementation is an instruction that compilers never contract with an addition to an FMA. The instruction is
    faster than a product and a `fence`.

    Args:
      layout: function of a shape that returns the register layout of float32 arrays of this shape.
    """
    multiply = primitive(product)

    @mlir.emits(multiply, layout=layout, returns=lambda x, y: x)
    def _(x, y):
        xs = mlir.values(x)
        ys = [mlir.Scalar(y)] * len(xs) if isinstance(y, float) else mlir.values(y)
        return [thread_ops.multiply(*pair) for pair in zip(xs, ys, strict=True)]

    return multiply


vector_product = product_in(lambda shape: vectors.layout(*shape))


def _differentiable(derivative: Callable[[jax.Array, Any], Any]) -> Callable[[Callable], Callable]:
    """Returns a decorator that gives a function (x, product) a derivative, and makes `product` optional.

    If the caller passes no `product`, the function uses `exact_math.product` and has the derivative
    `derivative(x, result)`. If the caller passes a `product`, the function has no derivative.
    """

    def decorate(function):
        exact = jax.custom_jvp(functools.partial(function, product=product))

        @exact.defjvp
        def _(primals, tangents):
            (x,) = primals
            (dx,) = tangents
            result = exact(x)
            return result, jax.tree.map(lambda slope: slope * dx, derivative(x, result))

        @functools.wraps(function)
        def call(x, product=None):
            return exact(x) if product is None else function(x, product)

        return call

    return decorate


def tree_sum(terms: list[jax.Array]) -> jax.Array:
    """Returns the sum of 2**n terms, adding the second half to the first half until a single term is left.

    `dsv4_jax.quant.ordered_sum` adds in the same order.
    """
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [low + high for low, high in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


@_differentiable(lambda x, result: result)
def exp_negative(x: jax.Array, product: Callable) -> jax.Array:
    """Returns max(e**x, 2**-125) for x <= 0, also for -inf, with an absolute error up to 2**-22."""
    scaled = jnp.maximum(x * _LOG2E, -125.0)
    rounded = fence(scaled + _ROUND)
    fraction = scaled - (rounded - _ROUND)
    power = _polynomial(fraction, (1.0, *_EXP2), product)
    return _float(_bits(power) + (_bits(rounded) << 23))


@_differentiable(lambda x, result: -result * result)
def reciprocal(x: jax.Array, product: Callable) -> jax.Array:
    """Returns 1 / x for normal x > 0 up to 2**125."""
    y = _float(0x7EF311C3 - _bits(x))
    for _ in range(3):
        y = y * (2.0 - product(x, y))
    return y


@_differentiable(lambda x, result: -0.5 * result * result * result)
def inverse_sqrt(x: jax.Array, product: Callable) -> jax.Array:
    """Returns 1 / sqrt(x) for x from 2**-125 to 2**125."""
    half = x * 0.5
    y = _float(0x5F375A86 - (_bits(x) >> 1))
    for _ in range(3):
        y = y * (1.5 - product(half, y * y))
    return y


@_differentiable(lambda angle, result: (-result[1], result[0]))
def cos_sin(angle: jax.Array, product: Callable) -> tuple[jax.Array, jax.Array]:
    """Returns (cosine, sine) of angles from 0 to 2**20 radians, with an absolute error up to 2e-7."""
    rounded = fence(product(angle, 0.6366197723675814) + _ROUND)
    quarters = rounded - _ROUND
    # `quarters` is split into `high` and `low`, numbers of ten bits each, so that their products below are exact.
    high = fence(quarters + 1024 * _ROUND) - 1024 * _ROUND
    low = quarters - high
    remainder = angle
    for piece in _HALF_PI[:3]:
        remainder = remainder - high * piece
        remainder = remainder - low * piece
    remainder = remainder - quarters * _HALF_PI[3]
    square = product(remainder, remainder)
    sin = remainder + product(product(remainder, square), _polynomial(square, _SIN, product))
    cos = (1.0 - square * 0.5) + product(product(square, square), _polynomial(-square, _COS, product))
    quadrant = _bits(rounded) & 3
    odd = (quadrant & 1) == 1
    # Each sign is 1.0 or -1.0: 0x3F800000 are the bits of 1.0, and bit 1 of an integer becomes the sign bit. The sine
    # is negative in quadrants 2 and 3, the cosine in quadrants 1 and 2.
    sin_sign = _float(((quadrant & 2) << 30) | 0x3F800000)
    cos_sign = _float((((quadrant + 1) & 2) << 30) | 0x3F800000)
    return jnp.where(odd, sin, cos) * cos_sign, jnp.where(odd, cos, sin) * sin_sign


def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies the last axis of x, [.., n] float32, by the Sylvester-ordered Hadamard matrix and by n**-0.5.

    n is a power of two. The matrix product is log2(n) steps of additions and subtractions (butterflies).
    """
    size = x.shape[-1]
    step = 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * step), 2, step)
        low = pairs[..., 0, :]
        high = pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        step *= 2
    return x * size**-0.5


def round_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds float32 to values of bfloat16, ties to even, and returns float32.

    The function uses integer operations, since compilers may delete a cast to bfloat16 and back.
    """
    bits = _bits(x)
    return _float((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2**(exponent - 127) as float32: the value of an E8M0 scale. `exponent` is int32, 1 to 254."""
    return _float(exponent << 23)


def _polynomial(x, coefficients, product):
    *lower, total = coefficients
    for c in reversed(lower):
        total = product(x, total) + c
    return total


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
