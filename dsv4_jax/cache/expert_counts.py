"""Counts how often steps use each expert. `expert_pages` uses the counts to choose the experts that lie on the GPU."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def counts_experts(cache: Any) -> bool:
    """Returns whether steps of a cache count experts, see `KVCache.with_expert_counts`."""
    return getattr(cache, "expert_counts", None) is not None


@jax.named_scope("router")
def count_experts(cache: Any, experts: Int[Array, "L T k"], layers: tuple[int, ...]) -> Any:
    """Returns the cache with a step's experts added to `expert_counts`, see `KVCache`.

    Args:
      cache: the cache; it must have `expert_counts`.
      experts: [L, T, k] int32 experts of each token; -1 = padding, which is not counted.
      layers: indices of the L layers on axis 0 of `experts`, in any order.
    """
    counts = cache.expert_counts
    experts = jnp.where(experts >= 0, experts, counts.shape[-1])
    rows = jnp.array(layers, jnp.int32)[:, None, None]
    tokens = jnp.zeros_like(counts[0]).at[rows, experts].add(1, mode="drop")
    return dataclasses.replace(cache, expert_counts=counts + jnp.stack([tokens, (tokens > 0).astype(jnp.int32)]))
