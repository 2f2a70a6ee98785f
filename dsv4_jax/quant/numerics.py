"""Arithmetic whose bits must not depend on the compiler, the backend or the shape of the batch."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats import exact_math


def round_to(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Rounds float32 values, or values that have the dtype already, to a float dtype, ties to even.

    XLA may drop a plain cast f32 -> bf16 -> f32 and keep the excess precision, but never a `reduce_precision` (dsv4.md
    7.5).
    """
    dtype = jnp.dtype(dtype)
    if dtype in (x.dtype, jnp.float32):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@jax.custom_jvp
def straight_through(value: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `value`, a rounded x, with the gradient of x."""
    return value


@straight_through.defjvp
def _(primals, tangents):
    return primals[0], tangents[1].astype(primals[0].dtype)


def ordered_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sums over an axis as a binary tree of elementwise adds, and removes the axis.

    The order of `jnp.sum` depends on shape and backend. A fixed tree gives the same terms the same bits in any batch; a
    length that is not a power of two is padded with zeros.
    """
    x = jnp.moveaxis(x, axis, 0)
    missing = (1 << (x.shape[0] - 1).bit_length()) - x.shape[0]
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


def hadamard(x: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
    """Multiplies the last axis by the Sylvester-ordered Hadamard matrix of size N, scaled by N**-0.5 (dsv4.md 3.1).

    Takes float32 and adds and subtracts butterflies, then multiplies once. Raises ValueError if N is no power of two.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"the last axis must be a power of two long for a Hadamard transform, got shape {x.shape}")
    return exact_math.hadamard(x)


def in_blocks(x: Float[Array, "*rows N"], size: int) -> Float[Array, "*rows G size"]:
    """Splits the last axis into blocks, [..., N // size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def e8m0_ceil(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Returns the E8M0 bits (exponent + 127) of the smallest power of two that is at least x (dsv4.md 7.1).

    x is positive and normal, at most 2**127. The exponent is read off its bits, because `ceil(log2(x))` is off by one
    near powers of two.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)  # one more where the mantissa is not 0


def e8m0_value(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns 2**(bits - 127) in float32, for bits 1 to 254. The byte 0 of a fresh pool reads as 0."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 23, jnp.float32)


def e8m0_reciprocal(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 / e8m0_value(bits) in float32, exact for bits 1 to 253."""
    return e8m0_value(254 - bits)
