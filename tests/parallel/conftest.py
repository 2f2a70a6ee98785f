"""One small model that eight devices can cut, and what one device makes of it."""

import dataclasses

import jax.numpy as jnp
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.paths import TINY
from tests.v41 import v41_config


PROMPTS = [5, 17, 42], list(range(40)), [7]


@pytest.fixture(scope="package")
def model(request):
    """One layer of each kind, eight heads in eight groups, random weights in float32; "v41" names V4.1's kinds."""
    if getattr(request, "param", "v4") == "v41":
        return DeepseekV4ForCausalLM(v41_config(), jnp.float32)
    config = dataclasses.replace(DSV4Config.from_hf(TINY).first_layers(3), num_attention_heads=8, o_groups=8)
    return DeepseekV4ForCausalLM(config, jnp.float32)


def run_engine(model, config, mesh=None, **options):
    """Runs all prompts in an engine of one program; (the tokens each got, the cache, programs)."""
    sizes = dict(num_blocks=12, max_requests=4, max_context=96, block_tokens=16, dtype=jnp.float32) | options
    engine = Engine(model, KVCacheManager(config, mesh=mesh, **sizes), token_budget=24, batch_invariant=True)
    requests = [engine.add(prompt, max_new_tokens=8) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    return [request.generated for request in requests], engine.cache, engine.metrics.compilations


@pytest.fixture(scope="package")
def alone(model):
    return run_engine(model, model.config)
