"""The cases of `dsv4-jax bench ops experts`."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, close, int32, normal, tree_bytes
from dsv4_jax.cache import CacheSchema
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.quant import QuantizedWeight


_DISJOINT = 8  # up to so many tokens have no expert in common
_MAX_XLA = 2048  # tokens at a time: 8,192 would take 96 GiB
# Both products and the values between them are rounded to bfloat16. Sums in another order round a few values in a
# thousand the other way, by up to 2**-8 of values up to about 2**7. Then six are added up.
_AGREE = close(relative=2**-6, absolute=0.5)


def experts_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields the routed experts of a layer, in FP4 and bfloat16, for one to many tokens."""
    if small:  # the packaged model's shapes
        schema = dataclasses.replace(schema, config=read_config(packaged_checkpoint()))
    for kind in "FP4", "bfloat16":
        for tokens in (1,) if small else (1, 8, 32, 128, 2048, 8192):
            yield _experts_case(schema.config, kind, tokens)


def _experts_case(config, kind, tokens):
    number, top_k = config.n_routed_experts, config.num_experts_per_tok
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    shapes = (number, 2 * inner, hidden), (number, hidden, inner)

    def weight(key, rows, columns):
        if kind == "bfloat16":
            return jax.random.normal(key, (number, rows, columns), jnp.bfloat16) * jnp.bfloat16(2.0**-5)
        codes = jax.random.bits(key, (number, rows, columns // 2), jnp.uint8)
        scale = jax.random.randint(jax.random.fold_in(key, 1), (number, rows, columns // 32), 118, 123)
        return QuantizedWeight(codes, scale.astype(jnp.uint8), "FP4", jnp.dtype(jnp.bfloat16))

    def make(rng, calls):
        key = jax.random.key(int(rng.integers(1 << 30)))
        weights = [jax.jit(weight, static_argnums=(1, 2))(jax.random.fold_in(key, i), *shapes[i][1:]) for i in (0, 1)]
        inputs = []
        for _ in range(calls):
            selected = rng.permutation(number)[: tokens * top_k]
            if tokens > _DISJOINT:
                selected = np.argsort(rng.random((tokens, number)), axis=1)[:, :top_k]
            selected = int32(selected.reshape(tokens, top_k))
            inputs.append(
                (normal(rng, (tokens, hidden), jnp.bfloat16), selected, normal(rng, selected.shape, jnp.float32))
            )
        return weights, inputs

    def call(weights, x, selected, routing, *, implementation):
        def run(tokens):
            x, selected, routing = tokens
            options = dict(limit=config.swiglu_limit, implementation=implementation)
            return ops.experts(x, selected, routing, *weights, **options)

        if implementation != "xla" or tokens <= _MAX_XLA:
            return run((x, selected, routing))
        chunks = [array.reshape(-1, _MAX_XLA, array.shape[1]) for array in (x, selected, routing)]
        return jax.lax.map(run, chunks).reshape(x.shape)

    pairs = tokens * top_k
    weights = jax.eval_shape(lambda key: [weight(key, *shape[1:]) for shape in shapes], jax.random.key(0))
    # The expected number of experts that many tokens select at random, each of which is read once.
    hit = pairs if tokens <= _DISJOINT else number * (1 - (1 - top_k / number) ** tokens)
    nbytes = int(hit * tree_bytes(weights) / number) + tokens * hidden * 6
    flops = 6 * pairs * hidden * inner
    return Case(
        "experts", f"{kind}, T={tokens}", nbytes, make, call, flops=flops, reads=True, agree=_AGREE, xla_calls=4
    )
