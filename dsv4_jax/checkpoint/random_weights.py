"""Models of any size without a checkpoint: random weights in the release's storage, made on the devices."""

import collections
import dataclasses
import functools
import itertools
import math
import statistics
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float
from rich.console import Console
from rich.progress import track

from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.placement import expert_shapes, tables_on_host
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory, HostTables, selection_shares
from dsv4_jax.nn import DeepseekV4ForCausalLM, TokenMap
from dsv4_jax.nn.engram import random_token_map
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.parameters import parameter_views
from dsv4_jax.nn.shardings import parameter_sharding, sharded_structs
from dsv4_jax.quant import QuantizedWeight, is_quantized_kind, quantized_struct


SELECTS = "tid2eid", "e_score_correction_bias"  # the parameters of a router that decide which experts it selects
MAX_ROWS = 1 << 18  # maximum number of rows that are drawn for a table in host memory; the table repeats these rows
MAX_SMALL = 1 << 20  # variables with fewer values than this are all made by one program
STD = 0.02  # standard deviation of weights, as in the released models' initialization


def abstract_model(
    config: DSV4Config,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    expert_parallel: bool = False,
) -> DeepseekV4ForCausalLM:
    """Returns a model as if it were loaded from a release, with `jax.ShapeDtypeStruct` in place of arrays.

    Args:
      config: configuration of the model.
      mesh: devices to shard the model over; None for the default one.
      dtype: dtype of the activations, bfloat16 or float32.
      expert_parallel: whether each device gets whole experts instead of a shard of each expert.

    Returns:
      The model, in which the weights that a release stores as FP8 or FP4 are quantized, with shardings over the mesh.
    """
    stored_dtypes = {weight.path: weight.dtype for weight in weights(config, "release")}
    model = DeepseekV4ForCausalLM(config, dtype=dtype, param_dtype=jnp.bfloat16, rngs=ABSTRACT)
    for path, view in parameter_views(model).items():
        value = view.variable.get_value()
        kind = stored_dtypes.get(path, "")  # Engram's map of token ids is in no checkpoint
        if is_quantized_kind(kind) and not isinstance(value, QuantizedWeight):
            view.variable.set_value(quantized_struct(kind, value))
    return sharded_structs(model, mesh, expert_parallel=expert_parallel)


def random_model(
    config: DSV4Config,
    mesh: Mesh | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    expert_parallel: bool = False,
    expert_memory: ExpertMemory | None = None,
    host_tables: HostTables | None = None,
    skew: float = 0.0,
    on_outline: Callable[[DeepseekV4ForCausalLM], None] | None = None,
) -> DeepseekV4ForCausalLM:
    """Returns a model with random weights in the release's storage. Each device makes its own shard.

    Weights that the release quantizes are drawn as codes and scales, so their unquantized values take no memory.

    Args:
      config: configuration of the model.
      mesh: devices to shard the model over; None for the default one.
      dtype: dtype of the activations, bfloat16 or float32.
      expert_parallel: whether each device gets whole experts instead of a shard of each expert.
      expert_memory: places the embedding, Engram's tables and the less frequent routed experts in host memory, and the
        most frequent experts on the GPU. None = all weights lie on the devices.
      host_tables: places Engram's tables in host memory, see `load_checkpoint`. A table there repeats its first rows.
      skew: how unequally tokens select experts. Each layer's experts have ranks 1 to E in random order, and tokens
        select the expert of rank r with a weight of r ** -skew. The routers' biases and tables are chosen accordingly.
      on_outline: function that is called before weights are made, see `load_checkpoint`; None = no call.
    """
    model = abstract_model(config, mesh, dtype=dtype, expert_parallel=expert_parallel)
    # `expert_shapes` raises ValueError if layers have different numbers of experts. So it runs before weights are made.
    layout = expert_shapes(weights(config, "release")) if expert_memory else ([], [])
    if on_outline is not None:
        on_outline(nnx.clone(model))
    views = parameter_views(model)
    # The variable of stacked layers has a path for each layer. Its values are drawn once, for the first of these paths.
    first_paths = {id(view.variable): path for path, view in reversed(views.items())}
    draws = []
    for path, view in views.items():
        variable = view.variable
        sharding = None if mesh is None else parameter_sharding(variable, mesh, expert_parallel)
        if isinstance(variable, TokenMap):
            variable.set_value(jax.device_put(random_token_map(config, nnx.Rngs(0)).get_value(), sharding))
        elif path == first_paths[id(variable)] and not path.endswith(SELECTS):
            if expert_memory and ".mlp.experts." in path:
                continue
            value = variable.get_value()
            tables = tables_on_host(path, expert_memory, host_tables)
            if tables is not None:
                value = jax.tree.map(_first_rows, value)
            draws.append((variable, _draw(path, value, sharding), tables))
    _make_variables(draws)
    frequencies = select_experts(model, config, skew)
    if expert_memory is not None:
        expert_memory.frequencies |= frequencies
        expert_memory.plan(*layout)
        _place_experts(views, expert_memory)
    return model


