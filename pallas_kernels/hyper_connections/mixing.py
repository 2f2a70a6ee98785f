"""What the launches have in common, and their arithmetic in jax.numpy, for the interpreter."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.deterministic_math import round_bfloat16


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
