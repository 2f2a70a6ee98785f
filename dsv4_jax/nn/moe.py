"""Mixture of experts: routers, routed experts and the shared expert."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import ABSTRACT, Linear, normal
from dsv4_jax.nn.projections import FusedLinear
from dsv4_jax.ops.linear import Matrix
from dsv4_jax.quant import round_to


class HashTable(nnx.Variable):
    """The fixed token-to-expert table: loaded from the checkpoint, not trained."""


class Router(nnx.Module):
    """Scores the experts and selects some for each token; the scores of these, normalized, are their weights.

    Attributes:
      weight: [E, hidden] float32.
      e_score_correction_bias: [E] float32; the k best of `score + bias` are selected. It changes no weight.
      tid2eid: [vocab, k] int32, in hash layers instead of the bias: the experts of each token id.
    """

    def __init__(self, config: DSV4Config, *, hashed: bool, rngs: nnx.Rngs):
        self.config, self.hashed = config, hashed
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        self.weight = normal(rngs, (experts, config.hidden_size))
        if hashed and rngs is ABSTRACT:
            self.tid2eid = HashTable(jax.ShapeDtypeStruct((config.vocab_size, chosen), jnp.int32))
        elif hashed:
            first = jax.random.randint(rngs.params(), (config.vocab_size, 1), 0, experts, jnp.int32)
            self.tid2eid = HashTable((first + jnp.arange(chosen, dtype=jnp.int32)[None, :]) % experts)
        else:
            self.e_score_correction_bias = normal(rngs, (experts,), std=0.1)

    @jax.named_scope("router")
    def __call__(
        self, x: Float[Array, "T D"], token_ids: Int[Array, "T"], slots: Int[Array, "T"] | None = None
    ) -> ops.Routing:
        """Routes each token.

        Args:
          x: [T, hidden].
          token_ids: [T] int32.
          slots: [T] int32; -1 = a padding token, which gets no experts. None = there are none.

        Returns:
          Its weights are the scores `sqrt(softplus(logit))` of the selected experts, normalized to sum to
          routed_scaling_factor.
        """
        config = self.config
        options = dict(top_k=config.num_experts_per_tok, scaling_factor=config.routed_scaling_factor)
        if self.hashed:
            return ops.router(x, self.weight[...], None, self.tid2eid[...], token_ids, slots, **options)
        return ops.router(x, self.weight[...], self.e_score_correction_bias[...], slots=slots, **options)


class MLP(nnx.Module):
    """The shared expert, a gated MLP that every token passes.

    Attributes:
      gate_up_proj: FusedLinear "gate_proj" and "up_proj", hidden to n_shared_experts * moe_intermediate_size.
      down_proj: Linear, back.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.limit = config.swiglu_limit
        hidden, inner = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
        options: Any = dict(param_dtype=param_dtype, rngs=rngs)
        names = "gate_proj", "up_proj"
        axes = dict.fromkeys(names, ("inner",))
        self.gate_up_proj = FusedLinear(hidden, dict.fromkeys(names, inner), axes=axes, **options)
        self.down_proj = Linear(inner, hidden, axes=(None, "inner"), **options)

    @jax.named_scope("shared_expert")
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """[T, hidden] to [T, hidden]."""
        gate_up = self.gate_up_proj.fused_matrix
        if gate_up is not None:
            return self.down_proj(ops.linear_swiglu(x, gate_up, self.limit))
        products = self.gate_up_proj(x)
        inner = ops.swiglu(products["gate_proj"], products["up_proj"], self.limit)
        return self.down_proj(round_to(inner, x.dtype))

    def fused_matrices(self) -> tuple[Matrix, Matrix] | None:
        """Returns the matrices (gate and up, down) for `ops.experts`; None if gate and up are not fused."""
        gate_up = self.gate_up_proj.fused_matrix
        return None if gate_up is None else (gate_up, self.down_proj.weight.get_value())


class Experts(nnx.Module):
    """The routed experts.

    Attributes:
      gate_up_proj: [E, 2, I, hidden] in `param_dtype`, the gate first.
      down_proj: [E, hidden, I] in `param_dtype`.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.limit, self.number = config.swiglu_limit, config.n_routed_experts
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        axes = "experts", None, "inner"
        self.gate_up_proj = normal(rngs, (experts, 2, inner, hidden), param_dtype, axes=axes)
        self.down_proj = normal(rngs, (experts, hidden, inner), param_dtype, axes=axes)

    @jax.named_scope("experts")
    def __call__(
        self, x: Float[Array, "T D"], routing: ops.Routing, shared: tuple[Matrix, Matrix] | None = None
    ) -> Float[Array, "T D"]:
        """Computes the sum of each token's experts, see `ops.experts`.

        Args:
          x: [T, hidden].
          routing: expert ids in [0, E) and their weights.
          shared: matrices of an expert that all tokens pass, or None.

        Returns:
          [T, hidden] float32; each linear is rounded to x's dtype, the sum is not, but with a shared expert.
        """
        gate_up, down = self.gate_up_proj.get_value(), self.down_proj.get_value()
        gate_up = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, x.shape[-1]), gate_up)
        experts, weights, permutation = routing
        if gate_up.shape[0] < self.number:  # this device has some of the experts; ids of others add nothing
            experts, permutation = experts - ops.model_index() * gate_up.shape[0], None
        return ops.experts(x, experts, weights, gate_up, down, permutation, shared, limit=self.limit)


class MoE(nnx.Module):
    """Router, routed experts and shared expert of one layer.

    Attributes:
      gate: Router.
      experts: Experts.
      shared_experts: MLP.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate = Router(config, hashed=config.is_hashed(layer), rngs=rngs)
        self.experts = Experts(config, param_dtype=param_dtype, rngs=rngs)
        self.shared_experts = MLP(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"], routing: ops.Routing) -> Float[Array, "T D"]:
        """Maps the normed input and its routing by `gate` to [T, hidden] in x's dtype, or this device's part of it."""
        shared = self.shared_experts.fused_matrices()
        y = self.experts(x, routing, shared)
        if shared is None:
            y = round_to(y + self.shared_experts(x).astype(jnp.float32), x.dtype)
        return y
