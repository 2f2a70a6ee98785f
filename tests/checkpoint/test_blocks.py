"""FP8 weights in blocks of 32 x 32 (V4.1) and of 1 x 32 (Engram's tables): read, kept, multiplied, saved and drawn."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dsv4_jax import ops
from dsv4_jax.checkpoint import random_weights, read_checkpoint, read_file
from dsv4_jax.checkpoint.storage import join_scales
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import FusedLinear, parameter_views
from dsv4_jax.nn.projections import Projection, merged_rows
from dsv4_jax.nn.shardings import shardings
from dsv4_jax.quant import QuantizedWeight
from tests.checkpoint.test_storage import encoded
from tests.nn.test_quantized import random_weight
from tests.paths import DATA


OFFICIAL = DATA / "official_v41_fp8"


def test_every_tensor_of_two_shards_has_the_goldens_values():
    golden = np.load(OFFICIAL / "golden.npz")
    stored = read_checkpoint(OFFICIAL)
    assert len({tensor.file for tensor in stored.values()}) == 2
    tensors, problems = join_scales(stored, "FP8_32")
    assert not problems
    # The golden does not have the biases for image tokens.
    assert {name for name in tensors if not name.endswith("bias_vl")} == set(golden["all_names"])
    for name, sums in zip(golden["all_names"], golden["all_sums"], strict=True):
        w = tensors[name].load().astype(np.float64).reshape(-1)
        got = w.sum(), np.abs(w).sum(), (w * (np.arange(w.size) % 1009 + 1) / 1009).sum()
        # Sums of exact values in another order; relative to the sum of magnitudes.
        chex.assert_trees_all_close(np.array(got), sums, rtol=0, atol=1e-12 * sums[1], custom_message=name)
    assert tensors["layers.1.engram.embed.weight"].dtype == "FP8_ROWS"
    assert tensors["layers.1.engram.wkv.weight"].dtype == "FP8_32"


def test_blocks_of_another_size_are_refused():
    """Scales of 32 x 32 taken for those of 128 x 128, and the other way round."""
    tensors, problems = join_scales(read_checkpoint(OFFICIAL), "FP8")
    name = "layers.1.attn.wq_a.weight"
    assert name not in tensors
    assert problems[name] == (
        f"{name} is stored as F8_E4M3 [64, 96]; layers.1.attn.wq_a.scale must be F8_E8M0 [1, 1], and is F8_E8M0 [2, 3]"
    )
    # Of the matrices in FP8, only those within one block of either size would have the same scales.
    assert sum(".attn.w" in name or "engram.wkv" in name for name in problems) == 7 * 5 + 2
    _, problems = join_scales(read_checkpoint(DATA / "official_fp8"), "FP8_32")
    assert "wq_a.scale must be F8_E8M0 [6, 8], and is F8_E8M0 [2, 2]" in problems["layers.1.attn.wq_a.weight"]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ml_dtypes.bfloat16])
def test_scales_that_were_converted_as_numbers_are_refused(tmp_path, dtype):
    """2 ** -7 as uint8 is 0: only the bits of E8M0 hold a scale."""
    codes, scale = encoded(np.ones((96, 40), np.float32), "FP8_32")
    save_file({"a.weight": codes, "a.scale": scale.astype(np.float32).astype(dtype)}, tmp_path / "x.safetensors")
    tensors, problems = join_scales(read_file(tmp_path / "x.safetensors"), "FP8_32")
    assert not tensors and "a.scale must be F8_E8M0 [3, 2], and is " in problems["a.weight"]


@pytest.mark.parametrize("kind", ["FP8_32", "FP8_ROWS"])
def test_values_in_memory_are_those_in_the_file(tmp_path, kind):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((72, 100)).astype(np.float32) * np.exp2(rng.integers(-9, 9, (72, 1)))
    codes, scale = encoded(values, kind)
    save_file({"a.weight": codes, "a.scale": scale}, tmp_path / "x.safetensors")
    tensor = join_scales(read_file(tmp_path / "x.safetensors"), "FP8_32")[0]["a.weight"]
    assert tensor.dtype == kind and tensor.can_stay
    arrays = (jnp.asarray(x.data.reshape(x.shape)) for x in (tensor.codes, tensor.scale))
    weight = QuantizedWeight(*arrays, kind, jnp.dtype(jnp.float32))
    chex.assert_trees_all_equal(weight[...], tensor.load())
    chex.assert_trees_all_equal(tensor.load(32, 70), tensor.load()[32:70])
    chex.assert_trees_all_equal(tensor.load(64, 1000), tensor.load()[64:])


def test_rows_of_a_table_are_dequantized_alone():
    table, values = random_weight("FP8_ROWS", (1000, 64))
    ids = jnp.asarray([[7, 999, 7], [0, 3, 500]])
    chex.assert_trees_all_equal(np.asarray(nnx.Param(table)[ids], np.float64), values[np.asarray(ids)])
    chex.assert_trees_all_equal(np.asarray(table[3], np.float64), values[3])
    program = jax.make_jaxpr(lambda table, ids: table[ids])(table, ids)
    sizes = [variable.aval.size for equation in program.eqns for variable in equation.outvars]
    assert max(sizes) <= ids.size * 64


@pytest.mark.parametrize("tokens", [4, 80])
def test_kernels_refuse_other_blocks_and_xla_multiplies_exactly(tokens):
    weight, values = random_weight("FP8_32", (96, 256))
    rows, _ = random_weight("FP8_ROWS", (96, 256))
    x = jax.random.normal(jax.random.key(0), (tokens, 256), jnp.bfloat16)
    refusals = "outputs of a multiple of 64 rows, got .96", "takes weights stored as FP8, got FP8_ROWS"
    for given, reason in zip((weight, rows), refusals, strict=True):
        with pytest.raises(NotImplementedError, match=reason):
            ops.linear(x, given, implementation="interpret")
    expected = ops.linear(x, jnp.asarray(values, jnp.bfloat16), implementation="xla")
    with ops.use_implementation("interpret"):
        chex.assert_trees_all_equal(ops.linear(x, weight), expected)
        gate_up = ops.linear_swiglu(x, weight, 10.0)
    chex.assert_trees_all_equal(gate_up, ops.linear_swiglu(x, jnp.asarray(values, jnp.bfloat16), 10.0))


def test_experts_with_a_shared_expert_in_other_blocks():
    """In the launch of the routed experts."""
    up, down = (random_weight("FP4", shape)[0] for shape in ((2, 1024, 256), (2, 256, 512)))
    shared = [random_weight("FP8_32", shape) for shape in ((512, 256), (256, 256))]
    x = jax.random.normal(jax.random.key(0), (3, 256), jnp.bfloat16)
    args = x, jnp.asarray([[0, 1]] * 3), jnp.ones((3, 2)), up, down, None
    stored, dequantized = (
        ops.experts(*args, tuple(shared), limit=10.0, implementation="xla")
        for shared in ([one for one, _ in shared], [jnp.asarray(values, jnp.bfloat16) for _, values in shared])
    )
    chex.assert_trees_all_equal(stored, dequantized)
    with ops.use_implementation("interpret"):
        y = ops.experts(*args, tuple(one for one, _ in shared), limit=10.0)
    # Sums in float32 in another order, rounded to bfloat16.
    chex.assert_trees_all_close(np.float32(y), np.float32(stored), rtol=2.0**-7, atol=1e-2 * np.abs(stored).max())


def test_fused_matrices_and_merged_ones_keep_whole_blocks():
    maps = {name: Projection(size) for name, size in (("a", 128), ("b", 160), ("c", 96))}
    fused = FusedLinear(64, maps, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert fused.groups == (("a", "b"), ("c",))
    weight, values = random_weight("FP8_32", (288, 64))
    fused.weights["a+b"] = nnx.Param(weight, axes=())
    views = parameter_views(fused)
    assert views["weights.b"].get_value().scale.shape == (5, 2)
    for name, rows in (("a", slice(128)), ("b", slice(128, 288))):
        chex.assert_trees_all_equal(np.asarray(views[f"weights.{name}"].read(), np.float64), values[rows])
    # Matrices whose rows are whole blocks are merged as they are; others are dequantized.
    for rows in (96, 80):
        stacked, values = random_weight("FP8_32", (2, rows, 64))
        merged = merged_rows(stacked)
        assert isinstance(merged, QuantizedWeight) == (rows == 96)
        chex.assert_trees_all_equal(np.asarray(merged[...], np.float64), values.reshape(2 * rows, 64))


@pytest.mark.parametrize(("kind", "rows", "fits"), [("FP8_32", 64, True), ("FP8_32", 96, False), ("FP8", 64, False)])
def test_a_mesh_may_cut_between_blocks_only(kind, rows, fits):
    module = nnx.Module()
    module.weight = nnx.Param(random_weight(kind, (rows, 64))[0], axes=("inner",))
    mesh = jax.make_mesh((2,), ("model",))
    if fits:
        shardings(module, mesh)
        return
    with pytest.raises(ValueError, match=f"stored as {kind}: .* its {rows} rows into parts of {rows // 2}, through"):
        shardings(module, mesh)


def test_a_large_table_is_drawn_without_other_memory():
    shape = (1 << 20, 256)
    draw = random_weights._Draw(random_weights._codes, (shape, (1 << 20, 8), "FP8_ROWS", jnp.dtype(jnp.bfloat16)))
    program = random_weights._drawn.lower([jnp.uint32(0)], (draw,)).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize("block", [64, 0])
def test_other_sizes_of_blocks_are_refused(block):
    with pytest.raises(ValueError, match=rf"weight_block={block} must be 128 or 32"):
        DSV4Config.small([LayerSpec()], weight_block=block)
