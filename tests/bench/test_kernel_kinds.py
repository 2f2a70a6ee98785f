"""Kernels are classified by the scopes in a compiled program's text."""

import pytest

from dsv4_jax.bench.kernel_kinds import KINDS, REST, kernel_report, kinds_by_name
from tests.pallas_kernels.kernels import compile_in_process


# Lines of a compiled step, shortened.
TEXT = """
%fused_computation (p: f32[8]) -> f32[8] {
  ROOT %add.7 = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/router/add"}
}
ENTRY %main.69 (p: f32[8]) -> f32[8] {
  %mpmd_map.1 = bf16[1]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/projections/jit(quantized_linear)/quantized_linear/mpmd_map"}
  %loop_add_fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(step)/router/add" stack_frame_id=3}
  %mpmd_map.2 = bf16[1]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/shared_expert/projections/jit(quantized_linear)/call_exported/jit(flat)/quantized_linear/mpmd_map"}
  %mpmd_map.3 = bf16[1]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/projections/jit(all_reduce)/all_reduce/mpmd_map"}
  ROOT %input_reduce_fusion = f32[8]{0} fusion(%p), kind=kInput, calls=%other, metadata={op_name="jit(step)/lm_head/dot_general"}
}
"""  # noqa: E501


def test_a_kernel_in_two_scopes_follows_the_order_of_the_schedule():
    assert kinds_by_name(TEXT) == {
        "quantized_linear": ["projections", "shared_expert"],
        "loop_add_fusion_2": ["router"],
        "all_reduce": ["all_reduce"],
        "input_reduce_fusion": ["lm_head"],
    }
    call = ["quantized_linear_mosaic_gpu_kernel", "loop_add_fusion_2", "quantized_linear_mosaic_gpu_kernel_1"]
    call += ["all_reduce_mosaic_gpu_kernel", "input_reduce_fusion", "nvjet_tst_128x8", "ncclDevKernel_AllGather", "x_3"]
    kinds = ["projections", "router", "shared_expert", "all_reduce", "lm_head", "projections", "all_reduce", REST]
    report = kernel_report([(name, 2.0**i) for i, name in enumerate(2 * call)], TEXT, calls=2)
    expected = dict.fromkeys([*KINDS, REST], 0.0)
    for i, kind in enumerate(2 * kinds):
        expected[kind] += 2.0**i / 2
    assert report["kernel_milliseconds"] == expected and list(expected) == [*KINDS, REST]
    names = {(row["name"], row["kind"]): row["launches"] for row in report["longest_kernels"]}
    assert names["loop_add_fusion", "router"] == names["quantized_linear_mosaic_gpu_kernel", "shared_expert"] == 1


def test_loops_are_unrolled():
    """A loop of two kernels that runs three times, then the second one once more in another part of the model."""
    text = """
%body (p: f32[8]) -> f32[8] {
  %fusion.1 = f32[8]{0} fusion(%p), calls=%other, metadata={op_name="jit(step)/while/body/router/add"}
  ROOT %mpmd_map.1 = bf16[1]{0} custom-call(%p), metadata={op_name="jit(step)/while/body/experts/dot/mpmd_map"}
}
%command_buffer (p: f32[8]) -> f32[8] {
  ROOT %while.1 = f32[8]{0} while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
ENTRY %main.1 (p: f32[8]) -> f32[8] {
  %call = f32[8]{0} call(%p), to_apply=%command_buffer
  ROOT %mpmd_map.2 = bf16[1]{0} custom-call(%p), metadata={op_name="jit(step)/lm_head/dot/mpmd_map"}
}
"""
    assert kinds_by_name(text) == {"fusion_1": ["router"] * 3, "dot": ["experts"] * 3 + ["lm_head"]}


def test_a_kernel_that_is_joined_with_its_slices_keeps_its_name():
    text = """
%dynamic-slice-fusion.1 (p: f32[2,8], i: s32[]) -> f32[8] {
  %slice.1 = f32[1,8]{1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,8}
  ROOT %mpmd_map.1 = f32[8]{0} custom-call(%slice.1), metadata={op_name="jit(step)/while/body/topk/indexer_topk/mpmd_map"}
}
ENTRY %main.1 (p: f32[8]) -> f32[8] {
  ROOT %dynamic_slice_fusion = f32[8]{0} fusion(%p, %i), kind=kCustom, calls=%dynamic-slice-fusion.1, metadata={op_name="jit(step)/while/body/topk/indexer_topk/mpmd_map"}
}
"""  # noqa: E501
    assert kinds_by_name(text) == {"indexer_topk": ["topk"]}


def test_the_longest_kernels_come_first():
    launches = [("input_reduce_fusion", 1.0), ("nvjet_tst_128x8", 10.0), ("input_reduce_fusion", 2.0)]
    report = kernel_report(launches, TEXT, calls=2)
    assert report["launches"] == 1.5 and report["kernel_milliseconds"]["projections"] == 5.0
    assert report["longest_kernels"] == [
        dict(name="nvjet_tst_128x8", kind="projections", launches=0.5, milliseconds=5.0),
        dict(name="input_reduce_fusion", kind="lm_head", launches=1.0, milliseconds=1.5),
    ]


@pytest.mark.aot
def test_scopes_survive_compilation():
    """Lowered in place, and as an exported module from the lowering cache."""
    compile_in_process("""
import tempfile
import jax, jax.numpy as jnp
from dsv4_jax import ops
from dsv4_jax.bench.kernel_kinds import kinds_by_name

def step(scores, lengths):
    with jax.named_scope("indexer"):
        scores = 2 * jnp.sin(scores)
    with jax.named_scope("topk"), ops.use_implementation("mosaic_gpu"):
        return ops.indexer_topk(scores, lengths, 64)

shapes = jax.ShapeDtypeStruct((8, 1024), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
for folder in None, tempfile.mkdtemp():
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.clear_caches()
    text = compile_for_h100("step", step, *shapes).as_text()
    assert ("call_exported" in text) == (folder is not None)
    kinds = kinds_by_name(text)
    assert kinds.pop("indexer_topk") == ["topk"], kinds
    assert {kind for calls in kinds.values() for kind in calls} <= {"indexer", "topk"} and kinds, kinds
""")
