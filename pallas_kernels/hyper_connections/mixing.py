"""The arithmetic of residual streams that the kernels of the first launch of `hyper_connections` share.

Functions of arrays are written in jax.numpy, for the interpreter. The others emit code for one thread.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.mgpu.thread_ops import fma


STREAMS = 4
MIXING = STREAMS * (2 + STREAMS)  # number of mixing weights of a token: 4 of `pre`, 4 of `post`, 16 of `comb`
# Number of partial sums of a token over a slice of channels. Sum r is the product of row r of fn with the new streams,
# and sum SQUARES is the sum of the new streams' squares.
SUMS = 32
SQUARES = 31


class StreamRefs(NamedTuple):
    """References to global memory in the kernels of the first launch."""

    streams: Any  # [T, 4, D] bfloat16 old streams
    fn: Any  # [R, 4 * D] float32 weights of the logits
    partials: Any  # float32 partial sums: [T, slices * 32] of all slices, or with `wgmma` [T, 32] of one slice
    new: Any = None  # [T, 4, D] bfloat16 new streams; None if y is None
    y: Any = None  # [T, D] bfloat16 output of the block; None: the streams stay as they are
    mixing: Any = None  # [T, 24] float32 mixing weights that the previous call returned
    table: Any = None  # table of mailboxes if y is to be summed over GPUs, see `mailbox.check_table`; otherwise None


def sinkhorn(comb: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Makes positive matrices nearly doubly stochastic by Sinkhorn's iterations.

    The first iteration normalizes columns. Each further iteration normalizes rows, then columns. So columns sum to 1 up
    to eps and rounding; rows sum to 1 as far as the iterations have converged.

    Args:
      comb: [.., h, h] float32, positive.
      iterations: number of iterations, at least 1.
      eps: constant added to each sum before the division.
    """

    def normalized(comb, axis):
        return comb / (jnp.sum(comb, axis=axis, keepdims=True) + eps)

    comb = normalized(comb, -2)
    return lax.fori_loop(0, iterations - 1, lambda _, comb: normalized(normalized(comb, -1), -2), comb)


def mixed_streams(streams: jax.Array, y: jax.Array, mixing: jax.Array) -> jax.Array:
    """Returns the new streams [T, 4, n], rounded to bfloat16 but stored as float32.

    Args:
      streams: [T, 4, n] old streams.
      y: [T, n] output of the block.
      mixing: [T, 24] float32 mixing weights.
    """
    post = lax.slice_in_dim(mixing, STREAMS, 2 * STREAMS, axis=1)
    comb = lax.slice_in_dim(mixing, 2 * STREAMS, MIXING, axis=1).reshape(-1, STREAMS, STREAMS)
    old = streams.astype(jnp.float32)
    y = y.astype(jnp.float32)
    mixed = jnp.einsum("tjk,tjd->tkd", comb, old, precision="highest")
    return round_bfloat16(post[:, :, None] * y[:, None, :] + mixed)


def add_channels(refs: StreamRefs, index: jax.Array, channels: int) -> None:
    """Writes slice `index` of the new streams of all tokens, and the slice's partial sums; for interpreted kernels.

    A slice is `channels` consecutive channels of each stream.
    """
    columns = pl.ds(index * channels, channels)
    sums_start = index * SUMS
    rows, width = refs.fn.shape
    values = refs.streams[:, :, columns].astype(jnp.float32)
    if refs.y is not None:
        values = mixed_streams(values, refs.y[:, columns], refs.mixing[...])
        refs.new[:, :, columns] = values.astype(jnp.bfloat16)
    weights = [refs.fn[:, pl.ds(j * (width // STREAMS) + columns.start, channels)] for j in range(STREAMS)]
    products = jnp.einsum("tjd,rjd->tr", values, jnp.stack(weights, 1), precision="highest")
    refs.partials[:, pl.ds(sums_start, rows)] = products
    refs.partials[:, pl.ds(sums_start + SQUARES, 1)] = jnp.sum(values * values, axis=(1, 2))[:, None]


def load_streams(streams, y, token: Scalar, channel: Scalar) -> list[list[Scalar]]:
    """Loads channels `channel` .. `channel + 7` of each stream of a token, and of y unless y is None.

    Returns four words of two bfloat16 for each stream, then for y.
    """
    width = streams.type.shape[2]
    pointer = mlir.element(streams, token * (STREAMS * width) + channel, 2)
    fours = [words.load_four(mlir.at(pointer, 2 * width * j)) for j in range(STREAMS)]
    return fours if y is None else [*fours, words.load_four(mlir.element(y, token * width + channel, 2))]


def store_streams(new, token: Scalar, channel: Scalar, fours: Sequence[Sequence[Scalar]]) -> None:
    """Stores channels `channel` .. `channel + 7` of a token's new streams; `fours` has four words for each stream."""
    width = new.type.shape[2]
    pointer = mlir.element(new, token * (STREAMS * width) + channel, 2)
    for k in range(STREAMS):
        words.store_four(mlir.at(pointer, 2 * width * k), fours[k])


def load_factors(pointer) -> list[list[Any]]:
    """Loads `post` and `comb` from a token's 24 mixing weights at a pointer to global memory.

    Returns five lists of four MLIR float32: post[k], comb[0, k], .. comb[3, k].
    """
    fours = [words.load_four(mlir.at(pointer, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]
    return [[x.as_float() for x in four] for four in fours]


def mix(streams_and_y: Sequence[Sequence[Scalar]], factors: Sequence[Sequence[Any]]) -> list[Sequence[Scalar]]:
    """Computes the new streams from the old streams and y. Returns the words of each new stream.

    `streams_and_y` lists words of two bfloat16 of each old stream, then of y. `factors` comes from `load_factors`.
    """
    new_words = [_mix_word(old_words, factors) for old_words in zip(*streams_and_y, strict=True)]
    return list(zip(*new_words, strict=True))


def _mix_word(streams_and_y, factors):
    """Yields a word of each new stream. `streams_and_y` lists a word of each old stream, then a word of y."""
    *streams, y = [words.unpack(word) for word in streams_and_y]
    for k in range(STREAMS):
        both = []
        for half in range(2):
            value = y[half] * factors[0][k]
            for j, stream in enumerate(streams):
                value = fma(stream[half], factors[1 + j][k], value)
            both.append(value)
        yield words.pack(*both)


def store_and_square(fours: Sequence[Sequence[Scalar]], addresses: Iterable[Scalar]):
    """Stores four words of each stream at the stream's address in shared memory.

    Returns the sum of the squares of all these bfloat16 values, an MLIR float32.
    """
    sums = [Scalar(0.0), Scalar(0.0)]
    for four, address in zip(fours, addresses, strict=True):
        thread_ops.store_vector(address, four)
        for word in four:
            sums = [fma(x, x, total) for x, total in zip(words.unpack(word), sums, strict=True)]
    return sums[0] + sums[1]
