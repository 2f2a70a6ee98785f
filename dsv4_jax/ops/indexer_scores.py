"""The lightning indexer's scores of all visible entries."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.rope import apply_rope_deterministic
from dsv4_jax.ops.views import IndexerView, valid_lengths
from dsv4_jax.quant import e8m0_value
from pallas_kernels.formats.layouts import quantized
from pallas_kernels.indexer_scores import IndexerKeys, indexer_scores as score_keys
from pallas_kernels.indexer_scores.key_tiles import TOP, permute_dims
from pallas_kernels.indexer_scores.round_index_query import round_index_query


# Tokens that XLA scores at a time; each gathers a copy of its request's keys.
QUERY_BLOCK = 16


def scores_kernel(view, q, weights, slots, positions, inv_freq, *, interpret, config=None):
    """`indexer_scores` by the kernels; `config` is the one of `pallas_kernels.indexer_scores`."""
    q, weights = round_index_query(q, weights, positions, inv_freq, quantized(view.layout), interpret=interpret)
    return score_rounded_kernel(view, q, weights, slots, positions, config=config, interpret=interpret)


@with_kernel(scores_kernel)
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
    """Computes `score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])` over visible entries (dsv4.md 4).

    Args:
      view: the layer's indexer keys.
      q: [T, H, D] queries in the model's dtype, which are rotated and rounded here as the keys were.
      weights: [T, H] float32 head weights, both scale factors included.
      slots, positions: [T] request slots and absolute positions; -1 = padding.
      inv_freq: [P] radians per token, by which the last 2 * P channels of q are rotated (dsv4.md 2.2), or None.
      implementation: None, "xla", "mosaic_gpu" or "interpret" (64 heads of 128 dims, bfloat16, "v4" or "per_entry").

    Returns:
      [T, E] float32 scores, E = max_blocks * entries per block. Row t has `valid_lengths(positions[t])` scores, -inf
      for an entry without a block. Other values are unspecified: "xla" writes -inf there, a kernel writes nothing.
    """
    q = round_index_query_xla(view.codec, q, positions, inv_freq)
    return score_rounded_xla(view, q, weights, slots, positions)


def round_index_query_xla(codec, q, positions, inv_freq):
    """Rotates queries by RoPE and rounds them as `codec` rounds keys."""
    if inv_freq is not None:
        q = apply_rope_deterministic(q, jnp.maximum(positions, 0), inv_freq)
    return codec.round_query(q)


def round_index_query_operands(codec, q, weights, positions, inv_freq):
    """Computes the results of `pallas_kernels.round_index_query` with XLA."""
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
    """Computes `indexer_scores` of rotated and rounded queries with XLA."""
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
    """Computes `indexer_scores` of queries and weights from `pallas_kernels.round_index_query` with the kernel."""
    keys = IndexerKeys(
        jnp.asarray(view.layer, jnp.int32),
        view.block_table,
        view.rows.codes,
        view.rows.scale,
        view.compress_rate,
        quantized(view.layout),
    )
    return score_keys(q, weights, slots, positions, keys, config=config, interpret=interpret)
