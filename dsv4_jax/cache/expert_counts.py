"""Counts of the experts that steps read, by which `expert_pages` decides which of them lie on the GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def counts_experts(cache: Any) -> bool:
    """Whether steps of a cache count experts, see `KVCache.with_expert_counts`."""
    return getattr(cache, "expert_counts", None) is not None


@jax.named_scope("router")
def count_experts(cache: Any, experts: Int[Array, "L T k"], layers: tuple[int, ...]) -> Any:
    """Returns the cache with a step's experts added to its counts; padding tokens do not count.

    Args:
      cache: the cache.
      experts: [layers, T, k] int32 experts of each token, -1 for padding.
      layers: number of each layer of `experts`, in any order.
    """
    counts = cache.expert_counts
    experts = jnp.where(experts >= 0, experts, counts.shape[-1])
    rows = jnp.array(layers, jnp.int32)[:, None, None]
    tokens = jnp.zeros_like(counts[0]).at[rows, experts].add(1, mode="drop")
    return dataclasses.replace(cache, expert_counts=counts + jnp.stack([tokens, (tokens > 0).astype(jnp.int32)]))
