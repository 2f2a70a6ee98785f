"""Eight devices run small models of V4-Pro's and V4.1's patterns as one device does, with all that an engine does."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from dsv4_jax.parallel.mesh import make_mesh
from tests.v41 import v41_config


TOKENS = 24  # of each answer
# A conversation, the same one with another end, a copy of a part of it, and others.
PROMPTS = list(range(40)), [*range(33), *range(60, 70)], list(range(32)), [5, 17, 42], list(range(90, 120))


def pro_config():
    """V4-Pro's pattern: two HCA layers, then CSA and HCA in turn; three hash routers; two output groups a device."""
    hca = LayerSpec.hca(16)
    csa = LayerSpec.csa()
    return DSV4Config.small(
        [hca, hca, csa, hca, csa, hca, csa],
        mlp_layer_types=("hash_moe",) * 3 + ("moe",) * 4,
        vocab_size=160, num_attention_heads=16, o_groups=16, n_routed_experts=16, index_topk=8, sliding_window=8,
    ).with_drafts(True)  # fmt: skip


CONFIGS = {
    "pro with MTP": pro_config,
    "v41 with DSpark": functools.partial(v41_config, drafts=True),
}


@functools.cache
def model_of(name):
    return DeepseekV4ForCausalLM(CONFIGS[name](), jnp.float32)


def make_manager(config, num_blocks, max_requests=4, **options):
    sizes = dict(max_context=96, block_tokens=16, max_query_tokens=3, dtype=jnp.float32)
    return KVCacheManager(config, num_blocks=num_blocks, max_requests=max_requests, **sizes | options)


def serve(model, manager, **options):
    """Returns the answers to all prompts and of a copy of the first one, and the engine."""
    engine = Engine(model, manager, token_budget=24, batch_invariant=True, **options)
    requests = [
        engine.add(prompt, max_new_tokens=TOKENS, priority=len(PROMPTS) - n) for n, prompt in enumerate(PROMPTS)
    ]
    while len(requests[0].generated) < 2:
        engine.step()
    requests += engine.fork(requests[0], [1])
    while engine.busy:
        engine.step()
    return [request.generated for request in requests], engine


@functools.cache
def answers_of_one_device(name):
    """Without drafts, prefixes and preemption: none of them changes a token."""
    model = model_of(name)
    answers, engine = serve(model, make_manager(model.config, num_blocks=32))
    assert not engine.metrics.preemptions
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "context_parallel", "expert_parallel"),
    [
        ("pro with MTP", dict(model=8), True, False),
        ("pro with MTP", dict(data=8), False, False),
        ("v41 with DSpark", dict(model=8), True, False),
        ("v41 with DSpark", dict(data=2, model=4), True, True),
    ],
    ids=str,
)
def test_answers_are_those_of_one_device(name, sizes, context_parallel, expert_parallel):
    """With drafts and prefixes, and fewer blocks than requests need: some leave for host memory and come back."""
    model = model_of(name)
    mesh = make_mesh(sizes)
    shards = sizes.get("data", 1)
    manager = make_manager(
        model.config,
        num_blocks=8 * shards,
        max_requests=4 * shards,
        mesh=mesh,
        context_parallel=context_parallel,
    )
    placed = jax.device_put(model, shardings(model, mesh, expert_parallel=expert_parallel))
    prefix = PrefixCache(manager, key="")
    answers, engine = serve(placed, manager, prefix=prefix, drafter="model")
    assert answers == answers_of_one_device(name)
    metrics = engine.metrics
    assert metrics.compilations == 1 and (metrics.prefix.hit_tokens or shards > 1)
    assert metrics.preemptions or shards > 1
    assert metrics.drafted_tokens > metrics.accepted_tokens
    assert manager.free_blocks + prefix.metrics.blocks == manager.schema.num_blocks
