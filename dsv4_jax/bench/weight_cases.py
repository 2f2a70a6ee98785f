"""The cases of `dsv4-jax bench ops linear`, `experts`, `hyper_connections` and `router`: the ops that read weights."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, close, group_label, normal, normal_float32, random_key
from dsv4_jax.cache import CacheSchema
from dsv4_jax.nn.attention import Attention
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight, encode_e4m3, fp8_kind, quantized_shapes


# The kernel and XLA add float32 products in different orders, so a sum may be rounded to the next bfloat16. The two
# results then differ by up to 2**-7 of the value.
_LINEAR_AGREES = close(relative=2**-7, absolute=1e-3)
_DISJOINT = 8  # in cases of up to this many tokens, no two tokens select the same expert
_MAX_XLA = 2048  # maximum number of tokens that XLA's version computes at a time; 8,192 would take 96 GiB
# An expert's intermediate values and outputs are rounded to bfloat16. The kernel and XLA add in different orders, so a
# few values in a thousand are rounded to another bfloat16. Each error is at most 2**-8 of a value, and values reach
# about 2**7. The result of a token adds up the errors of its experts.
_EXPERTS_AGREE = close(relative=2**-6, absolute=0.5)


def linear_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of linear maps of a layer.

    For V4, the maps in bfloat16 are `o_a`, `o_b`, and each layer group's fused maps of the hidden states and of the
    latents. The maps in FP8 are `q_b` and `o_b`. For V4.1, the maps are those that the release stores in FP8, whole and
    as shards on one of 4 devices.
    """
    config = schema.config
    if config.weight_block != WEIGHT_BLOCK:
        for devices in (1, 4):
            yield from _small_block_cases(config, devices)
        return
    for group in schema.groups.values():
        attention = Attention(config, group.layers[0], param_dtype=jnp.bfloat16, rngs=ABSTRACT)
        sources = (
            ("hidden", attention.input_projections, config.hidden_size),
            ("latent", attention.latent_projections, config.q_lora_rank),
        )
        for source, fused, columns in sources:
            outputs = fused.projections.values()
            sizes = tuple(output.size for output in outputs)
            spec = LinearSpec(sizes, tuple(output.out_dtype or jnp.bfloat16 for output in outputs))
            label = f"{group_label(schema, group)}, of {source}"
            yield from _linear_cases(label, (sum(sizes), columns), (8, 32), spec)
    shapes = _attention_shapes(config)
    for name, groups in (("o_a", config.o_groups), ("o_b", 1)):
        yield from _linear_cases(name, shapes[name], (8, 32), _bfloat16_spec(groups))
    for name in ("q_b", "o_b"):
        yield from _linear_cases(f"{name} in FP8", shapes[name], (1, 8, 32, 2048), _bfloat16_spec(), "FP8")


def _attention_shapes(config, devices=1):
    """Returns {name of a sharded linear map of attention: shape of its shard on one of `devices` devices}."""
    groups = config.o_groups // devices
    group_width = config.num_attention_heads * config.head_dim // config.o_groups
    return {
        "q_b": (groups * group_width, config.q_lora_rank),
        "o_a": (groups * config.o_lora_rank, group_width),
        "o_b": (config.hidden_size, groups * config.o_lora_rank),
    }


