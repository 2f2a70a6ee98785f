"""Rounds weights in a training step to the values that `save_release` will store."""

import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import WEIGHT_BLOCK, round_to
from dsv4_jax.quant.fp4 import E2M1_MAX, MXFP4_BLOCK, decode_e2m1, encode_e2m1
from dsv4_jax.quant.fp8 import E4M3_MAX, decode_e4m3, encode_e4m3
from dsv4_jax.quant.numerics import e8m0_reciprocal, e8m0_value


def as_stored(config: DSV4Config, parameters: dict[str, Array]) -> dict[str, Array]:
    """Returns the parameters with the values that they have once saved, with straight-through gradients."""
    kinds: dict[str, list[str]] = {"FP8": [], "FP4": [], "BF16": []}
    for weight in weights(config, "release"):
        if weight.path in parameters and weight.dtype in kinds:
            kinds[weight.dtype].append(weight.path)
    still = jax.lax.stop_gradient(parameters)
    rounded = {path: round_to(still[path], jnp.bfloat16).astype(jnp.float32) for path in kinds["BF16"]}
    rounded |= _together(_fp8, _blocks, _from_blocks, {path: still[path] for path in kinds["FP8"]})
    rounded |= _together(_fp4, _groups, _from_groups, {path: still[path] for path in kinds["FP4"]})
    return parameters | {path: value + (parameters[path] - still[path]) for path, value in rounded.items()}


def _together(rounding: Callable, apart: Callable, back: Callable, tensors: dict[str, Array]) -> dict[str, Array]:
    """Rounds all tensors at once, as a matrix whose rows share a scale."""
    rows = {path: apart(value) for path, value in tensors.items()}
    if not rows:
        return {}
    bounds = list(itertools.accumulate(len(part) for part in rows.values()))
    parts = jnp.split(rounding(jnp.concatenate(list(rows.values()))), bounds[:-1])
    return {path: back(part, tensors[path].shape) for path, part in zip(rows, parts, strict=True)}


def _fp8(rows: Float[Array, "n block"]) -> Float[Array, "n block"]:
    scale = _scale(rows, E4M3_MAX)
    # Through the codes, because XLA removes a pair of casts.
    return decode_e4m3(encode_e4m3(rows * e8m0_reciprocal(scale))) * e8m0_value(scale)


def _fp4(rows: Float[Array, "n group"]) -> Float[Array, "n group"]:
    scale = _scale(rows, E2M1_MAX)
    return decode_e2m1(encode_e2m1(rows * e8m0_reciprocal(scale))) * e8m0_value(scale)


def _scale(rows, limit):
    """Returns E8M0 codes [n, 1] of the smallest 2 ** e with max |row| <= limit * 2 ** e; 1 for a row of zeros."""
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    m, e = jnp.frexp(largest)
    limit_m, limit_e = math.frexp(limit)
    exponent = jnp.clip(e - limit_e + (m > limit_m).astype(e.dtype), -126, 127)
    return (jnp.where(largest > 0, exponent, 0) + 127).astype(jnp.uint8)


def _blocks(x):
    """Reshapes [m, n] to [blocks, 128 * 128], padded with zeros."""
    x = jnp.pad(x, [(0, -size % WEIGHT_BLOCK) for size in x.shape])
    x = x.reshape(x.shape[0] // WEIGHT_BLOCK, WEIGHT_BLOCK, -1, WEIGHT_BLOCK)
    return jnp.swapaxes(x, 1, 2).reshape(-1, WEIGHT_BLOCK**2)


def _from_blocks(rows, shape):
    x = rows.reshape(-(-shape[0] // WEIGHT_BLOCK), -1, WEIGHT_BLOCK, WEIGHT_BLOCK)
    return jnp.swapaxes(x, 1, 2).reshape(x.shape[0] * WEIGHT_BLOCK, -1)[: shape[0], : shape[1]]


def _groups(x):
    return x.reshape(-1, MXFP4_BLOCK)


def _from_groups(rows, shape):
    return rows.reshape(shape)
