"""Random weights in the release's storage, made where they lie: a model of any size without a checkpoint."""

import dataclasses
import functools
import logging
import math
import statistics
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track

from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.save import stored_kind
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory, selection_shares
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.projections import ModuleFiller
from dsv4_jax.nn.shardings import parameter_sharding
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


_log = logging.getLogger(__name__)
SELECTS = "tid2eid", "e_score_correction_bias"  # the parameters of a router that decide which experts it selects
STD = 0.02  # of weights, as in the released models' initialization


def random_model(
    config: DSV4Config, mesh: Mesh | None = None, *, dtype: DTypeLike = jnp.bfloat16, **options: Any
) -> DeepseekV4ForCausalLM:
    """Returns a model with random weights in the release's storage, without ever making unquantized ones.

    `dtype` is that of the activations, bfloat16 or float32; the other options are those of `random_weights`.
    """
    model = DeepseekV4ForCausalLM(config, dtype=dtype, param_dtype=jnp.bfloat16, rngs=ABSTRACT)
    return random_weights(model, config, mesh, **options)


def as_released[Module: nnx.Module](
    module: Module, config: DSV4Config, mesh: Mesh | None = None, *, expert_parallel: bool = False
) -> Module:
    """Returns a model or its layers with the shapes of the release's storage, sharded over a mesh.

    The module, a model or one with the attributes of `DeepseekV4Model`, has shapes in place of arrays. The other
    arguments are those of `random_weights`.
    """
    kinds = {
        weight.path.removeprefix("model."): stored_kind(weight.sources[0], weight.source_shape)
        for weight in weights(config, "release")
    }
    graph, state = nnx.split(module)

    def stored(path, variable):
        name = ".".join(map(str, path)).removeprefix("model.")
        return variable.replace(_struct(kinds[name], variable.get_value()))

    module = nnx.merge(graph, nnx.map_state(stored, state))
    if mesh is None:
        return module
    return jax.tree.map(
        lambda x, where: x.update(sharding=where), module, shardings(module, mesh, expert_parallel=expert_parallel)
    )


def random_weights[Module: nnx.Module](
    module: Module,
    config: DSV4Config,
    mesh: Mesh | None = None,
    *,
    expert_parallel: bool = False,
    expert_memory: ExpertMemory | None = None,
    skew: float = 0.0,
) -> Module:
    """Gives the module of `as_released` random weights, which each device makes for itself, and fuses linear maps.

    The names of layers in `expert_memory` are their paths in the module.

    Args:
      module: as in `as_released`.
      config: configuration of the model.
      mesh: devices to shard the model over; None for the default one.
      expert_parallel: whether each device gets whole experts instead of a shard of each expert.
      expert_memory: where the routed experts lie, the most frequent ones on the GPU; None for the devices. The
        embedding, if there is one, lies in host memory then.
      skew: how unequally tokens select experts: that of rank r with weight r ** -skew, ranks in random order in each
        layer. The routers' biases and tables are chosen so.
    """
    module = as_released(module, config, mesh, expert_parallel=expert_parallel)
    filler, frequencies = ModuleFiller(module, fused=True), {}

    def drawn(path, parameter, seed):
        value, (*_, kind, name) = parameter.get_value(), path.split(".")
        where = None if mesh is None else parameter_sharding(parameter, mesh, expert_parallel)

        def made(make, *args):
            return _made(seed, make=make, args=args, where=where)

        def shape(struct):
            return struct.shape if where is None else where.shard_shape(struct.shape)

        if isinstance(value, QuantizedWeight):
            codes, scale = made(_codes, shape(value.codes), shape(value.scale), value.kind)
            return dataclasses.replace(value, codes=codes, scale=scale)
        if name in SELECTS:
            selects, frequencies[f"{path.rpartition('.gate.')[0]}.experts"] = _selects(path, value, config, skew, where)
            return selects
        weight = made(_normal, shape(value), value.dtype, float(kind.endswith("norm") or name in ("scale", "hc_scale")))
        is_embedding = expert_memory is not None and kind == "embed_tokens"
        return expert_memory.place_on_host(weight) if is_embedding else weight

    for number, path in enumerate(list(filler.parameters)):
        # Experts in pages are made at last, in the memory that the others leave.
        if expert_memory is None or ".mlp.experts." not in path:
            filler.set(path, drawn(path, filler.parameters[path], np.uint32(number)))
    if expert_memory is not None:
        expert_memory.frequencies |= frequencies
        _place_experts(module, expert_memory)
    return module


def select_experts(module: nnx.Module, config: DSV4Config, skew: float) -> None:
    """Replaces the biases and tables of a module's routers by those of another skew, see `random_weights`."""
    for path, parameter in nnx.to_flat_state(nnx.state(module)):
        if path[-1] in SELECTS:
            old = parameter.get_value()
            parameter.set_value(_selects(".".join(map(str, path)), old, config, skew, old.sharding)[0])


