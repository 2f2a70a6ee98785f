"""A stack of a model's whole layers, weights stored as in the release, for `dsv4-jax bench model` and `layer`."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import track

from dsv4_jax.bench.attention_stack import DraftingStack
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.save import stored_kind
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory
from dsv4_jax.nn import DecoderLayer, HyperHead, MTPBlock, ResidualStreams, RMSNorm, StepCarry, shardings
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.projections import fuse_in_place
from dsv4_jax.nn.shardings import parameter_sharding
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


class ModelStack(DraftingStack):
    """A model without its embedding and its head."""

    def __init__(self, config: DSV4Config, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(param_dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, i, **options) for i in range(config.num_hidden_layers)])
        self.hc_head = HyperHead(config, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        drafts = range(config.num_hidden_layers, len(config.layers))
        self.mtp = nnx.List([MTPBlock(config, i, **options) for i in drafts])
        self.streams = config.hc_mult

    def unread_bytes(self, tokens: int) -> float:
        """Returns the expected bytes of the routed experts that no token hits, if tokens choose at random."""
        unread = 0.0
        for layer in self.layers:
            config = layer.mlp.gate.config
            share = (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
            unread += share * tree_bytes(nnx.state(layer.mlp.experts))
        return unread

    def __call__(self, x: Float[Array, "T D"], cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Maps embeddings [T, hidden] bfloat16 to the head's input; also returns the updated cache."""
        cache, carry = cache.begin_step(batch), StepCarry()
        residual = ResidualStreams(jnp.broadcast_to(x[:, None, :], (x.shape[0], self.streams, x.shape[1])))
        for layer in self.layers:
            # The model has the same barrier.
            layer, residual = jax.lax.optimization_barrier((layer, residual))
            residual, carry, cache = layer.fused(residual, cache, batch, carry)
        return self.hc_head.pre(residual, self.norm)[0], cache


def abstract_stack(config: DSV4Config, mesh: Mesh | None = None, *, expert_parallel: bool = False) -> ModelStack:
    """Returns the stack with shapes in place of arrays, quantized as in the release and sharded over a mesh."""
    stack = ModelStack(config, ABSTRACT)
    kinds = {
        weight.path.removeprefix("model."): stored_kind(weight.sources[0], weight.source_shape)
        for weight in weights(config, "release")
    }
    graph, state = nnx.split(stack)

    def stored(path, variable):
        return variable.replace(_struct(kinds[".".join(map(str, path))], variable.get_value()))

    stack = nnx.merge(graph, nnx.map_state(stored, state))
    if mesh is None:
        return stack
    return jax.tree.map(
        lambda x, where: x.update(sharding=where), stack, shardings(stack, mesh, expert_parallel=expert_parallel)
    )


def random_stack(
    config: DSV4Config,
    mesh: Mesh | None = None,
    *,
    expert_parallel: bool = False,
    expert_memory: ExpertMemory | None = None,
) -> ModelStack:
    """Returns the stack with random weights, made by each device for itself, and experts where they belong."""
    graph, state = nnx.split(abstract_stack(config, mesh, expert_parallel=expert_parallel))
    numbers = itertools.count()

    def drawn(path, variable):
        value = variable.get_value()
        where = None if mesh is None else parameter_sharding(variable, mesh, expert_parallel)

        def made(make, *args):
            return _made(np.uint32(next(numbers)), make=make, args=args, where=where)

        def shape(struct):
            return struct.shape if where is None else where.shard_shape(struct.shape)

        if isinstance(value, QuantizedWeight):
            if expert_memory is not None and path[-2] == "experts":
                return variable.replace(dataclasses.replace(value, scale=made(_scales, value.scale.shape)))
            codes, scale = made(_codes, shape(value.codes), shape(value.scale), value.kind)
            return variable.replace(dataclasses.replace(value, codes=codes, scale=scale))
        if path[-1] == "tid2eid":
            return variable.replace(made(_routes, shape(value), config.n_routed_experts))
        ones = str(path[-2]).endswith("norm") or path[-1] in ("scale", "hc_scale")
        return variable.replace(made(_normal, shape(value), value.dtype, float(ones)))

    stack = nnx.merge(graph, nnx.map_state(drawn, state))
    fuse_in_place(stack)
    if expert_memory is not None:
        _place_experts(stack, expert_memory)
    return stack


