"""Counts of the experts that steps read, by which `expert_pages` decides which of them lie on the GPU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def counts_experts(cache: Any) -> bool:
    """Whether steps of a cache count experts, see `KVCache.with_expert_counts`."""
    return getattr(cache, "expert_counts", None) is not None


@jax.named_scope("router")
def count_experts(cache: Any, selected: Mapping[int, Int[Array, "T k"]] | None) -> Any:
    """Returns the cache with a step's experts added to its counts; padding tokens do not count.

    Args:
      cache: the cache.
      selected: {layer: [T, k] int32 experts of each token, -1 for padding}; None = nothing is counted.
    """
    if selected is None:
        return cache
    counts, experts = cache.expert_counts, jnp.stack(list(selected.values()))
    experts = jnp.where(experts >= 0, experts, counts.shape[-1])
    layers = jnp.array(list(selected), jnp.int32)[:, None, None]
    tokens = jnp.zeros_like(counts[0]).at[layers, experts].add(1, mode="drop")
    return dataclasses.replace(cache, expert_counts=counts + jnp.stack([tokens, (tokens > 0).astype(jnp.int32)]))
