"""Mixture of experts: routers, routed experts and the shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import ABSTRACT, Linear, normal
from dsv4_jax.nn.projections import Projections
from dsv4_jax.ops.linear import Matrix
from dsv4_jax.quant import round_to


class Router(nnx.Module):
    """Scores the experts; subclasses select the experts of a token.

    Attributes:
      weight: [E, hidden] float32.
    """

    def __init__(self, config: DSV4Config, *, rngs: nnx.Rngs):
        self.config = config
        self.weight = normal(rngs, (config.n_routed_experts, config.hidden_size))

    @jax.named_scope("router")
    def __call__(self, x: Float[Array, "T D"], token_ids: Int[Array, "T"]) -> ops.Routing:
        """Routes each token.

        Args:
          x: [T, hidden].
          token_ids: [T] int32.

        Returns:
          Its weights are the scores `sqrt(softplus(logit))` of the selected experts, normalized to sum to
          routed_scaling_factor.
        """
        config, weight = self.config, self.weight[...]
        options = dict(top_k=config.num_experts_per_tok, scaling_factor=config.routed_scaling_factor)
        return ops.router(x, weight, *self._selection(token_ids), **options)

    def _selection(self, token_ids: Int[Array, "T"]) -> tuple[Array | None, ...]:
        """Returns the arguments that `ops.router` selects by: (bias,), or (None, table, token ids)."""
        raise NotImplementedError


class TopKRouter(Router):
    """Selects the k best of `score + bias`; the bias decides the selection only, never a weight.

    Attributes:
      e_score_correction_bias: [E] float32.
    """

    def __init__(self, config: DSV4Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.e_score_correction_bias = normal(rngs, (config.n_routed_experts,), std=0.1)

    def _selection(self, token_ids):
        return (self.e_score_correction_bias[...],)


class HashTable(nnx.Variable):
    """The fixed token-to-expert table: loaded from the checkpoint, not trained."""


class HashRouter(Router):
    """Looks the experts up by token id; the scores only weight them.

    Attributes:
      tid2eid: [vocab, k] int32.
    """

    def __init__(self, config: DSV4Config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        shape = config.vocab_size, config.num_experts_per_tok
        if rngs is ABSTRACT:
            self.tid2eid = HashTable(jax.ShapeDtypeStruct(shape, jnp.int32))
            return
        first = jax.random.randint(rngs.params(), (config.vocab_size, 1), 0, config.n_routed_experts, jnp.int32)
        following = jnp.arange(config.num_experts_per_tok, dtype=jnp.int32)[None, :]
        self.tid2eid = HashTable((first + following) % config.n_routed_experts)

    def _selection(self, token_ids):
        return None, self.tid2eid[...], token_ids


class MLP(nnx.Module):
    """The shared expert, a gated MLP that every token passes.

    Attributes:
      gate_proj, up_proj: Linear, hidden to n_shared_experts * moe_intermediate_size; None if they are fused.
      down_proj: Linear, back.
      input_projections: Projections of the input: gate_proj and up_proj.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.limit = config.swiglu_limit
        hidden, inner = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
        self.gate_proj = Linear(hidden, inner, param_dtype=param_dtype, axes=("inner",), rngs=rngs)
        self.up_proj = Linear(hidden, inner, param_dtype=param_dtype, axes=("inner",), rngs=rngs)
        self.down_proj = Linear(inner, hidden, param_dtype=param_dtype, axes=(None, "inner"), rngs=rngs)
        self.input_projections = Projections("gate_proj", "up_proj")

    @jax.named_scope("shared_expert")
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """[T, hidden] to [T, hidden]."""
        if self.input_projections.fused:
            gate_up = self.input_projections.fused[0].weight.get_value()
            return self.down_proj(ops.linear_swiglu(x, gate_up, self.limit))
        projected = self.input_projections(self, x)
        inner = ops.swiglu(projected["gate_proj"], projected["up_proj"], self.limit)
        return self.down_proj(round_to(inner, x.dtype))

    def fused_matrices(self) -> tuple[Matrix, Matrix] | None:
        """Returns the matrices (gate and up, down) for `ops.experts`; None if gate and up are not fused."""
        if not self.input_projections.fused:
            return None
        return self.input_projections.fused[0].weight.get_value(), self.down_proj.weight.get_value()


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
      gate: TopKRouter, or HashRouter in "hash_moe" layers.
      experts: Experts.
      shared_experts: MLP.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        router = HashRouter if config.is_hashed(layer) else TopKRouter
        self.gate = router(config, rngs=rngs)
        self.experts = Experts(config, param_dtype=param_dtype, rngs=rngs)
        self.shared_experts = MLP(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"], token_ids: Int[Array, "T"]) -> Float[Array, "T D"]:
        """[T, hidden] normed input and [T] int32 token ids to [T, hidden] in x's dtype, or this device's part of it."""
        shared = self.shared_experts.fused_matrices()
        y = self.experts(x, self.gate(x, token_ids), shared)
        if shared is None:
            y = round_to(y + self.shared_experts(x).astype(jnp.float32), x.dtype)
        return y
