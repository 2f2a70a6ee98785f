"""Functions whose results have the same bits for every compiler, backend and batch shape."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from pallas_kernels.formats import exact_math


def round_to(x: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Rounds values to a float dtype, ties to even.

    XLA may drop a pair of casts f32 -> bf16 -> f32, and the rounding with it. XLA never drops the operation that is
    used here, `reduce_precision` (docs/dsv4.md 7.5).

    Args:
      x: float32 values, or values that have the dtype already.
      dtype: dtype of the result.
    """
    dtype = jnp.dtype(dtype)
    if dtype in (x.dtype, jnp.float32):
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@jax.custom_jvp
def straight_through(value: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `value`, which is x rounded, with the gradient of x: the straight-through estimator."""
    return value


@straight_through.defjvp
def _(primals, tangents):
    return primals[0], tangents[1].astype(primals[0].dtype)


def ordered_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sums over an axis by a binary tree of elementwise additions. The result lacks the axis.

    The order of additions in `jnp.sum` depends on shape and backend. This tree depends on the length of the axis alone.
    A length that is not a power of two is padded with zeros.
    """
    x = jnp.moveaxis(x, axis, 0)
    missing = (1 << (x.shape[0] - 1).bit_length()) - x.shape[0]
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]


def hadamard(x: Float[Array, "*rows N"]) -> Float[Array, "*rows N"]:
    """Multiplies the last axis by the Sylvester-ordered Hadamard matrix of size N, scaled by N**-0.5.

    The sums and differences come from butterflies in a fixed order, and are scaled once at the end (docs/dsv4.md 3.1).

    Args:
      x: [..., N] float32.

    Raises:
      ValueError: N is not a power of two.
    """
    n = x.shape[-1]
    if n & (n - 1) or n == 0:
        raise ValueError(f"the last axis must be a power of two long for a Hadamard transform, got shape {x.shape}")
    return exact_math.hadamard(x)


def in_blocks(x: Float[Array, "*rows N"], size: int) -> Float[Array, "*rows G size"]:
    """Splits the last axis of [..., N] into blocks: [..., N // size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def e8m0_ceil(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Returns the smallest power of two that is at least x, as E8M0 bits: exponent + 127 (docs/dsv4.md 7.1).

    The exponent is read from the bits of x, because `ceil(log2(x))` is off by one for some x near powers of two.

    Args:
      x: float32, positive, normal and at most 2**127.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits + 0x7FFFFF) >> 23).astype(jnp.uint8)  # the sum carries into the exponent if the mantissa is not 0


def e8m0_value(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns 2**(bits - 127) in float32 for E8M0 bits 1 to 254. Bits 0, as in an empty cache, give 0."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 23, jnp.float32)


def e8m0_reciprocal(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Returns 1 / e8m0_value(bits) in float32, which is exact for bits 1 to 253."""
    return e8m0_value(254 - bits)