def _place_experts(stack, expert_memory):
    """Makes random codes of all experts, where they lie."""
    layers = [layer.mlp.experts for layer in (*stack.layers, *stack.mtp)]
    matrices = [(layer.gate_up_proj, layer.down_proj) for layer in layers]
    shapes = [matrix.get_value().codes.shape for matrix in matrices[0]]
    print(expert_memory.plan(len(layers), shapes))
    each = max(math.prod(shape[1:]) for shape in shapes)
    # Experts begin at different bytes of the same random ones.
    random = jax.block_until_ready(_made(np.uint32(0), make=jax.random.bits, args=((2 * each,), jnp.uint8), where=None))
    first = random.unsafe_buffer_pointer()
    for number, pair in enumerate(track(matrices, "Making experts", console=Console(stderr=True), transient=True)):
        for matrix, shape in zip(pair, shapes, strict=True):
            starts = [first + 4096 * ((7 * number + 31 * expert) % (each // 4096)) for expert in range(shape[0])]
            codes = expert_memory.place(str(number), starts, shape)
            matrix.set_value(dataclasses.replace(matrix.get_value(), codes=codes))


@functools.partial(jax.jit, static_argnames=("make", "args", "where"))
def _made(seed, *, make, args, where):
    """Returns `make(key, *args)` with the key of a seed; with a sharding, each device's shard has a key of its own."""
    key = jax.random.key(seed, impl="rbg")  # compiles the fastest, and dozens of shapes are drawn
    if where is None:
        return make(key, *args)

    def local(key):
        for axis in jax.tree.leaves(tuple(where.spec)):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return make(key, *args)

    return jax.shard_map(local, mesh=where.mesh, in_specs=jax.P(), out_specs=where.spec, check_vma=False)(key)


def _struct(kind, value):
    """Returns the shapes of a parameter that is stored as `kind`."""
    *leading, rows, columns = value.shape if len(value.shape) > 1 else (1, *value.shape)
    uint8 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint8)
    if kind == "F8_E4M3":
        scale = math.ceil(rows / WEIGHT_BLOCK), math.ceil(columns / WEIGHT_BLOCK)
        return QuantizedWeight(uint8(value.shape), uint8((*leading, *scale)), "FP8", value.dtype)
    if kind == "I8":
        codes, scale = (*leading, rows, columns // 2), (*leading, rows, columns // 32)
        return QuantizedWeight(uint8(codes), uint8(scale), "FP4", value.dtype)
    return value


def _normal(key, shape, dtype, mean):
    return mean + 0.02 * jax.random.normal(key, shape, dtype)


def _scales(key, shape):
    return 119 + jax.random.bits(key, shape, jnp.uint8) % 2


def _codes(key, shape, scales, kind):
    """Returns codes and scales of values about as large as those of `_normal`, without NaN."""
    # One matrix at a time, because making random bits takes 16 times their memory.
    *count, rows, columns = shape
    keys = jax.random.split(key, math.prod(count))
    codes = jax.lax.map(lambda key: jax.random.bits(key, (rows, columns), jnp.uint8), keys).reshape(shape)
    scale = jax.random.bits(jax.random.fold_in(key, 0), scales, jnp.uint8)
    if kind == "FP8":
        return jnp.where(codes & 0x7F == 0x7F, 0, codes).astype(jnp.uint8), 114 + scale % 2
    return codes, 119 + scale % 2


def _routes(key, shape, experts):
    first = jax.random.randint(key, (shape[0], 1), 0, experts, jnp.int32)
    return (first + jnp.arange(shape[1], dtype=jnp.int32)[None, :]) % experts
