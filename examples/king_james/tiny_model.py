"""The tiny model: its shape, its initial weights, and its modules in training."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import kjv
import numpy as np
from dense_cache import DenseCache
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.checkpoint import fake_quantize
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM, FusedLinear, StepCarry, parameter_views
from dsv4_jax.nn.hyper_connection import ResidualStreams
from dsv4_jax.nn.model import DecoderLayer
from dsv4_jax.nn.moe import Experts
from dsv4_jax.ops import swiglu
from dsv4_jax.quant import round_to


TINY = DSV4Config(
    vocab_size=kjv.VOCAB,
    hidden_size=256,
    num_attention_heads=4,
    head_dim=160,
    qk_rope_head_dim=32,
    q_lora_rank=128,
    o_lora_rank=128,
    o_groups=2,
    index_n_heads=16,
    index_head_dim=64,
    index_topk=128,
    sliding_window=128,
    specs=(LayerSpec(), *(LayerSpec.csa(), LayerSpec.hca()) * 2, LayerSpec.csa()),
    mlp_layer_types=("hash_moe", *("moe",) * 5),
    moe_intermediate_size=128,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    scoring_func="sqrtsoftplus",
    swiglu_limit=10.0,
    hc_mult=2,
    hc_sinkhorn_iters=8,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=None,
    max_position_embeddings=32768,
    bos_token_id=kjv.BOS,
    eos_token_id=(kjv.EOS,),
)
_BALANCE = "e_score_correction_bias"


def window_only(config: DSV4Config, moe_intermediate_size: int) -> DSV4Config:
    """Returns a model of the same depth and width without compressed entries, with wider experts instead."""
    specs = (LayerSpec(),) * config.num_hidden_layers
    return dataclasses.replace(config, specs=specs, moe_intermediate_size=moe_intermediate_size)


TINY_WINDOW_ONLY = window_only(TINY, moe_intermediate_size=160)
TOY = dataclasses.replace(
    TINY,
    hidden_size=64,
    num_attention_heads=2,
    head_dim=96,
    q_lora_rank=32,
    o_lora_rank=32,
    index_head_dim=32,
    index_topk=8,
    sliding_window=8,
    specs=(LayerSpec.csa(), LayerSpec.hca(16)),
    mlp_layer_types=("hash_moe", "moe"),
    moe_intermediate_size=32,
    n_routed_experts=4,
)
TOY_WINDOW_ONLY = window_only(TOY, moe_intermediate_size=64)

type Tensors = dict[str, Array]


def first_weights(config: DSV4Config, seed: int) -> tuple[Tensors, Tensors]:
    """Draws the initial weights, float32 by module path.

    Linear weights have variance 1 / (number of inputs), and less if their outputs are added to the residual streams.
    At first, each layer reads mostly one stream, the layers in turn, and hardly mixes the streams. Sinks and other
    biases are 0.

    Returns:
      The weights that gradients train, and those that they do not, see `apart`.
    """
    shapes = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    # Weights are drawn layer by layer, so that their values do not depend on which layers are stacked.
    views = sorted(parameter_views(shapes).items(), key=lambda item: _parts(item[0]))
    return apart({path: _first(config, rng, path, view) for path, view in views})


def _parts(path):
    return [int(part) if part.isdigit() else part for part in path.split(".")]


def _first(config, rng, path, like):
    name = path.rsplit(".", 1)[-1]
    if name == "tid2eid":
        order = rng.permuted(np.tile(np.arange(config.n_routed_experts), (like.shape[0], 1)), axis=1)
        return jnp.asarray(order[:, : like.shape[1]], like.dtype)
    if name in ("sinks", "position_bias", "hc_base", _BALANCE):
        return jnp.zeros(like.shape, jnp.float32)
    if name == "base":
        # Biases of `pre`, `post` and `comb`, with which a layer reads one stream, writes to all and mixes them little.
        streams = config.hc_mult
        reads = _layer(config, path) % config.hc_mult
        read = np.where(np.arange(streams) == reads, 1.0, -1.0)
        return jnp.asarray(np.concatenate([read, np.zeros(streams), 3.0 * np.eye(streams).ravel()]), jnp.float32)
    if len(like.shape) == 1:
        return jnp.full(like.shape, 0.1 if name in ("scale", "hc_scale") else 1.0, jnp.float32)
    size = like.shape[-1] ** -0.5
    if path.startswith("model.embed_tokens"):
        size = 0.3
    elif path.endswith(("o_b_proj.weight", "down_proj.weight", "down_proj")):
        size *= (2 * config.num_hidden_layers) ** -0.5
    return jnp.asarray(size * rng.standard_normal(like.shape, np.float32))


def apart(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Splits tensors into those that gradients train, and those that they do not.

    Balancing biases and tables of hash layers are not trained by gradients. If there is a multi-token-prediction block,
    everything outside it is not trained.
    """
    frozen = ("model.", "lm_head.") if any(path.startswith("drafts.") for path in tensors) else ()
    fixed = {path: x for path, x in tensors.items() if path.endswith((_BALANCE, "tid2eid")) or path.startswith(frozen)}
    return {path: value for path, value in tensors.items() if path not in fixed}, fixed


