"""What the tests of both kinds of draft layers against official data have in common."""

import jax.numpy as jnp
import pytest

from dsv4_jax.host import KVCacheManager


T = 53  # tokens of a row


def plans(sizes, drafts):
    """Ways to read a row in chunks. Chunks longer than a step of drafts need a second program, and are slow."""
    found = {f"chunks of {n}": [n] * (T // n) + [T % n] * (T % n > 0) for n in sizes}
    found |= {"all": [T], "prefill 21, decode": [21] + [1] * 32}
    slow = {name: [pytest.mark.slow] * (max(plan) > 1 + drafts) for name, plan in found.items()}
    return [pytest.param(plan, id=name, marks=slow[name]) for name, plan in found.items()]


def manager_of(model, drafts, requests=3, kv_format="plain"):
    sizes = dict(num_blocks=8 * requests, max_requests=requests, max_context=64, block_tokens=16)
    return KVCacheManager(model.config, kv_format=kv_format, dtype=jnp.float32, max_query_tokens=1 + drafts, **sizes)
