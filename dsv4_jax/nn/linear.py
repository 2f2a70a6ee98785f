"""The small parametrised pieces: linear maps, RMS norm, embedding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.ops import linear
from dsv4_jax.ops.linear import Part
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.quant import round_to


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32, *, mean: float = 0.0, std: float = 0.02
) -> nnx.Param:
    """A parameter of the given shape and dtype, drawn from a normal distribution."""
    return nnx.Param(mean + std * jax.random.normal(rngs.params(), shape, dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedWeight:
    """A weight whose matrix also holds those of other linear maps with the same input: some of its rows.

    A parameter may hold it in place of an array. `matmul` multiplies with the whole matrix and takes its part: the
    product is written once for every map, since XLA computes equal products once.

    Attributes:
      matrix: [all, n].
      parts: (rows, whether the product is rounded to the input's dtype) of every map (static).
      index: which part (static).
    """

    matrix: Any
    parts: tuple[Part, ...] = dataclasses.field(metadata=dict(static=True))
    index: int = dataclasses.field(metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "JoinedWeight":
        """Itself: parameters are read as `parameter[...]`."""
        if index is not ...:
            raise TypeError(f"joined rows are read as parameter[...], not parameter[{index}]")
        return self


def matmul(
    x: Float[Array, "... n"], weight: Float[Array, "m n"] | JoinedWeight, *, rounded: bool = False
) -> Float[Array, "... m"]:
    """`x @ weight.T` with exact products and float32 sums.

    Args:
      x: [..., n].
      weight: [m, n], [out, in] as in the checkpoint, or rows of such a matrix, which know whether they are rounded.
      rounded: to x's dtype.

    Returns:
      [..., m] float32, or rounded once to x's dtype.
    """
    if isinstance(weight, JoinedWeight):
        return linear(x, weight.matrix, parts=weight.parts)[weight.index]
    return linear(x, weight, parts=((weight.shape[0], rounded),))[0]


class Linear(nnx.Module):
    """A linear map without bias.

    Attributes:
      weight: [out_features, in_features] in `dtype`.
      rounded: whether the product is rounded, once, to its input's dtype, or stays float32.
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: DTypeLike, rounded: bool = True, rngs: nnx.Rngs):
        self.rounded = rounded
        self.weight = normal(rngs, (out_features, in_features), dtype)

    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... m"]:
        """[..., in_features] to [..., out_features] in the same dtype, or float32."""
        return matmul(x, self.weight[...], rounded=self.rounded)


class GroupedLinear(nnx.Module):
    """One linear map per group of channels: the low-rank output projection (dsv4.md 2).

    Attributes:
      weight: [groups * out_features, in_features] in `dtype`, the groups' matrices one below the other.
    """

    def __init__(self, groups: int, in_features: int, out_features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (groups * out_features, in_features), dtype)

    def __call__(self, x: Float[Array, "T groups n"]) -> Float[Array, "T m"]:
        """[T, groups, in_features] to [T, groups * out_features] in the same dtype."""
        tokens, groups, _ = x.shape
        weight = self.weight[...]
        return linear(x.reshape(tokens, -1), weight, groups=groups, parts=((weight.shape[0], True),))[0]


class RMSNorm(nnx.Module):
    """RMS norm in float32, rounded once to the input's dtype (dsv4.md 2).

    Attributes:
      weight: [features] float32.
    """

    def __init__(self, features: int, *, eps: float, rngs: nnx.Rngs):
        self.weight = normal(rngs, (features,), mean=1.0)
        self.eps = eps

    def __call__(self, x: Float[Array, "T n"]) -> Float[Array, "T n"]:
        """[T, features], any floating dtype, to the same."""
        return round_to(self.weight[...][None, :] * rms_normalize(x.astype(jnp.float32), self.eps), x.dtype)


class Embedding(nnx.Module):
    """A row of the table for each token.

    Attributes:
      weight: [vocab, features] in `dtype`.
    """

    def __init__(self, vocab: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.weight = normal(rngs, (vocab, features), dtype)

    def __call__(self, token_ids: Int[Array, "T"]) -> Float[Array, "T n"]:
        """[T] int32 to [T, features]; padding ids (-1) get some row of the table, never NaN."""
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
