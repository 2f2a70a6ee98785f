"""The lightning indexer's scores of every visible entry."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import run
from dsv4_jax.ops.views import IndexerView, valid_lengths


# Query tokens scored at a time: bounds the gathered keys to this many copies of a request's keys.
QUERY_BLOCK = 16


def indexer_scores(
    view: IndexerView,
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> Float[Array, "T E"]:
    """`score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])` over the entries visible to token t (dsv4.md 4).

    Args:
      view: the layer's indexer keys.
      q: [T, H, D] queries after RoPE, model dtype; rotated and rounded here as the keys were.
      weights: [T, H] float32 head weights, both scale factors included.
      slots: [T] request slots; -1 = padding.
      positions: [T] absolute positions; -1 = padding.
      implementation: None (best available) or "xla".

    Returns:
      [T, E] float32, E = max_blocks * entries a block; -inf where the entry is not visible: `s >= (position + 1) //
      rate`, padding, or no block.
    """
    return run("indexer_scores", {"xla": _indexer_scores_xla}, implementation, view, q, weights, slots, positions)


def _indexer_scores_xla(view, q, weights, slots, positions):
    q = view.kv_format.round_index_query(q).astype(jnp.float32)
    entries = jnp.arange(view.max_entries, dtype=jnp.int32)

    def score(token):
        q, weights, slot, position = token
        rows, valid = view.read(jnp.full_like(entries, slot), entries)
        keys = jnp.where(valid[:, None], view.kv_format.decode_index(rows), 0.0)
        dots = jax.nn.relu(jnp.einsum("hd,ed->he", q, keys, precision="highest"))
        total = jnp.einsum("h,he->e", weights, dots, precision="highest")
        return jnp.where(valid & (entries < valid_lengths(position, view.compress_rate)), total, -jnp.inf)

    return jax.lax.map(score, (q, weights, slots, positions), batch_size=min(QUERY_BLOCK, q.shape[0]))
