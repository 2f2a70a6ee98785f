"""The whole decode step as an H100 runs it: kernels inside, every pool updated where it lies."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import (
    BatchedSamplingParams,
    CompiledModel,
    EarlierTokens,
    SamplingParams,
    decode_step,
    sample_step,
)
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import SCOPES, DeepseekV4ForCausalLM
from tests.pallas_kernels.kernels import compile_in_process


def step(model, cache, batch, *drawing):
    """A step that returns logits; with arguments for drawing, one that verifies drafts and makes as many."""
    drafts = cache.schema.max_query_tokens - 1
    with ops.use_implementation("mosaic_gpu"):
        if drawing:
            return sample_step.body(model, cache, batch, *drawing, drafts=drafts)
        return decode_step.body(model, cache, batch)


def small_config(drafts):
    """A layer of each kind with the released widths of heads, and maybe a block that makes one draft, or DSpark's 5."""
    config = dataclasses.replace(
        DSV4Config.v4_flash().with_layers([LayerSpec(), LayerSpec.csa(), LayerSpec.hca()]), hidden_size=1024,
        num_attention_heads=8, o_groups=2, q_lora_rank=256, o_lora_rank=128, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, vocab_size=1024, index_n_heads=8,
        num_nextn_predict_layers=min(drafts, 1),
    )  # fmt: skip
    return config.with_dspark(markov_rank=256) if drafts == 5 else config


def arguments(requests=8, drafts=0):
    """(model, cache, batch, and what is needed to draw and to run ahead) of shapes alone, cache rows as released."""
    config = small_config(drafts)
    model = jax.eval_shape(lambda: CompiledModel(DeepseekV4ForCausalLM(config)))
    sizes = dict(num_blocks=2048, max_requests=requests, max_context=4096, kv_format="v4", max_query_tokens=1 + drafts)
    cache = KVCache.abstract(CacheSchema(config, **sizes))

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    tokens = ints(requests * (1 + drafts))
    slots = ints(requests)
    batch = Batch(tokens, tokens, tokens, ints(requests, 3), slots, prefill=False)
    sampling = jax.eval_shape(
        lambda: jax.tree.map(jnp.asarray, BatchedSamplingParams.of([SamplingParams()] * requests))
    )
    earlier = EarlierTokens((slots, ints(requests, drafts)), tokens)
    drawing = tokens, sampling, jax.ShapeDtypeStruct((requests,), jnp.uint32), None, earlier
    return model, cache, batch, *(drawing if drafts else ())


def check_in_place(compiled, cache):
    """There are kernels, the whole cache is aliased, and no pool is copied."""
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') >= 3, "no kernels in the step"
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes
    # Where XLA fuses an operand's slice with a kernel it forgets what the kernel writes in place; others may be fused.
    for fused in re.findall(r"^%dynamic.slice.fusion.*?^}", text, re.MULTILINE | re.DOTALL):
        assert not re.search(r"/(append_swa|norm_rope_append|flush_\w+)/", fused), fused
    # By type and number of elements: the kernels see pools with their leading axes merged.
    names = {"uint8": "u8", "bfloat16": "bf16", "float32": "f32", "int32": "s32"}
    pools = {(names[x.dtype.name], math.prod(x.shape)) for x in jax.tree.leaves(cache) if x.ndim > 2}
    calls = re.findall(r"custom-call\([^)]+\)", text)
    assert len(set(calls)) == len(calls), (
        "a kernel runs twice on the same operands: every fused product is computed once"
    )
    for line in text.splitlines():
        if found := re.search(r"= (\w+)\[([\d,]*)\]\S* (copy|copy-start|dynamic-update-slice)\(", line):
            assert (found[1], math.prod(map(int, filter(None, found[2].split(","))))) not in pools, line


def test_a_profile_can_name_every_part_of_a_step():
    text = jax.jit(lambda *args: sample_step.body(*args, drafts=1)).lower(*arguments(drafts=1)).as_text(debug_info=True)
    unnamed = [scope for scope in SCOPES if not re.search(rf"[/\"]{scope}[/\"]", text)]
    assert unnamed == ["engram"], "the model of this step is without Engram"


@pytest.mark.aot
@pytest.mark.parametrize(("requests", "drafts"), [(1, 0), (8, 1), (1, 5)])
def test_no_copy_of_a_pool_in_a_step_with_kernels(requests, drafts):
    compile_in_process(f"""
from tests.decode.test_h100_step import arguments, check_in_place, step
given = arguments({requests}, {drafts})
check_in_place(compile_for_h100("step", step, *given, donate_argnums=1), given[1])
""")


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_no_copy_of_a_pool_in_a_step_on_the_gpu(drafts):
    given = arguments(drafts=drafts)
    check_in_place(jax.jit(step, donate_argnums=1).lower(*given).compile(), given[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "drafts"), [(1, 2), (5, 5)], ids=["MTP", "DSpark"])
def test_drafts_change_no_token_on_the_gpu(layers, drafts):
    """Requests with and without drafts in one program; those of random layers are nearly all refused."""
    model = DeepseekV4ForCausalLM(small_config(drafts=layers))
    manager = KVCacheManager(model.config, num_blocks=64, max_requests=4, max_context=512, max_query_tokens=1 + drafts)
    engine = Engine(model, manager, token_budget=64, drafter="model", batch_invariant=True)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 200))
    requests = [engine.add(prompt, max_new_tokens=40, draft_tokens=k) for prompt in prompts for k in (0, drafts)]
    while engine.busy:
        engine.step()
    for without, drafted in zip(requests[::2], requests[1::2], strict=True):
        assert drafted.drafted_tokens > 40 and drafted.generated == without.generated
