"""Attribute paths, shapes and dtypes: what checkpoints are loaded by."""

import json
import struct
import typing

import jax.numpy as jnp
import pytest
from flax import nnx

from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import CSA, HCA, SLIDING
from dsv4_jax.nn import DeepseekV4ForCausalLM, HashTable, ResidualStreams, StepCarry, parameter_views
from dsv4_jax.nn.layers import ABSTRACT
from tests.paths import DATA
from tests.values import parameter_values


F32 = jnp.dtype("float32")
BF16 = jnp.dtype("bfloat16")
I32 = jnp.dtype("int32")

# The packaged tiny model: hidden 64, vocab 160, 4 heads of 96, q_lora 24, 2 groups of o_lora 16, indexer 32 x 64,
# 8 experts of 32, 4 streams, rates 4 and 16.
INPUTS = "self_attn.input_projections.weights"
LATENTS = "self_attn.latent_projections.weights"
HYPER = {"fn": ((24, 256), F32), "base": ((24,), F32), "scale": ((3,), F32)}
COMMON = {
    f"{INPUTS}.q_a_proj": ((24, 64), BF16),
    "self_attn.q_a_norm.weight": ((24,), F32),
    f"{LATENTS}.q_b_proj": ((384, 24), BF16),
    f"{INPUTS}.kv_proj": ((96, 64), BF16),
    "self_attn.kv_norm.weight": ((96,), F32),
    "self_attn.o_a_proj.weight": ((32, 192), BF16),
    "self_attn.o_b_proj.weight": ((64, 32), BF16),
    "self_attn.sinks": ((4,), F32),
    "mlp.gate.weight": ((8, 64), F32),
    "mlp.experts.gate_up_proj": ((8, 2, 32, 64), BF16),
    "mlp.experts.down_proj": ((8, 64, 32), BF16),
    "mlp.shared_experts.gate_up_proj.weights.gate_proj": ((32, 64), BF16),
    "mlp.shared_experts.gate_up_proj.weights.up_proj": ((32, 64), BF16),
    "mlp.shared_experts.down_proj.weight": ((64, 32), BF16),
    "input_layernorm.weight": ((64,), F32),
    "post_attention_layernorm.weight": ((64,), F32),
    **{f"{hc}.{name}": leaf for hc in ("attn_hc", "ffn_hc") for name, leaf in HYPER.items()},
}
COMPRESSOR = {
    SLIDING: {},
    HCA: {
        f"{INPUTS}.compressor_kv_proj": ((96, 64), BF16),
        f"{INPUTS}.compressor_gate_proj": ((96, 64), BF16),
        "self_attn.compressor.position_bias": ((16, 96), F32),
        "self_attn.compressor.kv_norm.weight": ((96,), F32),
    },
    CSA: {
        f"{INPUTS}.compressor_kv_proj": ((192, 64), BF16),
        f"{INPUTS}.compressor_gate_proj": ((192, 64), BF16),
        "self_attn.compressor.position_bias": ((4, 192), F32),
        "self_attn.compressor.kv_norm.weight": ((96,), F32),
        f"{INPUTS}.indexer_kv_proj": ((128, 64), BF16),
        f"{INPUTS}.indexer_gate_proj": ((128, 64), BF16),
        "self_attn.compressor.indexer.position_bias": ((4, 128), F32),
        "self_attn.compressor.indexer.kv_norm.weight": ((64,), F32),
        f"{LATENTS}.indexer_q_b_proj": ((2048, 24), BF16),
        f"{INPUTS}.indexer_weights_proj": ((32, 64), BF16),
    },
}
ROUTER = {
    "moe": {"mlp.gate.e_score_correction_bias": ((8,), F32)},
    "hash_moe": {"mlp.gate.tid2eid": ((160, 2), I32)},
}
TOP = {
    "model.embed_tokens.weight": ((160, 64), BF16),
    "model.norm.weight": ((64,), F32),
    "model.hc_head.hc_fn": ((4, 256), F32),
    "model.hc_head.hc_base": ((4,), F32),
    "model.hc_head.hc_scale": ((1,), F32),
    "lm_head.weight": ((160, 64), BF16),
}


def variables(config, **kwargs):
    model = DeepseekV4ForCausalLM(config, rngs=ABSTRACT, **kwargs)
    # A variable of the RNG would be state that no checkpoint has.
    assert {type(v) for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)} == {nnx.Param, HashTable}
    return parameter_views(model)


def test_paths_shapes_and_dtypes(config):
    expected = dict(TOP)
    for i, (kind, mlp) in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        layer = COMMON | COMPRESSOR[kind] | ROUTER[mlp]
        expected |= {f"model.layers.{i}.{name}": leaf for name, leaf in layer.items()}
    assert {path: (v.shape, v.dtype) for path, v in variables(config).items()} == expected


def test_float32_model_is_float32_throughout(config):
    dtypes = {path: v.dtype for path, v in variables(config, dtype=jnp.float32).items()}
    assert all(dtype == (I32 if path.endswith("tid2eid") else F32) for path, dtype in dtypes.items())


def test_names_and_shapes_are_those_transformers_writes():
    folder = DATA / "hf_tiny" / "module_names"
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    stored = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    config = DSV4Config.from_hf(folder)
    table = list(weights(config, "module"))
    assert {source: weight.source_shape for weight in table for source in weight.sources} == stored
    ours = {path: v.shape for path, v in variables(config).items()}
    assert {weight.path: weight.shape for weight in table} == ours
    # Most paths are transformers' own, but for linear maps of one input.
    other = {weight.sources[0] for weight in table if weight.sources != (weight.path,)}
    assert all(name.endswith("proj.weight") for name in other) and len(other) == 5 * 5 + 4 * 2 + 2 * 4


@pytest.mark.parametrize("kind", [StepCarry, ResidualStreams])
def test_fields_that_hold_arrays_say_so(kind):
    assert not [name for name, hint in typing.get_type_hints(kind).items() if "Any" in str(hint)]


def test_other_dtypes_are_refused(config):
    with pytest.raises(ValueError, match="dtype='float16' must be 'bfloat16' or 'float32'"):
        DeepseekV4ForCausalLM(config, dtype=jnp.float16)


def test_random_weights_follow_the_seed_and_leave_nothing_trivial(short_config):
    def parameters(seed):
        model = DeepseekV4ForCausalLM(short_config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
        return parameter_values(model)

    first = parameters(1)
    again = parameters(1)
    other = parameters(2)
    for path, value in first.items():
        assert (value == again[path]).all() and not (value == other[path]).all(), path
        assert value.size == 1 or value.min() < value.max(), path
