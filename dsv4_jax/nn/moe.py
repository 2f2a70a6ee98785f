"""Mixture of experts: routers, routed experts and the shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, Linear, normal, parameter
from dsv4_jax.nn.projections import FusedLinear, Projection, merged_rows
from dsv4_jax.ops.linear import Matrix
from dsv4_jax.quant import round_to


class HashTable(nnx.Variable):
    """The variable for a router's table of experts by token id, which is loaded from a checkpoint and not trained."""


class Router(nnx.Module):
    """Scores the E experts, and selects and weights k of them for each token. Weights are normalized scores.

    The k experts of a token are those with the largest `score + bias`, or in hash layers those that a table lists for
    the token id. For tokens that are parts of images, all layers take the largest `score + bias` with another bias.

    Attributes:
      weight: [E, hidden] float32 projection to the logits.
      e_score_correction_bias: [E] float32 bias for the selection, not in hash layers. It does not enter the weights.
      image_correction_bias: [E] float32 bias for parts of images, only in models that take images. It does not enter
        the weights either.
      tid2eid: [vocab, k] int32 experts of each token id, only in hash layers.
    """

    def __init__(self, config: DSV4Config, layer: int, *, rngs: AnyRngs):
        self.config = config
        self.hashed = config.is_hashed(layer)
        experts, chosen = config.layer_experts(layer)
        self.top_k = chosen
        self.weight = normal(rngs, (experts, config.hidden_size))

        def draw(key, shape):
            """Draws k different experts for each token id: consecutive ids from a random one on."""
            first_expert = jax.random.randint(key, (*shape[:-1], 1), 0, experts, jnp.int32)
            return (first_expert + jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)) % experts

        if self.hashed:
            self.tid2eid = parameter(HashTable, rngs, (config.vocab_size, chosen), jnp.int32, draw)
        else:
            self.e_score_correction_bias = normal(rngs, (experts,), std=0.1)
        if config.image_token_id is not None:
            self.image_correction_bias = normal(rngs, (experts,), std=0.1)

    @jax.named_scope("router")
    def __call__(
        self,
        x: Float[Array, "T D"],
        token_ids: Int[Array, "T"],
        slots: Int[Array, "T"] | None = None,
        is_image: Bool[Array, "T"] | None = None,
        forced_experts: Int[Array, "T k"] | None = None,
    ) -> ops.Routing:
        """Selects and weights the experts of each token, see `ops.router`.

        Args:
          x: [T, hidden] normed input of the MoE.
          token_ids: [T] int32 token ids, which hash layers use.
          slots: [T] int32; -1 = a padding token, which gets no experts. None = no token is padding.
          is_image: [T] bool, whether a token is a part of an image, only in models that take images. None = all tokens
            are text.
          forced_experts: [T, k] int32 experts to take instead of the router's choice, see `Batch.decisions`. A row of
            -1 keeps the router's choice. None = keep it for all tokens.

        Returns:
          Routing, in which the weights of a token's experts are their scores `sqrt(softplus(logit))`, scaled so that
          their sum is `routed_scaling_factor`.
        """
        bias = None if self.hashed else self.e_score_correction_bias.get_value()
        table = self.tid2eid.get_value() if self.hashed else None
        weight = self.weight.get_value()
        images = None
        if is_image is not None:
            if self.config.image_token_id is None:
                raise ValueError("the batch has is_image, but the model's configuration has no image_token_id")
            images = self.image_correction_bias.get_value(), is_image
        options = {"top_k": self.top_k, "scaling_factor": self.config.routed_scaling_factor}
        routing = ops.router(x, weight, bias, table, token_ids if self.hashed else None, slots, images, **options)
        if forced_experts is None:
            return routing
        # A second call computes the weights of the forced experts. Row t of its table has the experts of token t, so
        # its token ids are 0 .. T - 1. Unless a kernel computes the scores, XLA computes them once for both calls.
        table = jnp.maximum(jnp.where(forced_experts >= 0, forced_experts, routing.experts), 0)
        return ops.router(x, weight, None, table, jnp.arange(len(table), dtype=jnp.int32), slots, **options)


