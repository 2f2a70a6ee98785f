"""The cases of `dsv4-jax bench ops hyper_connections` and `router`."""

from collections.abc import Iterator

import jax.numpy as jnp

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, int32, layer_count, normal
from dsv4_jax.cache import CacheSchema
from dsv4_jax.data import packaged_checkpoint, read_config


def hyper_connections_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields the post-mapping of one block with the pre-mapping and the norm of the next."""
    config = _config(schema, small)
    for tokens in (1,) if small else (1, 8, 32, 128, 2048, 8192):
        yield _hyper_connections_case(config, tokens)


def router_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields selection by score, and by the token table of the first layers."""
    config = _config(schema, small)
    for tokens in (1,) if small else (1, 8, 32):
        yield _router_case(config, tokens, hashed=False)
    yield _router_case(config, 1, hashed=True)


def _config(schema, small):
    """Returns the packaged model's configuration for small cases, on a CPU."""
    return read_config(packaged_checkpoint()) if small else schema.config


def _hyper_connections_case(config, tokens):
    h, width = config.hc_mult, config.hidden_size
    rows = (2 + h) * h

    def layer(rng):
        fn, base = normal(rng, (rows, h * width), jnp.float32) * width**-0.5 / h, normal(rng, (rows,), jnp.float32)
        return fn, base, jnp.ones((3,), jnp.float32), 1 + 0.1 * normal(rng, (width,), jnp.float32)

    def make(rng, calls):
        count = layer_count(calls, 4 * rows * h * width)
        layers = [layer(rng) for _ in range(count)]
        inputs = []
        for i in range(calls):
            streams, y = (normal(rng, shape, jnp.bfloat16) for shape in ((tokens, h, width), (tokens, width)))
            inputs.append((streams, layers[i % count], y, jnp.abs(normal(rng, (tokens, rows), jnp.float32))))
        return None, inputs

    options = dict(norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps, iterations=config.hc_sinkhorn_iters)

    def call(_, streams, layer, y, mixing, *, implementation):
        arrays = streams, *layer, y, mixing
        return ops.hyper_connections(*arrays, **options, implementation=implementation)

    def agree(got, expected):
        """Allows values up to 8 that bfloat16 rounds the other way, and their effect on the logits."""
        relative, absolute = (1e-3, 1e-4) if got.dtype == jnp.float32 else (2**-7, 2**-4)
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        return jnp.all(jnp.abs(got - expected) <= relative * jnp.abs(expected) + absolute)

    # The second launch reads the new streams again, from the L2 cache if they fit.
    passes = 3 if 2 * tokens * h * width > 50 << 20 else 2
    nbytes = 4 * rows * (h * width + 2 * tokens) + 2 * tokens * width * (passes * h + 2)
    return Case("hyper_connections", f"T={tokens}", nbytes, make, call, agree=agree, xla_calls=4)


def _router_case(config, tokens, *, hashed):
    experts, width, top_k = config.n_routed_experts, config.hidden_size, config.num_experts_per_tok

    def make(rng, calls):
        count = layer_count(calls, 4 * experts * width)
        weights = [normal(rng, (experts, width), jnp.float32) * width**-0.5 for _ in range(count)]
        by = [(normal(rng, (experts,), jnp.float32) * 0.1,)] * calls
        if hashed:
            table = int32(rng.integers(0, experts, (config.vocab_size, top_k)))
            by = [(None, table, int32(rng.integers(0, config.vocab_size, tokens))) for _ in range(calls)]
        xs = [normal(rng, (tokens, width), jnp.bfloat16) for _ in range(calls)]
        return None, [(x, weights[i % count], *by[i]) for i, x in enumerate(xs)]

    options = dict(top_k=top_k, scaling_factor=config.routed_scaling_factor)

    def call(_, *arrays, implementation):
        return ops.router(*arrays, **options, implementation=implementation)[:2]

    def agree(got, expected):
        """Allows either of two experts whose scores differ by rounding."""
        if got.dtype == jnp.int32:
            return jnp.mean((got == expected).astype(jnp.float32)) >= 0.99
        return jnp.all(jnp.abs(got - expected) <= 1e-4 * expected)

    nbytes = 4 * experts * width + tokens * (2 * width + 8 * top_k)
    shape = f"{'table' if hashed else 'top'}, T={tokens}"
    return Case("router", shape, nbytes, make, call, reads=True, agree=agree)
