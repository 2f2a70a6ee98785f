"""Adapters of low rank (LoRA): small matrices that are trained beside frozen maps, which may be quantized.

The weight of a map with adapter i is `W + scale_i * up_i @ down_i`. All adapters of a model are stored together, so
that the tokens of one batch may use different ones. `merge_adapter` adds one adapter's product to the weights.
"""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.common.arguments import adapter_index, check, check_positive, check_whole
from dsv4_jax.nn.layers import AnyRngs, Axes, Linear, StackedRngs, parameter
from dsv4_jax.nn.projections import FusedLinear
from dsv4_jax.nn.shardings import parameter_sharding
from dsv4_jax.quant import round_to


# Submodules of a `DecoderLayer` whose linear maps can have adapters. Routed experts, routers and `Compressor.key_proj`
# cannot have adapters.
_PARENTS = ("self_attn", "shared_experts")
TARGETS = ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj", "gate_proj", "up_proj", "down_proj")


class Adapters(nnx.Module):
    """The matrices of all adapters for one map, whose weight is [outputs, inputs / groups].

    Attributes:
      down: [adapters, rank, inputs / groups], an `nnx.LoRAParam`.
      up: [outputs, adapters, rank], an `nnx.LoRAParam`; zeros at first, so that adapters have no effect.
      scales: factor of each adapter's product (static).
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        scales: Sequence[float],
        rank: int,
        *,
        axes: Axes = (),
        dtype: DTypeLike,
        rngs: AnyRngs,
    ):
        """Makes the matrices in `dtype`. `axes` are the logical axes of the map's weight, see `parallel.axis_rules`."""
        self.scales = tuple(scales)
        out_axis, in_axis = (*axes, None, None)[:2]
        num_adapters = len(scales)

        def draw(key, shape):
            return jax.random.normal(key, shape, dtype) / math.sqrt(inputs)

        def zeros(_, shape):
            return jnp.zeros(shape, dtype)

        self.down = parameter(nnx.LoRAParam, rngs, (num_adapters, rank, inputs), dtype, draw, (None, None, in_axis))
        self.up = parameter(nnx.LoRAParam, rngs, (outputs, num_adapters, rank), dtype, zeros, (out_axis, None, None))

    def product(self, number: int) -> Float[Array, "... m n"]:
        """Returns the product `scale * up @ down` of adapter `number` in float32, which merging adds to the weight."""
        up = self.up[...][..., number, :]
        down = self.down[...][..., number, :, :]
        product = jnp.matmul(up, down, precision="highest", preferred_element_type=jnp.float32)
        return self.scales[number] * product


