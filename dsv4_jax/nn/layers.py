"""Small modules with parameters, linear maps, RMS norm and embedding, and functions that make parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.nn.token_adapters import add_products
from dsv4_jax.ops import all_reduce, linear, model_index
from dsv4_jax.ops.linear import LinearSpec, Matrix
from dsv4_jax.ops.norm_rope import rms_norm


Axes = tuple[str | None, ...]


# A value for `rngs` that makes parameters `jax.ShapeDtypeStruct` objects; faster than `nnx.eval_shape`.
ABSTRACT = nnx.Rngs()


class StackedRngs(NamedTuple):
    """A value for `rngs` that makes parameters of equal layers, stacked on an additional first axis, "layers"."""

    rngs: nnx.Rngs
    layers: int


type AnyRngs = nnx.Rngs | StackedRngs


def parameter(
    kind: type[nnx.Variable],
    rngs: AnyRngs,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    axes: Axes = (),
) -> nnx.Variable:
    """Makes a variable of the given shape, with an additional first axis if `rngs` is a StackedRngs.

    Args:
      kind: class of the variable.
      rngs: source of the random key. With `ABSTRACT`, the value is a `jax.ShapeDtypeStruct`.
      shape, dtype: shape and dtype of one layer's value.
      draw: function (random key, shape) that returns the value. This shape includes the axis of layers.
      axes: names of the logical axes of one layer's value. `parallel.axis_rules` says how they are sharded over a mesh.
        None, or an axis that is left out at the end, is replicated.
    """
    if isinstance(rngs, StackedRngs):
        shape = (rngs.layers, *shape)
        axes = ("layers", *axes)
        rngs = rngs.rngs
    value = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if rngs is ABSTRACT else draw(rngs.params(), shape)
    return kind(value, axes=axes)


def normal(
    rngs: AnyRngs,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    mean: float = 0.0,
    std: float = 0.02,
    axes: Axes = (),
) -> Any:
    """Makes an `nnx.Param` with values from a normal distribution. The arguments are as in `parameter`."""

    def draw(key, shape):
        return mean + std * jax.random.normal(key, shape, dtype)

    return parameter(nnx.Param, rngs, shape, dtype, draw, axes)


class RMSNorm(nnx.Module):
    """RMS norm in float32, rounded once to the input's dtype (docs/dsv4.md 2).

    Attributes:
      weight: [features] float32.
    """

    def __init__(self, features: int, *, eps: float, rngs: AnyRngs):
        self.weight = normal(rngs, (features,), mean=1.0)
        self.eps = eps

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "T n"]) -> Float[Array, "T n"]:
        """Normalizes x [T, features], of any floating dtype."""
        return rms_norm(x, self.weight[...], self.eps)


@jax.named_scope("projections")
def multiply(
    x: Float[Array, "... n"], weights: tuple[Matrix, ...], spec: LinearSpec, norm: RMSNorm | None = None
) -> tuple[Float[Array, "... _"], ...]:
    """Computes `ops.linear(x, weights, spec)`. If `norm` is given, it normalizes x first.

    On a CPU, x and the weights are converted to float32 for outputs whose dtype is float32. The released code also
    multiplies in float32, and XLA's products of bfloat16 on CPUs would differ more from it. A GPU does not need the
    conversion, since its tensor cores add products of bfloat16 in float32.
    """
    dtypes = [dtype for _, dtype in spec.outputs(sum(weight.shape[0] for weight in weights))]
    if jnp.float32 not in dtypes:
        return linear(x, weights, spec, norm=(norm.weight.get_value(), norm.eps) if norm else None)
    x = norm(x) if norm else x

    def on_cpu(x, weights):
        """Computes outputs of dtype float32 from x and weights converted to float32, and other outputs unconverted."""
        wide_spec = dataclasses.replace(spec, output_dtype=jnp.float32)
        wide_outputs = linear(x.astype(jnp.float32), weights, wide_spec, implementation="xla")
        if all(dtype == jnp.float32 for dtype in dtypes):
            return wide_outputs
        products = zip(dtypes, linear(x, weights, spec), wide_outputs, strict=True)
        return tuple(wide if dtype == jnp.float32 else rounded for dtype, rounded, wide in products)

    return jax.lax.platform_dependent(x, weights, cpu=on_cpu, default=lambda x, weights: linear(x, weights, spec))


class Linear(nnx.Module):
    """A linear map without bias. Channels can be divided into groups that have a matrix each.

    Groups are used in attention's low-rank output projection (docs/dsv4.md 2).

    Attributes:
      weight: [out_features, in_features / num_groups] in `param_dtype`, the matrices of the groups one below the other.
      num_groups: number of groups (static).
      out_dtype: dtype that the float32 sums are rounded to; None = the input's dtype (static).
      adapters: `lora.Adapters` of the map, or None.
    """

    adapters: Any = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_groups: int = 1,
        out_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike,
        axes: Axes = (),
        rngs: AnyRngs,
    ):
        self.num_groups = num_groups
        self.out_dtype = out_dtype
        self.weight = normal(rngs, (out_features, in_features // num_groups), param_dtype, axes=axes)

    @jax.named_scope("projections")
    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... m"]:
        """Maps [..., in_features] to [..., out_features]."""
        weight = self.weight.get_value()
        groups = 1 if self.num_groups == 1 else x.shape[-1] // weight.shape[1]  # on a mesh, the groups on this device
        outputs = linear(x, weight, LinearSpec(output_dtype=self.out_dtype or x.dtype, num_groups=groups))
        return outputs[0] if self.adapters is None else add_products(outputs, x, [self.adapters])[0]


class Embedding(nnx.Module):
    """The embedding: looks up a row of a table for each token.

    Attributes:
      weight: [vocab, features] in `param_dtype`.
    """

    def __init__(self, vocab: int, features: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.weight = normal(rngs, (vocab, features), param_dtype, axes=("vocab",))

    @jax.named_scope("embedding")
    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T n"]:
        """Maps token ids [T] int32 to [T, features]. Ids outside of the vocabulary, such as -1, give zeros."""
        rows = self.weight[...]
        local = token_ids - model_index() * rows.shape[0]
        return all_reduce(rows.at[local].get(mode="fill", fill_value=0, wrap_negative_indices=False))