def _make_variables(draws):
    """Draws the values of variables. One program makes all small variables, and each large one has its own program.

    Equal draws share a program.

    Args:
      draws: (variable, `_Draw`, tables) of each variable. If `tables` is not None, the variable is a table in this host
        memory, and only its first rows are drawn.
    """
    sizes = [math.prod(draw.args[0]) for _, draw, _ in draws]
    small = [index for index, size in enumerate(sizes) if size < MAX_SMALL]
    large = [index for index, size in enumerate(sizes) if size >= MAX_SMALL]
    groups = [small, *([index] for index in large)]  # indices of the variables that each program makes
    draws_of_groups = [tuple(draws[index][1] for index in group) for group in groups]
    distinct = list(dict.fromkeys(draws_of_groups))

    def compile_draws(group_draws):
        return _drawn.lower([jnp.uint32(0)] * len(group_draws), group_draws).compile()

    with ThreadPoolExecutor(8, "compile-weights") as threads:
        programs = dict(zip(distinct, threads.map(compile_draws, distinct), strict=True))
    for group, group_draws in zip(groups, draws_of_groups, strict=True):
        seeds = [np.uint32(index) for index in group]
        values = programs[group_draws](seeds)
        for index, value in zip(group, values, strict=True):
            variable, _, tables = draws[index]
            if tables is not None:
                value = jax.tree.map(functools.partial(_repeat_on_host, tables), value, variable.get_value())
            variable.set_value(value)


def _first_rows(table):
    """Returns the struct of a table's first rows, up to `MAX_ROWS`, which are the rows that are drawn."""
    *layers, rows, columns = table.shape
    return table.update(shape=(*layers, min(rows, MAX_ROWS), columns))


def _repeat_on_host(host_tables, first_rows, table):
    """Returns an array in host memory with the shape and dtype of `table`, filled with copies of `first_rows`."""
    where = first_rows.sharding if isinstance(first_rows.sharding, NamedSharding) else None
    array, shards = host_tables.empty(table.shape, table.dtype, where)
    first_rows = np.asarray(first_rows)
    count = first_rows.shape[-2]

    def repeat(start, values, shard):
        """Writes `values` to the rows of a shard from `start` on. Values past the shard's end are dropped."""
        part = shard[..., start : start + count, :]
        part[...] = values[..., : part.shape[-2], :]

    with ThreadPoolExecutor() as pool:
        for index, shard in shards:
            values = first_rows[(*index[:-2], slice(None), index[-1])]
            starts = range(0, shard.shape[-2], count)
            list(pool.map(functools.partial(repeat, values=values, shard=shard), starts))
    return array


