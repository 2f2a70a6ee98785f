"""A stack of a model's whole layers, weights stored as in the release, for `dsv4-jax bench model` and `layer`."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dsv4_jax.bench.attention_stack import DraftingStack, draft_passes
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.checkpoint.random_weights import as_released, random_weights
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn import (
    DecoderLayer,
    DeepseekV4ForCausalLM,
    HyperHead,
    LayerStack,
    Linear,
    ResidualStreams,
    RMSNorm,
    StepCarry,
    make_drafts,
)
from dsv4_jax.nn.layers import ABSTRACT


class ModelStack(DraftingStack):
    """A model without its embedding, and without its head unless drafts need it."""

    def __init__(self, config: DSV4Config, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(param_dtype=jnp.bfloat16, rngs=rngs)
        self.config = config
        self.layers = LayerStack(config, range(config.num_hidden_layers), DecoderLayer, **options)
        self.hc_head = HyperHead(config, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.drafts = make_drafts(config, **options)
        if self.drafts is not None:
            self.lm_head = Linear(
                config.hidden_size, config.vocab_size, out_dtype=jnp.float32, axes=("vocab",), **options
            )

    def step_bytes(self, tokens: int) -> int:
        """Returns the expected bytes that a step reads, if tokens choose their experts at random."""
        return super().step_bytes(tokens) - self._head_bytes() - self._unread_bytes(self.layers, tokens)

    def draft_bytes(self, requests: int, count: int) -> int:
        """Returns the expected bytes that drafts read; the head's once for each pass."""
        if self.drafts is None or self.config.drafts is None:
            return 0
        unread = self._unread_bytes(self.drafts.layers, requests * self.config.drafts.block_size)
        each = self._head_bytes() - unread
        return super().draft_bytes(requests, count) + draft_passes(self.config, count) * each

    def _head_bytes(self):
        return 0 if self.drafts is None else tree_bytes(self.lm_head)

    def _unread_bytes(self, layers, tokens):
        """Returns the expected bytes of the routed experts that no token hits."""
        share = (1 - self.config.num_experts_per_tok / self.config.n_routed_experts) ** tokens
        return round(share * sum(tree_bytes(layer.mlp.experts) for loop in layers.loops for layer in loop.layers))

    def __call__(self, x: Float[Array, "T D"], cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Maps embeddings [T, hidden] bfloat16 to the head's input; also returns the updated cache."""
        streams = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))
        residual = ResidualStreams.begin(streams)
        residual, _, cache, _ = self.layers(residual, cache.begin_step(batch), batch, StepCarry())
        return self.hc_head.pre(residual, self.norm)[0], cache

    logits = DeepseekV4ForCausalLM.logits

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns rows of the head as embeddings [T, hidden] of the batch's tokens."""
        return self.lm_head.weight[...].at[batch.token_ids].get(mode="clip")


def abstract_stack(config: DSV4Config, mesh: Mesh | None = None, *, expert_parallel: bool = False) -> ModelStack:
    """Returns the stack with shapes in place of arrays, quantized as in the release and sharded over a mesh."""
    return as_released(ModelStack(config, ABSTRACT), config, mesh, expert_parallel=expert_parallel)


def random_stack(config: DSV4Config, mesh: Mesh | None = None, **options: Any) -> ModelStack:
    """Returns the stack with random weights; `options` are those of `checkpoint.random_weights.random_weights`."""
    return random_weights(ModelStack(config, ABSTRACT), config, mesh, **options)
