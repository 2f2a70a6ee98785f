"""What the launches have in common: the arithmetic of streams, in jax.numpy for the interpreter and for one thread."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32, fma


STREAMS = 4
SUMS = 32  # of a token and slice: of products with each row of the weight first,
SQUARES = 31  # and here of squares


def mixed_streams(streams: jax.Array, y: jax.Array, mixing: jax.Array) -> jax.Array:
    """New streams [T, 4, n], rounded to bfloat16 but float32, of old ones, y [T, n] and mixing weights [T, 24]."""
    post = lax.slice_in_dim(mixing, STREAMS, 2 * STREAMS, axis=1)
    comb = lax.slice_in_dim(mixing, 2 * STREAMS, (2 + STREAMS) * STREAMS, axis=1).reshape(-1, STREAMS, STREAMS)
    old, y = streams.astype(jnp.float32), y.astype(jnp.float32)
    mixed = jnp.einsum("tjk,tjd->tkd", comb, old, precision="highest")
    return round_bfloat16(post[:, :, None] * y[:, None, :] + mixed)


def add_channels(columns: Any, first: jax.Array, streams, fn, new, partials, y=None, mixing=None) -> None:
    """New streams of all tokens in some columns, and their sums from column `first` of `partials` on."""
    rows, width = fn.shape[0], streams.shape[2]
    values = streams[:, :, columns].astype(jnp.float32)
    if y is not None and mixing is not None:
        values = mixed_streams(values, y[:, columns], mixing[...])
        new[:, :, columns] = values.astype(jnp.bfloat16)
    weights = [fn[:, pl.ds(j * width + columns.start, columns.size)] for j in range(STREAMS)]
    products = jnp.einsum("tjd,rjd->tr", values, jnp.stack(weights, 1), precision="highest")
    partials[:, pl.ds(first, rows)] = products
    partials[:, pl.ds(first + SQUARES, 1)] = jnp.sum(values * values, axis=(1, 2))[:, None]


def load_factors(pointer: Any) -> list[list[Any]]:
    """A token's weights from its mixing weights in global memory: post [4], and comb [4][4], as MLIR float32."""
    fours = [words.load_four(mlir.at(pointer, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]
    return [[thread_ops.as_float(x) for x in four] for four in fours]


def mixed_words(streams_and_y: Sequence[U32], factors: Sequence[Sequence[Any]]) -> Iterator[U32]:
    """Words of the new streams, from words of the old ones and of what is added."""
    *streams, y = [words.unpack(word) for word in streams_and_y]
    for k in range(STREAMS):
        both = []
        for half in range(2):
            value = arith.mulf(y[half], factors[0][k])
            for j, stream in enumerate(streams):
                value = fma(stream[half], factors[1 + j][k], value)
            both.append(value)
        yield words.pack(*both)