def select_experts(module: nnx.Module, config: DSV4Config, skew: float) -> dict[str, Float[np.ndarray, "E"]]:
    """Sets the biases and tables of a module's routers, which decide which experts tokens select.

    Args:
      module: a model or some of its layers, with arrays or with shapes.
      config: configuration of the model.
      skew: see `random_model`.

    Returns:
      {path of a layer's experts: [E] share of tokens that select each expert}.
    """
    shares_of_layers = {}
    for path, view in parameter_views(module).items():
        if not path.endswith(SELECTS):
            continue
        layer = config.num_hidden_layers if path.startswith("drafts.") else 0
        num_experts, num_selected = config.layer_experts(layer)
        shares = selection_shares(num_experts, num_selected, skew)
        seed = zlib.crc32(path.encode())
        ranks = np.random.default_rng(seed).permutation(num_experts)
        if view.shape == (num_experts,):
            # A logit sums `hidden_size` products of a weight and a normed activation, whose standard deviation is 1.
            # The second argument is the standard deviation of this sum.
            selects = selection_bias(shares, STD * math.sqrt(config.hidden_size))[ranks]
        else:
            selects = _routes(np.uint32(seed), -skew * np.log1p(ranks).astype(np.float32), shape=view.shape)
        where = view.variable.get_value().sharding
        sharded = isinstance(where, NamedSharding)
        where = NamedSharding(where.mesh, PartitionSpec(*where.spec[len(view.index) :])) if sharded else None
        view.set_value(jax.device_put(selects, where))
        shares_of_layers[f"{path.rpartition('.gate.')[0]}.experts"] = shares[ranks]
    return shares_of_layers


def selection_bias(shares: Float[np.ndarray, "E"], logit_std: float) -> Float[np.ndarray, "E"]:
    """Returns biases of a router with which each expert is selected by a given share of the tokens.

    With many experts, a token selects the experts whose score plus bias exceeds a threshold that hardly varies. A score
    is `sqrt(softplus(logit))`. So the bias of an expert with share p is minus the score that a fraction p of the tokens
    exceeds.

    Args:
      shares: [E] share of the tokens that select each expert, between 0 and 1.
      logit_std: standard deviation of the logits, which are Gaussian with mean 0.

    Returns:
      [E] float32 biases.
    """
    quantiles = np.array([statistics.NormalDist().inv_cdf(1 - share) for share in np.clip(shares, 1e-9, 1 - 1e-9)])
    return -np.sqrt(np.logaddexp(0.0, logit_std * quantiles)).astype(np.float32)


