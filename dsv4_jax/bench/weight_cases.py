"""The cases of `dsv4-jax bench ops linear`, `experts`, `hyper_connections` and `router`: the ops that read weights."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, close, int32, normal, tree_bytes
from dsv4_jax.cache import CacheSchema
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.nn.attention import Attention
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight, encode_e4m3


# Float32 sums are in another order. Where they are rounded, they may go the other way, by 2**-7 of a value.
_LINEAR_AGREES = close(relative=2**-7, absolute=1e-3)
_DISJOINT = 8  # up to so many tokens have no expert in common
_MAX_XLA = 2048  # tokens at a time: 8,192 would take 96 GiB
# Both products and the values between them are rounded to bfloat16. Sums in another order round a few values in a
# thousand the other way, by up to 2**-8 of values up to about 2**7. Then six are added up.
_EXPERTS_AGREE = close(relative=2**-6, absolute=0.5)


def _config(schema, small):
    """Returns the packaged model's configuration for small cases, on a CPU."""
    return read_config(packaged_checkpoint()) if small else schema.config


def linear_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """The matrix products of an attention layer of each group, those with the same input fused; two of them in FP8."""
    config = _config(schema, small)
    maps = {}
    shapes = {}
    for name, group in schema.groups.items():
        attention = Attention(config, group.layers[0], param_dtype=jnp.bfloat16, rngs=ABSTRACT)
        for source, fused in dict(hidden=attention.input_projections, latent=attention.latent_projections).items():
            dtypes = tuple(projection.out_dtype or jnp.bfloat16 for projection in fused.projections.values())
            sizes = tuple(projection.size for projection in fused.projections.values())
            columns = config.hidden_size if source == "hidden" else config.q_lora_rank
            maps[f"{name.upper()}, of {source}"] = LinearSpec(sizes, dtypes), (sum(sizes), columns)
        # The maps of queries and outputs have the same shapes in all groups.
        queries = attention.latent_projections.weights["q_b_proj"]
        shapes = dict(q_b=queries.shape, o_a=attention.o_a_proj.weight.shape, o_b=attention.o_b_proj.weight.shape)
    for name, groups in (("o_a", config.o_groups), ("o_b", 1)):
        maps[name] = LinearSpec(output_dtype=jnp.bfloat16, num_groups=groups), shapes[name]
    for name, (spec, weight_shape) in maps.items():
        for tokens in (2,) if small else (8, 32):
            yield _linear_case(name, spec, weight_shape, tokens)
    for name in ("q_b", "o_b"):
        for tokens in (2,) if small else (1, 8, 32, 2048):
            spec = LinearSpec(output_dtype=jnp.bfloat16)
            yield _linear_case(f"{name} in FP8", spec, shapes[name], tokens, quantized=True)


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

    def inputs(rng):
        return (normal(rng, (tokens, channels), jnp.bfloat16),)

    def call(_, weight, x, *, implementation):
        return ops.linear(x, weight, spec, implementation=implementation)

    nbytes = size + tokens * (2 * channels + sum(dtype.itemsize * size for size, dtype in spec.outputs(rows)))
    limits: dict[str, Any] = dict(flops=2 * tokens * rows * depth, reads=True, agree=_LINEAR_AGREES)
    weights = dict(weights=lambda rng: (weight(rng),), layer_bytes=size)
    return Case("linear", f"{name}, T={tokens}", nbytes, inputs, call, **weights, **limits)


def experts_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields the routed experts of a layer, in FP4 and bfloat16, for one to many tokens."""
    for kind in "FP4", "bfloat16":
        for tokens in (1,) if small else (1, 8, 32, 128, 2048, 8192):
            yield _experts_case(_config(schema, small), kind, tokens)


def _experts_case(config, kind, tokens):
    number = config.n_routed_experts
    top_k = config.num_experts_per_tok
    hidden = config.hidden_size
    inner = config.moe_intermediate_size

    def weight(key, rows, columns):
        if kind == "bfloat16":
            return jax.random.normal(key, (number, rows, columns), jnp.bfloat16) * jnp.bfloat16(2.0**-5)
        codes = jax.random.bits(key, (number, rows, columns // 2), jnp.uint8)
        scale = jax.random.randint(jax.random.fold_in(key, 1), (number, rows, columns // 32), 118, 123)
        return QuantizedWeight(codes, scale.astype(jnp.uint8), "FP4", jnp.dtype(jnp.bfloat16))

    @jax.jit
    def make_weights(key):
        shapes = (2 * inner, hidden), (hidden, inner)
        return [weight(jax.random.fold_in(key, i), *shape) for i, shape in enumerate(shapes)]

    def state(rng, layers):
        return make_weights(jax.random.key(int(rng.integers(1 << 30))))

    def inputs(rng):
        selected = rng.permutation(number)[: tokens * top_k]
        if tokens > _DISJOINT:
            selected = np.argsort(rng.random((tokens, number)), axis=1)[:, :top_k]
        routing = normal(rng, (tokens, top_k), jnp.float32)
        return normal(rng, (tokens, hidden), jnp.bfloat16), int32(selected).reshape(tokens, -1), routing

    def call(weights, *tokens, implementation):
        def run(tokens):
            x, selected, routing = tokens
            options = dict(limit=config.swiglu_limit, implementation=implementation)
            return ops.experts(x, selected, routing, *weights, **options)

        x = tokens[0]
        if implementation != "xla" or len(x) <= _MAX_XLA:
            return run(tokens)
        return jax.lax.map(run, [array.reshape(-1, _MAX_XLA, array.shape[1]) for array in tokens]).reshape(x.shape)

    pairs = tokens * top_k
    # The expected number of experts that many tokens select at random, each of which is read once.
    hit = pairs if tokens <= _DISJOINT else number * (1 - (1 - top_k / number) ** tokens)
    weight_bytes = tree_bytes(jax.eval_shape(make_weights, jax.random.key(0)))
    nbytes = int(hit * weight_bytes / number) + tokens * hidden * 6
    limits: dict[str, Any] = dict(flops=6 * pairs * hidden * inner, reads=True, agree=_EXPERTS_AGREE, xla_calls=4)
    return Case("experts", f"{kind}, T={tokens}", nbytes, inputs, call, state, **limits)


def hyper_connections_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields the post-mapping of one block with the pre-mapping and the norm of the next."""
    for tokens in (1,) if small else (1, 8, 32, 128, 2048, 8192):
        yield _hyper_connections_case(_config(schema, small), tokens)


