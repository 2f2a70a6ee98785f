"""Small modules with parameters: linear maps, RMS norm, embedding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.ops import all_reduce, linear, model_index
from dsv4_jax.ops.linear import LinearSpec, Matrix
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.quant import round_to


Axes = tuple[str | None, ...]


class AbstractRngs(nnx.Rngs):
    """Makes parameters `jax.ShapeDtypeStruct`s, without the time that `nnx.eval_shape` takes to trace."""

    def __init__(self):
        """Makes no random streams."""


ABSTRACT = AbstractRngs()


def normal(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dtype: DTypeLike = jnp.float32,
    *,
    mean: float = 0.0,
    std: float = 0.02,
    axes: Axes = (),
) -> nnx.Param:
    """Returns a parameter of the given shape and dtype, drawn from a normal distribution.

    `axes` names its logical axes, which `parallel.axis_rules` shards over a mesh; unnamed axes are replicated.
    """
    metadata: dict[str, Any] = dict(axes=axes) if axes else {}
    if rngs is ABSTRACT:
        return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), **metadata)
    return nnx.Param(mean + std * jax.random.normal(rngs.params(), shape, dtype), **metadata)


def matmul(x: Float[Array, "... n"], weight: Float[Array, "m n"]) -> Float[Array, "... m"]:
    """Computes `x @ weight.T` in float32 with exact products; the weight is [out, in] as in the checkpoint."""
    return linear(x, weight)[0]


class RMSNorm(nnx.Module):
    """RMS norm in float32, rounded once to the input's dtype (dsv4.md 2).

    Attributes:
      weight: [features] float32.
    """

    def __init__(self, features: int, *, eps: float, rngs: nnx.Rngs):
        self.weight = normal(rngs, (features,), mean=1.0)
        self.eps = eps

    @jax.named_scope("norm")
    def __call__(self, x: Float[Array, "T n"]) -> Float[Array, "T n"]:
        """Normalizes [T, features] of any floating dtype."""
        return round_to(self.weight[...][None, :] * rms_normalize(x.astype(jnp.float32), self.eps), x.dtype)


@jax.named_scope("projections")
def multiply(
    x: Float[Array, "... n"],
    weight: Matrix | tuple[Matrix, ...],
    spec: LinearSpec,
    norm: RMSNorm | None = None,
) -> tuple[Float[Array, "... _"], ...]:
    """Computes `ops.linear`, after a norm if there is one; on a CPU, float32 outputs come from float32 copies.

    The released code multiplies in float32, and XLA's CPU comes closer to it that way. A GPU's tensor cores add
    products of bfloat16 in float32.
    """
    rows = sum(matrix.shape[0] for matrix in (weight if isinstance(weight, tuple) else (weight,)))
    dtypes = [dtype for _, dtype in spec.outputs(rows)]
    if jnp.float32 not in dtypes:
        return linear(x, weight, spec, norm=(norm.weight[...], norm.eps) if norm else None)
    x = norm(x) if norm else x

    def on_cpu(x, weight):
        exact = linear(x.astype(jnp.float32), weight, dataclasses.replace(spec, output_dtype=jnp.float32))
        if all(dtype == jnp.float32 for dtype in dtypes):
            return exact
        products = zip(dtypes, linear(x, weight, spec), exact, strict=True)
        return tuple(wide if dtype == jnp.float32 else rounded for dtype, rounded, wide in products)

    return jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=lambda x, weight: linear(x, weight, spec))


class Linear(nnx.Module):
    """A linear map without bias.

    Attributes:
      weight: [out_features, in_features] in `param_dtype`.
      out_dtype: dtype that the product is rounded to, once; None = that of the input.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        param_dtype: DTypeLike,
        out_dtype: DTypeLike | None = None,
        axes: Axes = (),
        rngs: nnx.Rngs,
    ):
        self.out_dtype = out_dtype
        self.weight = normal(rngs, (out_features, in_features), param_dtype, axes=axes)

    def __call__(self, x: Float[Array, "... n"], norm: RMSNorm | None = None) -> Float[Array, "... m"]:
        """Maps [..., in_features], normalized first if there is a norm, to [..., out_features] in `out_dtype`."""
        weight = self.weight.get_value()
        spec = LinearSpec(output_dtype=x.dtype if self.out_dtype is None else self.out_dtype)
        return multiply(x, weight, spec, norm)[0]


class GroupedLinear(nnx.Module):
    """One linear map per group of channels: the low-rank output projection (dsv4.md 2).

    Attributes:
      weight: [groups * out_features, in_features] in `param_dtype`, the groups' matrices one below the other.
    """

    def __init__(self, groups: int, in_features: int, out_features: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (groups * out_features, in_features), param_dtype, axes=("groups",))

    @jax.named_scope("projections")
    def __call__(self, x: Float[Array, "T groups n"]) -> Float[Array, "T m"]:
        """Maps [T, groups, in_features] to [T, groups * out_features] in the same dtype."""
        tokens, groups, _ = x.shape
        weight = self.weight.get_value()
        return linear(x.reshape(tokens, -1), weight, LinearSpec(output_dtype=x.dtype, num_groups=groups))[0]


class Embedding(nnx.Module):
    """Looks up a row of a table for each token.

    Attributes:
      weight: [vocab, features] in `param_dtype`.
    """

    def __init__(self, vocab: int, features: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (vocab, features), param_dtype, axes=("vocab",))

    @jax.named_scope("embedding")
    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T n"]:
        """Maps [T] int32 ids to [T, features]; zeros for padding ids (-1)."""
        rows = self.weight[...]
        local = token_ids - model_index() * rows.shape[0]
        here = (local >= 0) & (local < rows.shape[0])
        return all_reduce(jnp.where(here[:, None], jnp.take(rows, local, axis=0, mode="clip"), 0))
