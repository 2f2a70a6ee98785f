"""The lightning indexer's scores of every visible entry."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.rope import apply_rope_deterministic
from dsv4_jax.ops.views import IndexerView, valid_lengths
from dsv4_jax.quant import e8m0_value
from pallas_kernels.formats.layouts import quantised
from pallas_kernels.indexer_scores import indexer_scores as scores_kernel
from pallas_kernels.indexer_scores.key_tiles import TOP, permute_dims
from pallas_kernels.indexer_scores.operands import IndexerKeys
from pallas_kernels.indexer_scores.round_index_query import round_index_query


# Query tokens scored at a time: bounds the gathered keys to this many copies of a request's keys.
QUERY_BLOCK = 16


def indexer_scores(
    view: IndexerView,
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    inv_freq: Float[Array, "P"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T E"]:
    """`score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])` over the entries visible to token t (dsv4.md 4).

    Args:
      view: the layer's indexer keys.
      q: [T, H, D] queries, model dtype; rotated and rounded here as the keys were.
      weights: [T, H] float32 head weights, both scale factors included.
      slots: [T] request slots; -1 = padding.
      positions: [T] absolute positions; -1 = padding.
      inv_freq: [P] radians per token, with which the last 2 * P channels of q are rotated at the token's position
        (dsv4.md 2.2), as keys are; None: q comes after RoPE.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (64 heads of 128 dims, bfloat16, in
        formats "v4" and "per_entry").

    Returns:
      [T, E] float32, E = max_blocks * entries a block. Row t holds `valid_lengths(positions[t])` scores, -inf where the
      entry has no block. What stands behind them, and in rows of padding, is unspecified: a kernel computes and writes
      nothing there, "xla" writes -inf.
    """
    args = view, q, weights, slots, positions, inv_freq
    return dispatch("indexer_scores", implementation, *args, xla=_scores_xla, kernel=_scores_kernel)


def _scores_xla(view, q, weights, slots, positions, inv_freq):
    q = round_index_query_xla(view.codec, q, positions, inv_freq)
    return score_rounded_xla(view, q, weights, slots, positions)


def _scores_kernel(view, q, weights, slots, positions, inv_freq, *, interpret):
    q, weights = round_index_query(q, weights, positions, inv_freq, quantised(view.layout), interpret=interpret)
    return score_rounded_kernel(view, q, weights, slots, positions, interpret=interpret)


def round_index_query_xla(codec, q, positions, inv_freq):
    """Queries rotated and rounded as `codec` does keys, dims in their order; `inv_freq` as in `indexer_scores`."""
    if inv_freq is not None:
        q = apply_rope_deterministic(q, jnp.maximum(positions, 0), inv_freq)
    return codec.round_query(q)


def round_index_query_operands(codec, q, weights, positions, inv_freq):
    """What `pallas_kernels.indexer_scores.round_index_query` returns, by XLA."""
    if codec.layout.scale != "e8m0":
        return permute_dims(round_index_query_xla(codec, q, positions, inv_freq), jnp.bfloat16), weights
    if inv_freq is not None:
        q = apply_rope_deterministic(q, jnp.maximum(positions, 0), inv_freq)
    rows = codec.encode(q)
    largest = jnp.max(rows.scale, axis=-1, keepdims=True)
    scale = 127 + TOP - jnp.minimum(largest - rows.scale, 30)
    values = jnp.trunc(codec.decode(dataclasses.replace(rows, scale=scale)) * 2.0**9) * 2.0**-9
    values = permute_dims(values.astype(jnp.float8_e4m3fn), jnp.float8_e4m3fn)
    return values, weights * e8m0_value(largest[..., 0])


def score_rounded_xla(view, q, weights, slots, positions):
    """`indexer_scores` of queries that were rotated and rounded already."""
    q = q.astype(jnp.float32)
    entries = jnp.arange(view.max_entries, dtype=jnp.int32)

    def score(token):
        q, weights, slot, position = token
        rows, valid = view.read(jnp.full_like(entries, slot), entries)
        keys = jnp.where(valid[:, None], view.codec.decode(rows), 0.0)
        dots = jax.nn.relu(jnp.einsum("hd,ed->he", q, keys, precision="highest"))
        total = jnp.einsum("h,he->e", weights, dots, precision="highest")
        return jnp.where(valid & (entries < valid_lengths(position, view.compress_rate)), total, -jnp.inf)

    return jax.lax.map(score, (q, weights, slots, positions), batch_size=min(QUERY_BLOCK, q.shape[0]))


def score_rounded_kernel(view, q, weights, slots, positions, *, config=None, interpret=False):
    """`indexer_scores` of queries and weights as `pallas_kernels.indexer_scores.round_index_query` leaves them."""
    keys = IndexerKeys(
        jnp.asarray(view.layer, jnp.int32),
        view.block_table,
        view.rows.codes,
        view.rows.scale,
        view.compress_rate,
        quantised(view.layout),
    )
    return scores_kernel(q, weights, slots, positions, keys, config=config, interpret=interpret)