def _place_experts(views, expert_memory):
    """Makes the codes and scales of all experts from random bytes, where `expert_memory` has planned them."""
    stacks = collections.defaultdict(list)
    for path, view in views.items():
        module = path.rpartition(".")[0]
        if module in expert_memory.layers:
            stacks[id(view.variable)].append((module, view))
    # A matrix of an expert has half a byte for each FP4 code.
    max_bytes = max(math.prod(view.shape[1:]) // 2 for stack in stacks.values() for _, view in stack)
    # Every matrix is copied from one array of random bytes. Copies begin at different places, which are 31 * 4096 bytes
    # apart, so that neighboring experts and layers have different bytes.
    draw_bytes = _Draw(_bytes, ((2 * max_bytes,),))
    (random_bytes,) = jax.block_until_ready(_drawn([np.uint32(0)], (draw_bytes,)))
    address = random_bytes.unsafe_buffer_pointer()
    num_places = max(1, max_bytes // 4096)
    numbers = itertools.count()
    for stack in track(stacks.values(), "Making experts", len(stacks), console=Console(stderr=True)):
        variable = stack[0][1].variable
        value = variable.get_value()
        pages = expert_memory.place_stack([name for name, _ in stack], value.codes.shape)
        for layer, (_, view) in enumerate(stack):
            places = [31 * next(numbers) % num_places for _ in range(view.shape[0])]
            pages.write(layer, [address + 4096 * place for place in places])
        draw_scale = _Draw(_scales, (value.scale.shape,))
        (scale,) = _drawn([np.uint32(0)], (draw_scale,))
        variable.set_value(dataclasses.replace(value, codes=pages.array, scale=scale))


class _Draw(NamedTuple):
    """The random draw of a variable's arrays.

    Attributes:
      make: function that returns the arrays, called as `make(words, *args)`. `words(shape)` returns random uint32.
      args: the other arguments of `make`. The first one is the shape of the array, or of the codes if the variable is
        quantized. If the variable is sharded, it is the shape of one shard.
      where: sharding of the variable; None for the default device.
    """

    make: Callable[..., Any]
    args: tuple[Any, ...]
    where: NamedSharding | None = None


def _draw(path, value, where):
    """Returns the `_Draw` of a variable.

    Args:
      path: path of a parameter in the variable.
      value: a `jax.ShapeDtypeStruct` like the variable's value, or a `QuantizedWeight` of such structs.
      where: sharding of the variable; None for the default device.
    """
    *_, kind, name = path.split(".")

    def shape(struct):
        """Returns the shape that a device makes."""
        return struct.shape if where is None else where.shard_shape(struct.shape)

    if isinstance(value, QuantizedWeight):
        return _Draw(_codes, (shape(value.codes), shape(value.scale), value.kind, value.dtype), where)
    mean = float(kind.endswith("norm") or name in ("scale", "hc_scale", "q_weight", "k_weight"))
    return _Draw(_normal, (shape(value), value.dtype, mean), where)


@functools.partial(jax.jit, static_argnums=1)
def _drawn(seeds, draws):
    """Returns the arrays of each draw. Each device makes its shard. `seeds` are uint32 scalars."""
    return [_draw_one(seed, draw) for seed, draw in zip(seeds, draws, strict=True)]


def _draw_one(seed, draw):
    """Returns the arrays of one draw, which each device makes from the seed and its index on the mesh."""
    axes = [] if draw.where is None else jax.tree.leaves(tuple(draw.where.spec))

    def local(seed):
        """Returns this device's arrays."""
        for axis in axes:  # each shard has another seed
            seed = seed * jax.lax.axis_size(axis) + jax.lax.axis_index(axis).astype(jnp.uint32)
        start = seed * np.uint32(2654435761)  # consecutive seeds have starts that are far apart

        def words(shape):
            """Returns random uint32 words: hashes of their indices.

            JAX's generators would take longer to compile than to run.
            """
            word = start + jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
            # The index on axis 0 makes layers of a stack differ, although indices of large stacks repeat after
            # 2**32 words.
            word += jax.lax.broadcasted_iota(jnp.uint32, shape, 0) * np.uint32(0x9E3779B1)
            for factor in (np.uint32(0x7FEB352D), np.uint32(0x846CA68B)):
                word = (word ^ word >> 16) * factor
            return word ^ word >> 16

        return draw.make(words, *draw.args)

    if draw.where is None:
        return local(seed)
    draw_shards = jax.shard_map(
        local, mesh=draw.where.mesh, in_specs=jax.P(), out_specs=draw.where.spec, check_vma=False
    )
    return draw_shards(seed)


def _normal(words, shape, dtype, mean):
    """Returns Gaussian values with this mean and the standard deviation `STD`, from the inverse error function."""
    quantiles = (words(shape) >> 8).astype(jnp.float32) * 2.0**-23 + (2.0**-24 - 1.0)  # between -1 and 1
    return (mean + STD * math.sqrt(2) * jax.lax.erf_inv(quantiles)).astype(dtype)


def _bytes(words, shape):
    """Returns random bytes, uint8."""
    return words(shape).astype(jnp.uint8)


def _scales(words, shape):
    """Returns random E8M0 bits 119 and 120, the scales 2**-8 and 2**-7."""
    return 119 + _bytes(words, shape) % 2


def _codes(words, shape, scales, kind, dtype):
    """Returns a `QuantizedWeight` with codes of the given shape, and scales of the shape `scales`, without NaN.

    The values are about as large as the values of `_normal` with mean 0.
    """
    codes = _bytes(words, shape)
    if kind == "FP4":
        return QuantizedWeight(codes, _scales(words, scales), kind, dtype)
    finite = jnp.where(codes & 0x7F == 0x7F, 0, codes).astype(jnp.uint8)
    return QuantizedWeight(finite, 114 + _bytes(words, scales) % 2, kind, dtype)


@functools.partial(jax.jit, static_argnames="shape")
def _routes(seed, log_weights, *, shape):
    """Draws k distinct experts for each token of the vocabulary, [V, k] int32.

    Args:
      seed: uint32 scalar.
      log_weights: [E] logarithm of each expert's weight.
      shape: (V, k).
    """
    # The top k of log-weights plus Gumbel noise are k draws without replacement.
    noise = jax.random.gumbel(jax.random.key(seed, impl="threefry2x32"), (shape[0], len(log_weights)))
    return jax.lax.top_k(log_weights[None, :] + noise, shape[1])[1].astype(jnp.int32)
