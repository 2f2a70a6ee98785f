"""The inverse RoPE rotation of attention results, for `wgmma` accumulators and for vectors, see `mgpu.vectors`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats.exact_math import cos_sin, product, round_bfloat16
from pallas_kernels.mgpu import bfloat16_words, mlir, vectors, wgmma
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import primitive


def check_frequencies(inv_freq: jax.Array | None, max_pairs: int) -> None:
    """Raises NotImplementedError unless `inv_freq` is None or [P] float32, P a multiple of 4 up to `max_pairs`."""
    if inv_freq is not None:
        check_array("inv_freq", inv_freq, jnp.float32, None)
        pairs = len(inv_freq)
        check_rules({f"up to {max_pairs} pairs, a multiple of 4, got {pairs}": pairs <= max_pairs and pairs % 4 == 0})


def rope_angles(positions: jax.Array, inv_freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin), each [T, P] float32, of the angles `position * inv_freq`; negative positions count as 0."""
    angle = jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * inv_freq[None, :]
    return jnp.cos(angle), jnp.sin(angle)


@primitive
def inverse_rope(values: jax.Array, angles_gmem, token: jax.Array) -> jax.Array:
    """Rotates the last 2 * P columns of an accumulator back by a token's angles, in interleaved pairs.

    Args:
      values: [64, columns] float32 in the layout of `wgmma` accumulators. The rotated columns are rounded to bfloat16
        before the rotation.
      angles_gmem: (cos, sin), each [T, P] float32.
      token: int32 scalar, index of the token.

    Returns:
      Array of the shape, dtype and layout of `values`.
    """
    cos_gmem, sin_gmem = angles_gmem
    cos = cos_gmem[token][None]
    sin = sin_gmem[token][None]
    head, tail = jnp.split(values, [values.shape[1] - 2 * cos.shape[1]], axis=1)
    rounded = tail.astype(jnp.bfloat16).astype(jnp.float32)
    even = rounded[:, ::2]
    odd = rounded[:, 1::2]
    rotated = jnp.stack([even * cos + odd * sin, odd * cos - even * sin], axis=2).reshape(tail.shape)
    return jnp.concatenate([head, rotated], axis=1)


@mlir.emits(inverse_rope, layout=wgmma.layout, returns=lambda values, angles_gmem, token: values)
def _emit_inverse_rope(values, angles_gmem, token):
    layout = values.layout
    width = values.shape[1]
    pairs = angles_gmem[0].type.shape[1]
    _, column = map(mlir.Scalar, next(layout.thread_idxs(values.shape)))
    # An angle has 4 bytes and belongs to two columns, so a column moves the address by 2 bytes.
    row = mlir.to_i64(token)
    offset = mlir.to_i64(column * 2) + row * (4 * pairs)
    pointers = [mlir.at(mlir.global_pointer(x), offset) for x in angles_gmem]
    strides = layout.tiling.tile_strides((width, 1))
    factors: dict[int, list[Any]] = {}  # {value of `rotated` below: [cosine, sine]}
    for indices in np.ndindex(values.registers.shape):
        # `distance` is the number of columns from the thread's first column to the register's column, the same in all
        # threads.
        distance = sum(i * stride for i, stride in zip(indices, strides, strict=False)) % width
        rotated = distance - (width - 2 * pairs)  # `distance` minus the number of columns without RoPE
        pair = values.registers[indices]
        if rotated < 0:
            yield pair
            continue
        if rotated not in factors:
            factors[rotated] = [llvm.load(mlir.f32_type(), mlir.at(x, 2 * rotated), alignment=4) for x in pointers]
        yield _rotate_pair(pair, *factors[rotated])


def _rotate_pair(pair, cos, sin):
    even, odd = bfloat16_words.unpack(bfloat16_words.pack(*mlir.values(pair)))
    rotated_even = even * cos + odd * sin
    return mlir.pack([rotated_even, odd * cos - even * sin])


def vector_inverse_rope(positions_gmem, inv_freq_gmem, token, channels: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that rounds a vector to bfloat16 and rotates its channels back by the token's position.

    The position and the frequencies are loaded here, so that the loads overlap with work before the rotation.

    Args:
      positions_gmem: [T] int32; negative positions count as 0.
      inv_freq_gmem: [P] float32 frequencies of the pairs.
      token: int32 scalar, index of the token.
      channels: [n] int32 in a layout of `mgpu.vectors`, index of each channel, counted from the first rotated one.
        Channels with negative indices are only rounded.

    Returns:
      A function from a [n] float32 vector to another one, both in the layout of `channels`.
    """
    frequency = vectors.take(inv_freq_gmem, channels >> 1)
    position = jnp.maximum(positions_gmem[token], 0).astype(jnp.float32)

    def rotate(values):
        values = round_bfloat16(values)
        cos, sin = cos_sin(frequency * position, product)
        partner_term = vectors.exchange(values, 1, None) * jnp.where(channels & 1 == 0, sin, -sin)
        return jnp.where(channels >= 0, values * cos + partner_term, values)

    return rotate
