"""The release's quantized storage: every value exactly, and float32 parity of the model it makes (oracle's README)."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint
from dsv4_jax.checkpoint.storage import join_scales
from dsv4_jax.cli import main
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager
from tests.oracle.layers import run_layer
from tests.paths import DATA


FOLDER = DATA / "official_fp8"
# As for hf_tiny: 10 times what independent implementations differ by.
LAYER_TOLERANCE = 2e-5
LOGITS_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(FOLDER, dtype=jnp.float32)


def test_every_tensor_has_the_goldens_values(golden):
    tensors, problems = join_scales(read_checkpoint(FOLDER))
    assert not problems
    assert set(tensors) == set(golden["all_names"])
    for name, sums in zip(golden["all_names"], golden["all_sums"], strict=True):
        w = tensors[name].load().astype(np.float64).reshape(-1)
        got = w.sum(), np.abs(w).sum(), (w * (np.arange(w.size) % 1009 + 1) / 1009).sum()
        # Sums of exact values in another order; relative to the sum of magnitudes.
        chex.assert_trees_all_close(np.array(got), sums, rtol=0, atol=1e-12 * sums[1], custom_message=name)
    for key in golden:
        if key.startswith("dequant:"):
            chex.assert_trees_all_equal(tensors[key.removeprefix("dequant:")].load(), golden[key], custom_message=key)


@pytest.mark.parametrize("layer", range(4))
def test_attention_layer(model, golden, layer):
    out, _, _ = run_layer(model, layer, golden[f"attn_in_{layer}"], [75], kv_format="plain", dtype=jnp.float32)
    chex.assert_trees_all_close(out, golden[f"attn_out_{layer}"], rtol=0, atol=LAYER_TOLERANCE)


@pytest.mark.parametrize(
    "weights",
    [
        *(pytest.param(weights, marks=pytest.mark.slow) for weights in ("float32", "quantized")),
        pytest.param("quantized", marks=pytest.mark.gpu, id="stored on a GPU"),
    ],
)
def test_the_command_line_gives_the_goldens_outputs(golden, tmp_path, weights):
    np.save(tmp_path / "ids.npy", golden["ids"])
    arguments = ["score", "--checkpoint", FOLDER, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz"]
    arguments += ["--dtype", "float32", "--weights", weights, "--cache-format", "plain", "--layers"]
    assert main([str(argument) for argument in arguments]) == 0
    scores = np.load(tmp_path / "scores.npz")
    chex.assert_trees_all_close(scores["logits"], golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)
    for name in (f"attn_{side}_{layer}" for side in ("in", "out") for layer in range(4)):
        chex.assert_trees_all_close(scores[name], golden[name], rtol=0, atol=LAYER_TOLERANCE, custom_message=name)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_kernels_multiply_with_the_stored_weights(golden, implementation):
    """Of the folder's weights those whose columns come in 256s; in bfloat16, as kernels take no float32."""
    model = load_checkpoint(FOLDER, weights="quantized")
    tensors, _ = join_scales(read_checkpoint(FOLDER))
    x = jnp.asarray(golden["attn_in_1"][0, :5], jnp.bfloat16)
    layer = model.model.layers[1]
    inputs = layer.self_attn.input_projections.weights
    parameters = dict(
        wq_a=inputs["q_a_proj"],
        wkv=inputs["kv_proj"],
        wo_b=layer.self_attn.o_b_proj.weight,
        wo_a=layer.self_attn.o_a_proj.weight,
    )
    for name, parameter in parameters.items():
        weight = parameter.get_value()
        groups = model.config.o_groups if name == "wo_a" else 1
        given = jnp.tile(x, (1, groups * weight.shape[1] // x.shape[1]))
        spec = ops.LinearSpec(output_dtype=jnp.bfloat16, num_groups=groups)
        (found,) = ops.linear(given, weight, spec, implementation=implementation)
        matrices = tensors[f"layers.1.attn.{name}.weight"].load().astype(np.float64)
        matrices = matrices.reshape(groups, -1, weight.shape[1])
        inputs = np.asarray(given, np.float64).reshape(len(x), groups, -1)
        want = np.einsum("tgk,gmk->tgm", inputs, matrices).reshape(len(x), -1)
        # Rounded once to the 8 bits of a bfloat16, from sums of exact products in float32.
        chex.assert_trees_all_close(np.float64(found), want, rtol=2.0**-8, atol=1e-5, custom_message=name)


@pytest.mark.slow
def test_stored_weights_give_the_same_bits():
    """Prefill, and decoding, where few experts are read."""
    logits = []
    for weights in (None, "quantized"):
        model = load_checkpoint(FOLDER, weights=weights)
        sizes = dict(num_blocks=6, max_requests=1, max_context=96, block_tokens=16)
        host = KVCacheManager(model.config, kv_format="v4", **sizes)
        model = CompiledModel(model)
        slot = host.admit()
        cache = host.init_cache()
        outs = []
        for tokens in (list(range(5, 45)), [7]):
            out, cache = model.forward(cache, host.prepare_forward({slot: tokens}))
            outs.append(np.asarray(out))
        logits.append(outs)
    for plain, stored in zip(*logits, strict=True):
        chex.assert_trees_all_equal(stored, plain)
