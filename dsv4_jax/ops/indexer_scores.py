"""The op that computes the lightning indexer's scores, by which a token selects the compressed entries to attend to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.candidates import candidate_entries
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import IndexerView, int_range, valid_lengths
from dsv4_jax.quant import e8m0_value
from pallas_kernels.formats.layouts import quantized
from pallas_kernels.indexer_scores import IndexerKeys, indexer_scores as score_keys
from pallas_kernels.indexer_scores.key_tiles import CANDIDATE_KEYS, TOP, operand_dtype, permute_dims
from pallas_kernels.indexer_scores.round_index_query import round_index_query
from pallas_kernels.runtime.checks import check_rules


# XLA scores this number of tokens at a time. This bounds memory, because each token gathers a copy of all its keys.
QUERY_BLOCK = 16


def scores_kernel(view, q, weights, slots, positions, *, inv_freq=None, candidates=None, block_size=8, **options):
    """Computes `indexer_scores` with kernels. `options` are those of `pallas_kernels.indexer_scores`."""
    if candidates is not None:
        check_rules({f"blocks of {CANDIDATE_KEYS} candidates, got {block_size}": block_size == CANDIDATE_KEYS})
    q, weights = round_index_query(
        q, weights, positions, inv_freq, quantized(view.codec.layout), interpret=options["interpret"]
    )
    return score_rounded_kernel(view, q, weights, slots, positions, candidates, **options)


@with_kernel(scores_kernel)
def indexer_scores(
    view: IndexerView,
    q: Float[Array, "T H D"],
    weights: Float[Array, "T H"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    inv_freq: Float[Array, "P"] | None = None,
    candidates: Int[Array, "T count"] | None = None,
    block_size: int = 8,
    implementation: str | None = None,
) -> Float[Array, "T E"]:
    """Computes `score[t, s] = sum_h weights[t, h] * relu(q[t, h] . key[s])` of each entry s that token t sees.

    docs/dsv4.md, section 4, describes the lightning indexer.

    Args:
      view: the layer's indexer keys.
      q: [T, H, D] queries in the model's dtype. The op rotates them and rounds them to the keys' format.
      weights: [T, H] float32 weights of the heads, which include the factors D ** -0.5 and H ** -0.5.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.
      inv_freq: [P] float32, radians per token, by which RoPE rotates the last 2 * P channels of q (docs/dsv4.md 2.2);
        None = q is rotated already.
      candidates: [T, count] int32 indices of the blocks whose entries are scored, from `candidate_blocks`. None = all
        entries of each token's request are scored.
      block_size: number of entries in a candidate block.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take 32 or 64 heads of 128 dims in
        bfloat16, and keys in the formats "v4", "v41" and "per_entry". With candidates, they do not take "v4";
        `block_size` must be 8, and `count` an even number.

    Returns:
      [T, E] float32 scores, with E = max_blocks * entries per block, or count * block_size if there are candidates. In
      row t, the first `valid_lengths(positions[t])` values are scores; with candidates, the first `candidate_lengths`
      values. An entry without a block in the block table has the score -inf. All other values are unspecified: "xla"
      writes -inf, and a kernel leaves the memory as it is.
    """
    entries = None if candidates is None else candidate_entries(candidates, block_size)
    q = view.codec.round_query(_rotate_query(q, positions, inv_freq))
    return score_rounded_xla(view, q, weights, slots, positions, entries)


def _rotate_query(q, positions, inv_freq):
    return q if inv_freq is None else apply_rope(q, jnp.maximum(positions, 0), inv_freq, deterministic=True)


def round_index_query_operands(codec, q, weights, positions, inv_freq):
    """Computes the results of `pallas_kernels.indexer_scores.round_index_query` with XLA."""
    q = _rotate_query(q, positions, inv_freq)
    if operand_dtype(codec.layout) == jnp.bfloat16:
        return permute_dims(codec.round_query(q), jnp.bfloat16), weights
    rows = codec.encode(q)
    # Decodes the values in units of 2**-TOP times the head's largest scale, and truncates them to multiples of 2**-9,
    # the smallest positive value of float8_e4m3fn.
    largest = jnp.max(rows.scale, axis=-1, keepdims=True)
    scale = 127 + TOP - jnp.minimum(largest - rows.scale, 30)
    values = jnp.trunc(codec.decode(dataclasses.replace(rows, scale=scale)) * 2.0**9) * 2.0**-9
    values = permute_dims(values.astype(jnp.float8_e4m3fn), jnp.float8_e4m3fn)
    return values, weights * e8m0_value(largest[..., 0])


def score_rounded_xla(view, q, weights, slots, positions, entries=None):
    """Computes `indexer_scores` with XLA, from queries that are already rotated and rounded.

    `entries` is [T, n] int32, indices of the entries to score for each token, -1 = none; None = all entries.
    """
    q = q.astype(jnp.float32)

    def score(token):
        """Returns the scores [E] of one token; -inf for entries that it does not see."""
        q, weights, slot, position, entries = token
        if entries is None:
            entries = int_range(view.max_entries)
        rows, valid = view.read(jnp.full_like(entries, slot), entries)
        keys = jnp.where(valid[:, None], view.codec.decode(rows), 0.0)
        dots = jax.nn.relu(jnp.einsum("hd,ed->he", q, keys, precision="highest"))
        total = jnp.einsum("h,he->e", weights, dots, precision="highest")
        return jnp.where(valid & (entries < valid_lengths(position, view.compress_rate)), total, -jnp.inf)

    return jax.lax.map(score, (q, weights, slots, positions, entries), batch_size=min(QUERY_BLOCK, q.shape[0]))


def score_rounded_kernel(view, q, weights, slots, positions, candidates=None, **options):
    """Computes `indexer_scores` with the kernel, from queries and weights that `round_index_query` returned."""
    keys = IndexerKeys(
        jnp.asarray(view.layer, jnp.int32),
        view.block_table,
        view.rows.codes,
        view.rows.scale,
        view.compress_rate,
        quantized(view.codec.layout),
    )
    return score_keys(q, weights, slots, positions, keys, candidates, **options)