def _small_block_cases(config, devices):
    """Yields cases of linear maps in FP8 with small blocks. A map has the shape of a shard on one of `devices`."""
    hidden = config.hidden_size
    inner = config.n_shared_experts * config.moe_intermediate_size // devices
    shapes = _attention_shapes(config, devices)
    shapes |= {"shared gate_up": (2 * inner, hidden), "shared down": (hidden, inner)}
    if devices == 1:
        shapes["q_a and kv"] = config.q_lora_rank + config.head_dim, hidden
        shapes["index queries"] = config.index_n_heads * config.index_head_dim, config.q_lora_rank
        if config.engram is not None:
            shapes["Engram"] = (config.hc_mult + 1) * hidden, config.engram.rows * config.engram.head_dim
    for name, shape in shapes.items():
        spec = _bfloat16_spec(config.o_groups // devices if name == "o_a" else 1)
        kind = fp8_kind(config.weight_block)
        yield from _linear_cases(f"{name} / {devices} in FP8", shape, (1, 32, 128, 8192), spec, kind)


def _bfloat16_spec(groups=1):
    return LinearSpec(output_dtype=jnp.bfloat16, num_groups=groups)


def _quantized_weight(kind, *shape):
    """Returns a `QuantizedWeight` whose codes and scales are draws, see `cases.Draw`."""
    codes_shape, scale_shape = quantized_shapes(kind, shape)

    def codes(rng):
        if kind == "FP4":
            return jax.random.bits(random_key(rng), codes_shape, jnp.uint8)
        return encode_e4m3(normal_float32(*codes_shape)(rng))

    def scale(rng):
        return jax.random.randint(random_key(rng), scale_shape, 118, 123, jnp.uint8)

    return QuantizedWeight(codes, scale, kind, jnp.dtype(jnp.bfloat16))


def _linear_cases(name, shape, sizes, spec, kind=None):
    """Yields a case of a linear map for each number of tokens in `sizes`."""
    rows, depth = shape
    channels = spec.num_groups * depth

    def call(weight, x, *, implementation):
        return ops.linear(x, weight, spec, implementation=implementation)

    output_bytes = sum(dtype.itemsize * size for size, dtype in spec.outputs(rows))
    for tokens in sizes:
        yield Case(
            op="linear",
            shape=f"{name}, T={tokens}",
            nbytes=(1 if kind else 2) * rows * depth + tokens * (2 * channels + output_bytes),
            call=call,
            layer=(_quantized_weight(kind, *shape) if kind else normal(*shape),),
            inputs=(normal(tokens, channels),),
            flops=2 * tokens * rows * depth,
            reads=True,
            agree=_LINEAR_AGREES,
        )


def experts_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of a layer's routed experts, for 1 to 8,192 tokens.

    V4 has cases in FP4 and in bfloat16. V4.1 is too large in bfloat16. It has cases in FP4, of whole experts and of a
    quarter of each expert. For 1 and 8 tokens, it also has cases that include the shared expert.
    """
    config = schema.config
    inner = config.moe_intermediate_size
    is_v41 = config.weight_block != WEIGHT_BLOCK
    widths = {"FP4": inner}
    if not is_v41:
        widths["bfloat16"] = inner
    elif inner // 4 % 32 == 0:  # a quarter consists of whole blocks of values with one scale
        widths["FP4 / 4"] = inner // 4
    for kind, width in widths.items():
        for tokens in (1, 8, 32, 128, 2048, 8192):
            yield _experts_case(config, kind, tokens, width)
    for tokens in (1, 8) if is_v41 else ():
        for kind, width in widths.items():
            yield _experts_case(config, kind, tokens, width, has_shared=True)


def _experts_case(config, kind, tokens, inner, *, has_shared=False):
    """Returns a case of `ops.experts`.

    Args:
      config: configuration of the model.
      kind: key of `widths` in `experts_cases`: the storage, and whether the experts are shards.
      tokens: number of tokens.
      inner: number of inner channels of an expert, or of its shard.
      has_shared: whether the op also computes the shared expert.
    """
    num_experts = config.n_routed_experts
    top_k = config.num_experts_per_tok
    hidden = config.hidden_size
    pairs = tokens * top_k
    is_disjoint = tokens <= _DISJOINT and pairs <= num_experts
    shapes = (2 * inner, hidden), (hidden, inner)
    if kind == "bfloat16":
        weights = [normal(num_experts, *shape, scale=2.0**-5) for shape in shapes]
    else:
        weights = [_quantized_weight("FP4", num_experts, *shape) for shape in shapes]
    shared = None
    if has_shared:
        shared = tuple(_quantized_weight(fp8_kind(config.weight_block), *shape) for shape in shapes)

    def selected(rng):
        """Returns the experts of each token, all different if `is_disjoint` is True."""
        if is_disjoint:
            return rng.permutation(num_experts)[:pairs].reshape(tokens, top_k)
        return np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k]

    def call(weights, shared, *arrays, implementation):
        def run(arrays):
            """Computes the experts of the given tokens: at most `_MAX_XLA` tokens with XLA, all tokens otherwise."""
            options = {"limit": config.swiglu_limit, "implementation": implementation}
            return ops.experts(*arrays, *weights, shared=shared, **options)

        if implementation != "xla" or tokens <= _MAX_XLA:
            return run(arrays)
        tiles = [array.reshape(-1, _MAX_XLA, array.shape[1]) for array in arrays]
        return jax.lax.map(run, tiles).reshape(tokens, hidden)

    # `num_read` experts are read, each once. If tokens select at random, this is the expected number.
    num_read = pairs if is_disjoint else num_experts * (1 - (1 - top_k / num_experts) ** tokens)
    expert_bytes = 3 * hidden * inner * (2 if kind == "bfloat16" else 17 / 32)
    return Case(
        op="experts",
        shape=f"{kind.replace('FP4', 'FP4 and shared') if has_shared else kind}, T={tokens}",
        nbytes=int(num_read * expert_bytes) + tokens * hidden * 6 + 3 * hidden * inner * has_shared,
        call=call,
        layer=(weights, shared),
        inputs=(normal(tokens, hidden), selected, normal_float32(tokens, top_k)),
        flops=6 * (pairs + tokens * has_shared) * hidden * inner,
        reads=True,
        agree=_EXPERTS_AGREE,
        xla_calls=4,
    )


def hyper_connections_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of `hyper_connections`: a block's post-mapping with the pre-mapping and norm of the next block."""
    for tokens in (1, 8, 32, 128, 2048, 8192):
        yield _hyper_connections_case(schema.config, tokens)


def _hyper_connections_case(config, tokens):
    """Returns a case of `ops.hyper_connections` for `tokens` tokens."""
    h = config.hc_mult
    width = config.hidden_size
    rows = (2 + h) * h
    mixing = ops.HyperConnectionWeights(
        fn=normal_float32(rows, h * width, scale=width**-0.5 / h),
        base=normal_float32(rows),
        scale=jnp.ones((3,), jnp.float32),
        norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
        iterations=config.hc_sinkhorn_iters,
        delays_pre=config.delays_pre,
    )

    def norm(rng):
        return 1 + normal_float32(width, scale=0.1)(rng)

    def coefficients(rng):
        return jnp.abs(normal_float32(tokens, rows)(rng))

    def call(mixing, norm, streams, *others, implementation):
        return ops.hyper_connections(streams, mixing, norm, *others, implementation=implementation)

    def agree(result, expected):
        """Allows rounding errors of bfloat16 values up to 8, and their effect on float32 coefficients."""
        if result.dtype == jnp.float32:
            return close(1e-3, 1e-4)(result, expected)
        return close(2**-7, 2**-4)(result, expected)

    # The first launch reads the streams and writes new streams: two passes. The second launch reads the new streams,
    # which counts as a third pass if they do not fit the L2 cache.
    passes = 3 if 2 * tokens * h * width > 50 << 20 else 2
    return Case(
        op="hyper_connections",
        shape=f"T={tokens}",
        nbytes=4 * rows * (h * width + 2 * tokens) + 2 * tokens * width * (passes * h + 2),
        call=call,
        layer=(mixing, norm),
        inputs=(normal(tokens, h, width), normal(tokens, width), coefficients),
        agree=agree,
        xla_calls=4,
    )


def router_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of a router that selects by scores, and of one that selects by token id if the model has one."""
    config = schema.config
    for tokens in (1, 8, 32):
        yield _router_case(config, tokens, hashed=False)
    if any(map(config.is_hashed, range(config.num_hidden_layers))):
        yield _router_case(config, 1, hashed=True)


def _router_case(config, tokens, *, hashed):
    """Returns a case of `ops.router`. If `hashed` is True, a table selects the experts by token id."""
    experts = config.n_routed_experts
    width = config.hidden_size
    top_k = config.num_experts_per_tok

    def table(rng):
        return rng.integers(0, experts, (config.vocab_size, top_k))

    def token_ids(rng):
        return rng.integers(0, config.vocab_size, tokens)

    def call(weight, bias, table, x, token_ids, *, implementation):
        options = {"scaling_factor": config.routed_scaling_factor, "implementation": implementation}
        return ops.router(x, weight, bias, table, token_ids, top_k=top_k, **options)[:2]

    def agree(result, expected):
        """Allows rounding errors: 1% of the selections may differ, and weights by a relative error of 1e-4."""
        if result.dtype == jnp.int32:
            return jnp.mean(result == expected) >= 0.99
        return close(1e-4, 0.0)(result, expected)

    return Case(
        op="router",
        shape=f"{'table' if hashed else 'top'}, T={tokens}",
        nbytes=4 * experts * width + tokens * (2 * width + 8 * top_k),
        call=call,
        layer=(
            normal_float32(experts, width, scale=width**-0.5),
            None if hashed else normal_float32(experts, scale=0.1),
            table if hashed else None,
        ),
        inputs=(normal(tokens, width), token_ids if hashed else None),
        reads=True,
        agree=agree,
    )