class MLP(nnx.Module):
    """The shared expert, a gated MLP that every token passes.

    Attributes:
      gate_up_proj: FusedLinear of "gate_proj" and "up_proj", from hidden to n_shared_experts * moe_intermediate_size.
      down_proj: Linear from n_shared_experts * moe_intermediate_size to hidden.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.limit = config.swiglu_limit
        hidden = config.hidden_size
        inner = config.n_shared_experts * config.moe_intermediate_size
        projection = Projection(inner, axes=("inner",))
        maps = {"gate_proj": projection, "up_proj": projection}
        self.gate_up_proj = FusedLinear(hidden, maps, param_dtype=param_dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, axes=(None, "inner"), param_dtype=param_dtype, rngs=rngs)

    @jax.named_scope("shared_expert")
    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Maps x [T, hidden] to [T, hidden] in the dtype of x. On a mesh, the result is this device's term of a sum."""
        products = self.gate_up_proj(x)
        return self.down_proj(round_to(ops.swiglu(products["gate_proj"], products["up_proj"], self.limit), x.dtype))

    def matrices(self) -> tuple[Matrix, Matrix] | None:
        """Returns the matrices (gate and up, down) for the argument `shared` of `ops.experts`.

        Returns None if this module has to be called: a user replaced it or one of its maps by another class, or a map
        has adapters.
        """
        if type(self) is MLP and _is_plain(self.gate_up_proj, FusedLinear) and _is_plain(self.down_proj, Linear):
            return self.gate_up_proj.fused_matrix, self.down_proj.weight.get_value()
        return None


def _is_plain(module, kind):
    """Returns whether a module is of the class `kind`, not of a subclass, and has no adapters."""
    return type(module) is kind and module.adapters is None


class Experts(nnx.Module):
    """The E routed experts, each a SwiGLU MLP with I = moe_intermediate_size inner channels.

    Attributes:
      gate_up_proj: [E, 2, I, hidden] in `param_dtype`, matrices of the gate and of the up projection.
      down_proj: [E, hidden, I] in `param_dtype`.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.limit = config.swiglu_limit
        experts, _ = config.layer_experts(layer)
        self.number = experts
        hidden = config.hidden_size
        inner = config.moe_intermediate_size
        axes = "experts", None, "inner"
        self.gate_up_proj = normal(rngs, (experts, 2, inner, hidden), param_dtype, axes=axes)
        self.down_proj = normal(rngs, (experts, hidden, inner), param_dtype, axes=axes)

    @jax.named_scope("experts")
    def __call__(
        self, x: Float[Array, "T D"], routing: ops.Routing, shared: tuple[Matrix, Matrix] | None = None
    ) -> Float[Array, "T D"]:
        """Computes the weighted sum of each token's experts, see `ops.experts`.

        Args:
          x: [T, hidden] normed input of the MoE.
          routing: experts in [0, E), or -1, and their weights.
          shared: matrices of the shared expert, from `MLP.matrices`, to add its output too; None = routed experts only.

        Returns:
          [T, hidden] the sum in float32, or with `shared` in the dtype of x. On a mesh, the result is this device's
          term of a further sum, over the devices.
        """
        gate_up = merged_rows(self.gate_up_proj.get_value())
        down = self.down_proj.get_value()
        experts, weights, permutation = routing
        if gate_up.shape[0] < self.number:  # expert parallelism: experts of other devices get ids out of range
            experts = experts - ops.model_index() * gate_up.shape[0]
            permutation = None
        return ops.experts(
            x, experts, weights, gate_up, down, permutation, shared, limit=self.limit, total_experts=self.number
        )


class MoE(nnx.Module):
    """The mixture of experts of one layer.

    Attributes:
      gate: Router.
      experts: Experts, the routed experts.
      shared_experts: MLP, the shared expert.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.gate = Router(config, layer, rngs=rngs)
        self.experts = Experts(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.shared_experts = MLP(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"], routing: ops.Routing) -> Float[Array, "T D"]:
        """Computes the output of routed and shared experts.

        Args:
          x: [T, hidden] normed input.
          routing: result of `gate`.

        Returns:
          [T, hidden] in x's dtype; on a mesh, this device's term of a sum, see `ops.all_reduce`.
        """
        shared = self.shared_experts.matrices()
        y = self.experts(x, routing, shared)
        if shared is None:
            y = round_to(y + self.shared_experts(x).astype(jnp.float32), x.dtype)
        return y