def named_tensors(model: nnx.Module) -> Tensors:
    """Returns copies of a model's arrays by path, see `parameter_views`."""
    return {path: view.read() for path, view in parameter_views(model).items()}


def assemble(config: DSV4Config, tensors: Tensors, dtype: DTypeLike) -> DeepseekV4ForCausalLM:
    """Returns the model with these tensors, each cast to the dtype of its module."""
    model = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(config, dtype=dtype, rngs=nnx.Rngs(0)))
    for path, view in parameter_views(model).items():
        view.set_value(tensors[path].astype(view.dtype))
    return model


def as_stored(config: DSV4Config, tensors: Tensors) -> Tensors:
    """Returns all tensors of a model with the values that they have once saved, with straight-through gradients."""
    return named_tensors(fake_quantize(assemble(config, tensors, jnp.float32)))


def _layer(config, path):
    """Returns the index of a tensor's layer; draft layers come last."""
    part, _, number, *_ = path.split(".")
    return int(number) + (config.num_hidden_layers if part == "drafts" else 0)


def balanced(config: DSV4Config, fixed: Tensors, expert_load: Float[Array, "L E"], rate: float) -> Tensors:
    """Updates the routers' balancing biases: up for experts with less than the mean load, down for those with more.

    Layers without tokens are unchanged. From DeepSeek-V3's report (arXiv 2412.19437), section 2.1.2.
    """
    result = dict(fixed)
    for path, bias in fixed.items():
        if path.endswith(_BALANCE):
            load = expert_load[_layer(config, path)]
            result[path] = bias + rate * jnp.sign(jnp.mean(load) - load)
    return result


def for_training(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """Changes a model in place, and returns it: layers become `TrainedLayer`, their projections `DetachedIndexer`."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, DecoderLayer):
            module.__class__ = TrainedLayer
            module.self_attn.input_projections.__class__ = DetachedIndexer
            module.self_attn.latent_projections.__class__ = DetachedIndexer
    return model


class TrainedLayer(DecoderLayer):
    """A layer with dropout after each block, dense products over all experts, and a record of the experts' load.

    With few small experts, a dense product is faster than sorting tokens, and it is differentiable.
    """

    def __call__(
        self,
        residual: ResidualStreams,
        cache: StepCache,
        batch: Batch,
        carry: StepCarry,
        *,
        number: Any = None,
        **unused: Any,
    ) -> tuple[ResidualStreams, StepCarry, Any]:
        number = self.layer if number is None else number
        x, residual = self.attn_hc.pre(residual, self.input_layernorm)
        forced_experts, forced_selection = batch.layer_decisions(self.self_attn.config, number)
        y, carry, after = self.self_attn(x, cache.handle(number, batch, like=self.layer), carry, forced_selection)
        assert isinstance(after, DenseCache)
        residual = residual.post(after.dropped(y, 2 * number))
        x, residual = self.ffn_hc.pre(residual, self.post_attention_layernorm)
        experts, weights, _ = self.mlp.gate(x, batch.token_ids, forced_experts=forced_experts)
        routed = all_experts(self.mlp.experts, x, experts, weights)
        y = round_to(routed + self.mlp.shared_experts(x).astype(jnp.float32), x.dtype)
        after = after.with_load(number, experts)
        return residual.post(after.dropped(y, 2 * number + 1)), carry, after


def all_experts(
    module: Experts, x: Float[Array, "T D"], experts: Int[Array, "T k"], weights: Float[Array, "T k"]
) -> Float[Array, "T D"]:
    """Computes `Experts.__call__` with dense products: experts that a token is not routed to get weight 0."""
    number, hidden, inner = module.down_proj.shape
    by_expert = jnp.sum(jax.nn.one_hot(experts, number, dtype=jnp.float32) * weights[:, :, None], axis=1)
    gate, up = (weight.reshape(-1, hidden) for weight in jnp.moveaxis(module.gate_up_proj[...], 1, 0))
    active = swiglu(x @ gate.T, x @ up.T, module.limit).reshape(-1, number, inner)
    active = round_to(active * by_expert[:, :, None], x.dtype).reshape(-1, number * inner)
    down = jnp.swapaxes(module.down_proj[...], 0, 1).reshape(hidden, -1)
    return jnp.matmul(active, down.T).astype(jnp.float32)


class DetachedIndexer(FusedLinear):
    """Linear maps of one input. The maps of the indexer pass no gradient to the input.

    So the indexer's loss trains the indexer's maps, and nothing before them.
    """

    def __call__(self, x, norm=None):
        x = norm(x) if norm else x
        products = super().__call__(x)
        detached = super().__call__(jax.lax.stop_gradient(x))
        return products | {name: y for name, y in detached.items() if name.startswith("indexer_")}