def add_adapters(
    model: Any,
    names: Sequence[str],
    *,
    rank: int,
    scales: Sequence[float] | None = None,
    targets: Collection[str] = TARGETS,
    dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs | None = None,
    place: bool = True,
) -> None:
    """Attaches adapters to linear maps of all layers of a model.

    A batch uses adapters only on demand (`Batch.with_adapter`, or `adapter=` of a request). Train adapters with
    `nnx.Optimizer(model, .., wrt=nnx.LoRAParam)` and `nnx.grad(.., argnums=nnx.DiffState(0, nnx.LoRAParam))`: the other
    weights have no gradient and no optimizer state. Draft layers, Engram, routers and the head get no adapters.

    Args:
      model: DeepseekV4ForCausalLM, which is changed.
      names: names of the adapters, in the order of their indices.
      rank: rank of the products.
      scales: factor of each adapter's product, `lora_alpha / r` in PEFT's terms; None = 1.
      targets: names of maps in attention and in the shared expert. Maps that a layer lacks, such as `indexer_q_b_proj`
        in layers that select nothing, are left out.
      dtype: dtype of the matrices. Products round them to the dtype of activations, see `cast_adapters`.
      rngs: source of the random matrices `down`; None = seed 0.
      place: whether to call `place_adapters`; False if the caller first writes values to the adapters.

    Raises:
      TypeError: a name is not text, `targets` is text, or `rank` or a scale has a wrong type.
      ValueError: the model has adapters already, names are missing or repeated, no layer has a target, or `rank` or
        `scales` are wrong.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names) or isinstance(targets, str):
        raise TypeError(f"{names=} and {targets=} must each be a list of texts")
    check_whole("rank", rank, 1)
    scales = [1.0] * len(names) if scales is None else [check_positive("scales[..]", scale) for scale in scales]
    check(max(scales, default=0) <= float(jnp.finfo(jnp.float32).max), f"{scales=} must be finite in float32")
    if model.adapter_names:
        raise ValueError(f"the model has adapters already: {', '.join(model.adapter_names)}. Add all of them at once")
    if not names or len({*names}) < len(names) or not all(names):
        raise ValueError(f"names={list(names)} must be different, not empty, and at least one")
    check(len(scales) == len(names), f"{scales=} must have one factor for each of {list(names)}")
    modules = list(linear_modules(model))
    known = {
        name
        for _, attribute, module in modules
        for name in (module.projections if isinstance(module, FusedLinear) else [attribute])
    }
    if not targets:
        raise ValueError(f"targets is empty: name some of the linear maps {sorted(known)}")
    if unknown := {*targets} - known:
        raise ValueError(f"targets={sorted(unknown)} are none of the linear maps {sorted(known)}")
    rngs = nnx.Rngs(0) if rngs is None else rngs
    for repeats, attribute, module in modules:
        stacked = StackedRngs(rngs, repeats)
        make = functools.partial(Adapters, scales=scales, rank=rank, dtype=dtype, rngs=stacked)
        if isinstance(module, FusedLinear):
            *_, inputs = module.weights["+".join(module.groups[0])].get_value().shape
            adapters = {
                name: make(projection.size, inputs, axes=projection.axes)
                for name, projection in module.projections.items()
                if name in targets
            }
            if adapters:
                module.adapters = nnx.Dict(adapters)
        elif attribute in targets:
            *_, outputs, inputs = module.weight.get_value().shape
            axes = module.weight.get_metadata()["axes"][1:]
            module.adapters = make(outputs, inputs, axes=axes)
    model.adapter_names = tuple(names)
    if place:
        place_adapters(model)


def cast_adapters(model: Any) -> Any:
    """Returns a copy of a model whose adapters have the dtype of its activations. Other weights are not copied.

    Products round adapters to this dtype anyway. On a GPU, adapters that already have this dtype take fewer launches:
    roll out and serve with the copy, and train the original. The cast passes gradients on. For exact log-probabilities,
    give the copy to `decode.logprobs`, too.
    """
    copy = nnx.clone(model)
    for variable in adapter_variables(copy):
        variable.set_value(variable.get_value().astype(model.model.dtype))
    return copy


def adapter_variables(model: Any) -> list[nnx.Variable]:
    """Returns the variables that hold the matrices of a model's adapters."""
    return module_variables(model, nnx.LoRAParam)


def module_variables(module: nnx.Module, *filters: Any) -> list[nnx.Variable]:
    """Returns the variables of a module, or only those of the types `filters`."""
    return jax.tree.leaves(nnx.state(module, *filters), is_leaf=lambda x: isinstance(x, nnx.Variable))


def place_adapters(model: Any) -> None:
    """Shards the adapters over the mesh of the model's other weights, if there is one."""
    leaves = jax.tree.leaves(nnx.state(model))
    meshes = [leaf.sharding.mesh for leaf in leaves if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
    if meshes:
        for variable in adapter_variables(model):
            variable.set_value(jax.device_put(variable.get_value(), parameter_sharding(variable, meshes[0])))


def merge_adapter(model: Any, name: str) -> Any:
    """Returns a copy of a model without adapters, in which one adapter's products are added to the weights.

    Weights that get a product are no longer quantized: they have the dtype of unquantized weights of the model.

    Args:
      model: DeepseekV4ForCausalLM with adapters.
      name: name of the adapter.

    Raises:
      ValueError: the model has no such adapter.
    """
    index = adapter_index(name, model.adapter_names)
    merged = nnx.clone(model)
    for _, _, module in linear_modules(merged):
        if module.adapters is None:
            continue
        if isinstance(module, FusedLinear):
            for map_name, adapters in module.adapters.items():
                key, rows = module.rows_of(map_name)
                _add_to(module.weights[key], rows, adapters.product(index))
        else:
            _add_to(module.weight, (), module.adapters.product(index))
        del module.adapters
    merged.adapter_names = ()
    return merged


def _add_to(variable, rows, product):
    """Adds products [layers, ..] to a variable's matrices [layers, ..], at the index `rows` of each matrix."""
    weight = variable.get_value()[...]
    dtype = weight.dtype
    index = (slice(None), *rows)
    weight = weight.astype(jnp.float32)
    variable.set_value(round_to(weight.at[index].add(product), dtype))


def linear_modules(model: Any) -> Iterator[tuple[int, str, Any]]:
    """Yields (number of stacked layers, name of the attribute, module) for each module that can have adapters."""
    for loop in model.model.layers.loops:
        for layer in loop.layers:
            for path, module in nnx.iter_modules(layer):
                if isinstance(module, Linear | FusedLinear) and path[-2] in _PARENTS:
                    yield loop.run.repeats, str(path[-1]), module