def _selects(path, value, config, skew, where):
    """Returns a router's new bias or table in place of `value`, and the share of tokens that select each expert."""
    experts, chosen, shape = config.n_routed_experts, config.num_experts_per_tok, value.shape
    shares = selection_shares(experts, chosen, skew)
    seed = zlib.crc32(path.encode())
    ranks = np.random.default_rng(seed).permutation(experts)
    if shape == (experts,):
        # The routers' logits are sums of normed activations times weights.
        selects = selection_bias(shares, STD * math.sqrt(config.hidden_size))[ranks]
    else:
        selects = _routes(np.uint32(seed), -skew * np.log1p(ranks).astype(np.float32), shape=shape)
    return jax.device_put(selects, where), shares[ranks]


def selection_bias(shares: Float[np.ndarray, "E"], logit_std: float) -> Float[np.ndarray, "E"]:
    """Returns the biases [E] float32 with which these shares of tokens, between 0 and 1, select each expert.

    With many experts, a token selects those whose score plus bias exceeds a threshold that hardly varies. So an
    expert's bias is minus the score, `sqrt(softplus(logit))`, that is exceeded as often as it should be selected.
    Logits are Gaussian with the standard deviation `logit_std`.
    """
    quantiles = np.array([statistics.NormalDist().inv_cdf(1 - share) for share in np.clip(shares, 1e-9, 1 - 1e-9)])
    return -np.sqrt(np.logaddexp(0.0, logit_std * quantiles)).astype(np.float32)


def _place_experts(module, expert_memory):
    """Makes random codes of all experts, where they lie."""
    is_model = isinstance(module, DeepseekV4ForCausalLM)
    layers = module.model.layers if is_model else module.layers
    names = [f"{'model.' * is_model}layers.{i}" for i in range(len(layers))]
    draft_layers = [] if module.drafts is None else module.drafts.layers
    names += [f"drafts.layers.{i}" for i in range(len(draft_layers))]
    experts = [layer.mlp.experts for layer in (*layers, *draft_layers)]
    matrices = [(layer.gate_up_proj, layer.down_proj) for layer in experts]
    shapes = [matrix.get_value().codes.shape for matrix in matrices[0]]
    _log.info("%s", expert_memory.plan(len(names), [(shape[0], math.prod(shape[1:])) for shape in shapes]))
    each = max(math.prod(shape[1:]) for shape in shapes)
    # Experts begin at different bytes of the same random ones.
    random = jax.block_until_ready(_made(np.uint32(0), make=jax.random.bits, args=((2 * each,), jnp.uint8), where=None))
    first = random.unsafe_buffer_pointer()
    bar = track(zip(names, matrices, strict=True), "Making experts", len(names), console=Console(stderr=True))
    for number, (name, pair) in enumerate(bar):
        for matrix, shape in zip(pair, shapes, strict=True):
            starts = [first + 4096 * ((7 * number + 31 * expert) % (each // 4096)) for expert in range(shape[0])]
            codes, value = expert_memory.place(f"{name}.mlp.experts", starts, shape), matrix.get_value()
            scale = _made(np.uint32(number), make=_scales, args=(value.scale.shape,), where=None)
            matrix.set_value(dataclasses.replace(value, codes=codes, scale=scale))


@functools.partial(jax.jit, static_argnames=("make", "args", "where"))
def _made(seed, *, make, args, where):
    """Returns `make(key, *args)` with the key of a seed; with a sharding, each device's shard has a key of its own."""
    key = jax.random.key(seed, impl="threefry2x32")  # takes no memory but the result's, which "rbg" does
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
    return mean + STD * jax.random.normal(key, shape, dtype)


def _scales(key, shape):
    return 119 + jax.random.bits(key, shape, jnp.uint8) % 2


def _codes(key, shape, scales, kind):
    """Returns codes and scales of values about as large as those of `_normal`, without NaN."""
    codes = jax.random.bits(key, shape, jnp.uint8)
    scale = jax.random.bits(jax.random.fold_in(key, 0), scales, jnp.uint8)
    if kind == "FP8":
        return jnp.where(codes & 0x7F == 0x7F, 0, codes).astype(jnp.uint8), 114 + scale % 2
    return codes, 119 + scale % 2


@functools.partial(jax.jit, static_argnames="shape")
def _routes(seed, log_weights, *, shape) -> Int[Array, "V k"]:
    """Returns [tokens, k] distinct experts of each token, drawn with the weights."""
    # The largest of logarithms plus Gumbel noise are draws without replacement.
    noise = jax.random.gumbel(jax.random.key(seed, impl="threefry2x32"), (shape[0], len(log_weights)))
    return jax.lax.top_k(log_weights[None, :] + noise, shape[1])[1].astype(jnp.int32)
