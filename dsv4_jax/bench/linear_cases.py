"""The cases of `dsv4-jax bench ops linear`."""

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
from flax import nnx

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, close, normal
from dsv4_jax.cache import CacheSchema
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.nn.attention import Attention
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight, encode_e4m3


_TOKENS = (8, 32)
# Float32 sums are in another order. Where they are rounded, they may go the other way, by 2**-7 of a value.
_AGREE = close(relative=2**-7, absolute=1e-3)


def linear_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """The matrix products of an attention layer of each group, those with the same input fused; two of them in FP8."""
    if small:  # the packaged model's shapes
        schema = dataclasses.replace(schema, config=read_config(packaged_checkpoint()))
    config = schema.config
    maps: dict[str, tuple[LinearSpec, tuple[int, ...]]] = {}
    attentions = {
        group.name.upper(): nnx.eval_shape(functools.partial(_attention, config, group.layers[0]))
        for group in schema.groups.values()
    }
    for group, attention in attentions.items():
        for source, fused in dict(hidden=attention.input_projections, latent=attention.latent_projections).items():
            dtypes = tuple(dtype or jnp.bfloat16 for dtype in fused.out_dtypes)
            shape = sum(fused.output_sizes), fused.weights[fused.names[0]].shape[1]
            maps[f"{group}, of {source}"] = LinearSpec(fused.output_sizes, dtypes), shape
    _, attention = attentions.popitem()  # all groups have the same projections of queries and outputs
    queries = attention.latent_projections.weights["q_b_proj"]
    shapes = dict(q_b=queries.shape, o_a=attention.o_a_proj.weight.shape, o_b=attention.o_b_proj.weight.shape)
    for name, groups in (("o_a", config.o_groups), ("o_b", 1)):
        spec = LinearSpec(output_dtype=jnp.bfloat16, num_groups=groups)
        maps[name] = spec, shapes[name]
    for name, (spec, shape) in maps.items():
        for tokens in (2,) if small else _TOKENS:
            yield _linear_case(name, spec, shape, tokens)
    for name in ("q_b", "o_b"):
        spec, shape = LinearSpec(output_dtype=jnp.bfloat16), shapes[name]
        for tokens in (2,) if small else (1, *_TOKENS, 2048):
            yield _linear_case(f"{name} in FP8", spec, shape, tokens, quantized=True)


def _linear_case(name, spec, shape, tokens, *, quantized=False):
    rows, depth = shape
    channels = spec.num_groups * depth
    size = (1 if quantized else 2) * rows * depth

    def weight(rng):
        if not quantized:
            return normal(rng, shape, jnp.bfloat16)
        codes = encode_e4m3(normal(rng, shape, jnp.float32))
        scale = jnp.asarray(rng.integers(118, 123, (-(-rows // WEIGHT_BLOCK), -(-depth // WEIGHT_BLOCK))), jnp.uint8)
        return QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16))

    def make(rng, calls):
        count = min(calls, max(2, (1 << 30) // size))
        weights = [weight(rng) for _ in range(count)]
        xs = [normal(rng, (tokens, channels), jnp.bfloat16) for _ in range(calls)]
        return None, [(x, weights[i % count]) for i, x in enumerate(xs)]

    def call(_, x, weight, *, implementation):
        return ops.linear(x, weight, spec, implementation=implementation)

    nbytes = size + tokens * (2 * channels + sum(dtype.itemsize * size for size, dtype in spec.outputs(rows)))
    flops = 2 * tokens * rows * depth
    return Case("linear", f"{name}, T={tokens}", nbytes, make, call, flops=flops, reads=True, agree=_AGREE)


def _attention(config, layer):
    return Attention(config, layer, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
