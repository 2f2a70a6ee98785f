"""Functions whose float32 bits are the same from every compiler: XLA on CPU and GPU, Mosaic, the interpreter.

They use additions, products, comparisons and integer operations alone, which every backend rounds alike. Divisions,
square roots, exp, sin and cos are missing because backends approximate them differently. A product that feeds an
addition is exact or made by `product`, so that contracting the two to an FMA changes no bit. Kernels pass their own
`product`, an instruction that is never contracted, which costs less than a fence.

Exact functions work on bits, which have no derivative. So without a `product` of the caller they have the derivative
of the function that they compute; within kernels, which pass their own, they have none.

Arguments must be finite, and results are within about two units in the last place, unless a function says otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.runtime.launch import primitive


# A softmax over more than MAX_SHORT rows sums CHUNKS chunks of consecutive rows, then adds up the chunks.
MAX_SHORT = 16
CHUNKS = 8
# A sum over channels is taken over each SLICE of consecutive channels, then over the slices.
SLICE = 64

LOWEST = -3.0e38
_LOG2E = 1.4426950408889634
# Adding this number rounds to an integer and leaves it in the low bits of the sum.
_ROUND = 12582912.0
# 2**f for |f| <= 1/2 without the constant term 1; largest relative error 2**-23.4.
_EXP2 = (0.6931469775915049, 0.24022242080355077, 0.05550733754236157, 0.009671512869934276, 0.001326472389622271)
# pi / 2 in pieces of 14, 14, 14 and 4 bits: products with integers of 10, 10, 10 and 20 bits are exact.
_HALF_PI = (1.5706787109375, 0.00011761486530303955, 9.920313459588215e-10, 5.684341886080802e-14)
_SIN = (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4)
# Coefficients of powers of minus the square: LLVM would know the sign of positive terms and remove the fence.
_COS = (4.166664568298827e-2, 1.388731625493765e-3, 2.443315711809948e-5)


def fence(x: jax.Array) -> jax.Array:
    """Returns x, for x >= -3e38, through a comparison that compilers cannot remove."""
    return jnp.maximum(x, LOWEST)


def product(x: jax.Array, y: jax.Array | float) -> jax.Array:
    """Returns x * y, above -3e38 or infinite, rounded before anything is added to it."""
    return fence(x * y)


def product_in(layout: Callable[..., Any]) -> Callable[[jax.Array, jax.Array | float], jax.Array]:
    """Returns `product` for kernels and float32 arrays whose register layout is `layout(shape)`.

    It is an instruction that compilers never contract with a sum to an FMA, cheaper than a fence.
    """
    multiply = primitive(product)

    @mlir.emits(multiply, layout=layout, returns=lambda x, y: x)
    def _(x, y):
        xs = mlir.values(x)
        ys = [mlir.f32(y)] * len(xs) if isinstance(y, float) else mlir.values(y)
        return [thread_ops.multiply(*pair) for pair in zip(xs, ys, strict=True)]

    return multiply


vector_product = product_in(lambda shape: vectors.layout(*shape))


def _differentiable(derivative: Callable[[jax.Array, Any], Any]) -> Callable[[Callable], Callable]:
    """Decorates an exact function: its derivative is `derivative(x, result)`, unless the caller passes a product."""

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
    """Returns the sum of 2**n terms in the order of `quant.ordered_sum`: adds the halves until one term is left."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [low + high for low, high in zip(terms[:half], terms[half:], strict=True)]
    return terms[0]


@_differentiable(lambda x, result: result)
def exp_negative(x: jax.Array, product: Callable) -> jax.Array:
    """Returns max(e**x, 2**-125) for x <= 0, -inf included, with an absolute error of 2**-22."""
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
    """Returns the cosine and the sine of angles from 0 to 2**20 radians, with an absolute error of 2e-7."""
    rounded = fence(product(angle, 0.6366197723675814) + _ROUND)
    quarters = rounded - _ROUND
    # The halves have ten bits each, so that the products below are exact.
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
    sign = _float(((quadrant & 2) << 30) | 0x3F800000)
    turned = _float((((quadrant + 1) & 2) << 30) | 0x3F800000)
    return jnp.where(odd, sin, cos) * turned, jnp.where(odd, cos, sin) * sign


def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies the last axis of x, n long and float32, by the Sylvester-ordered Hadamard matrix and by n**-0.5.

    Adds and subtracts butterflies, then multiplies once.
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
    """Rounds float32 to bfloat16 values, ties to even, by integer operations: compilers may delete a pair of casts."""
    bits = _bits(x)
    return _float((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF)


def _polynomial(x, coefficients, product):
    *lower, total = coefficients
    for c in reversed(lower):
        total = product(x, total) + c
    return total


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)
