"""Top-k selection and attention with the entries of a request sharded over the mesh axis "model": context parallelism.

The functions run under `jax.shard_map`. A device's block table has -1 for the blocks of other devices, so a device
reads only the entries in its own blocks.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.all_reduce import model_index
from dsv4_jax.ops.indexer_topk import indexer_topk
from dsv4_jax.quant import round_to


def topk_of_shards(scores: Float[Array, "T E"], lengths: Int[Array, "T"], k: int) -> Int[Array, "T k"]:
    """Selects the k entries with the highest scores among all devices' entries, as `indexer_topk` does on one device.

    Each device selects its own k best entries. Then each device gathers the selected entries of all devices, and
    selects the k best of these.

    Args:
      scores: [T, E] float32 scores of all entries; -inf for entries that lie on other devices.
      lengths: [T] int32 number of entries that count in each row.
      k: number of entries to select.

    Returns:
      [T, k] int32 indices in ascending order, then -1; the same on all devices.
    """
    own_best = indexer_topk(scores, lengths, k)
    own_scores = jnp.take_along_axis(scores, jnp.maximum(own_best, 0), axis=1)
    # The gathered entries are sorted by their index, because `indexer_topk` prefers the first of equal scores. Missing
    # entries come last.
    missing = jnp.iinfo(jnp.int32).max
    pairs = jnp.where(own_best >= 0, own_best, missing), jnp.where(own_best >= 0, own_scores, -jnp.inf)
    entries, entry_scores = (jax.lax.all_gather(x, MODEL_AXIS, axis=1, tiled=True) for x in pairs)
    entries, entry_scores = jax.lax.sort((entries, entry_scores), dimension=1, num_keys=1)
    places = indexer_topk(entry_scores, jnp.full_like(lengths, entry_scores.shape[1]), k)
    return jnp.where(places >= 0, jnp.take_along_axis(entries, jnp.maximum(places, 0), axis=1), -1)


def attend_to_shards(
    attend: Callable[[Float[Array, "T A D"], Bool[Array, ""]], tuple[Array, Array, Array]],
    q: Float[Array, "T H D"],
    sinks: Float[Array, "H"],
) -> Float[Array, "T H D"]:
    """Computes attention of this device's heads over the entries of all devices.

    Each device attends with all heads to its own entries, the first device also to the window. Then each device gets
    the partial results of its own heads from all devices, combines them and adds the sink.

    Args:
      attend: function of the queries [T, A, D] of all A heads, and of a bool scalar that says whether to attend to the
        window. It returns (sums, largest, totals) in float32. `sums` [T, A, D] is the sum of the rows with weights
        `exp(score - largest)`. `largest` [T, A] is the largest score, and finite even if there are no rows. `totals`
        [T, A] is the sum of the weights.
      q: [T, H, D] queries of this device's heads.
      sinks: [H] float32 sink logits of this device's heads.

    Returns:
      [T, H, D] output of this device's heads in q's dtype.
    """
    tokens, heads, _ = q.shape
    all_heads = jax.lax.all_gather(q, MODEL_AXIS, axis=1, tiled=True)

    def to_owners(x):
        """Sends results [T, A, ...] to the heads' devices. Returns [devices, T, H, ...] for this device's H heads."""
        x = x.reshape(tokens, -1, heads, *x.shape[2:])
        return jax.lax.all_to_all(x, MODEL_AXIS, split_axis=1, concat_axis=0)

    sums, largest, totals = map(to_owners, attend(all_heads, jnp.asarray(model_index() == 0)))
    sink = sinks[None, :]
    largest_of_all = jnp.maximum(jnp.max(largest, axis=0), sink)
    factor = jnp.exp(largest - largest_of_all[None])
    total = jnp.sum(totals * factor, axis=0) + jnp.exp(sink - largest_of_all)
    return round_to(jnp.sum(sums * factor[..., None], axis=0) / total[..., None], q.dtype)
