"""A stack of a model's whole layers, weights stored as in the release, for `dsv4-jax bench model` and `layer`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dsv4_jax.bench.attention_stack import DraftingStack
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.checkpoint.random_weights import as_released, random_weights
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory
from dsv4_jax.nn import DecoderLayer, HyperHead, MTPBlock, ResidualStreams, RMSNorm, StepCarry
from dsv4_jax.nn.layers import ABSTRACT


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
    return as_released(ModelStack(config, ABSTRACT), config, mesh, expert_parallel=expert_parallel)


def random_stack(
    config: DSV4Config,
    mesh: Mesh | None = None,
    *,
    expert_parallel: bool = False,
    expert_memory: ExpertMemory | None = None,
    skew: float = 0.0,
) -> ModelStack:
    """Returns the stack with random weights, see `checkpoint.random_weights`."""
    options: dict[str, Any] = dict(expert_parallel=expert_parallel, expert_memory=expert_memory, skew=skew)
    stack = abstract_stack(config, mesh, expert_parallel=expert_parallel)
    return random_weights(stack, config, mesh, **options)