def _hyper_connections_case(config, tokens):
    h = config.hc_mult
    width = config.hidden_size
    rows = (2 + h) * h

    def weights(rng):
        fn = normal(rng, (rows, h * width), jnp.float32) * width**-0.5 / h
        base = normal(rng, (rows,), jnp.float32)
        return fn, base, jnp.ones((3,), jnp.float32), 1 + 0.1 * normal(rng, (width,), jnp.float32)

    def inputs(rng):
        streams, y = (normal(rng, shape, jnp.bfloat16) for shape in ((tokens, h, width), (tokens, width)))
        return streams, y, jnp.abs(normal(rng, (tokens, rows), jnp.float32))

    options = dict(norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps, iterations=config.hc_sinkhorn_iters)

    def call(_, fn, base, scale, norm, streams, *others, implementation):
        weights = ops.HyperConnectionWeights(fn, base, scale, **options)
        return ops.hyper_connections(streams, weights, norm, *others, implementation=implementation)

    def agree(got, expected):
        """Allows values up to 8 that bfloat16 rounds the other way, and their effect on the logits."""
        return close(*(1e-3, 1e-4) if got.dtype == jnp.float32 else (2**-7, 2**-4))(got, expected)

    # The second launch reads the new streams again, from the L2 cache if they fit.
    passes = 3 if 2 * tokens * h * width > 50 << 20 else 2
    nbytes = 4 * rows * (h * width + 2 * tokens) + 2 * tokens * width * (passes * h + 2)
    limits: dict[str, Any] = dict(weights=weights, layer_bytes=4 * rows * h * width, agree=agree, xla_calls=4)
    return Case("hyper_connections", f"T={tokens}", nbytes, inputs, call, **limits)


def router_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields selection by score, and by the token table of the first layers."""
    for tokens in (1,) if small else (1, 8, 32):
        yield _router_case(_config(schema, small), tokens, hashed=False)
    yield _router_case(_config(schema, small), 1, hashed=True)


def _router_case(config, tokens, *, hashed):
    experts = config.n_routed_experts
    width = config.hidden_size
    top_k = config.num_experts_per_tok

    def weights(rng):
        bias = normal(rng, (experts,), jnp.float32) * 0.1
        table = None
        if hashed:
            bias = None
            table = int32(rng.integers(0, experts, (config.vocab_size, top_k)))
        return normal(rng, (experts, width), jnp.float32) * width**-0.5, bias, table

    def inputs(rng):
        ids = int32(rng.integers(0, config.vocab_size, tokens)) if hashed else None
        return normal(rng, (tokens, width), jnp.bfloat16), ids

    options = dict(top_k=top_k, scaling_factor=config.routed_scaling_factor)

    def call(_, weight, bias, table, x, ids, *, implementation):
        return ops.router(x, weight, bias, table, ids, **options, implementation=implementation)[:2]

    def agree(got, expected):
        """Allows either of two experts whose scores differ by rounding."""
        if got.dtype == jnp.int32:
            return jnp.mean((got == expected).astype(jnp.float32)) >= 0.99
        return close(1e-4, 0.0)(got, expected)

    nbytes = 4 * experts * width + tokens * (2 * width + 8 * top_k)
    label = f"{'table' if hashed else 'top'}, T={tokens}"
    limits: dict[str, Any] = dict(weights=weights, layer_bytes=4 * experts * width, reads=True, agree=agree)
    return Case("router", label, nbytes, inputs, call, **limits)
