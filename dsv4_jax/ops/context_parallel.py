"""Selection and attention where the devices of the "model" axis hold the entries of a request between them.

Each device finds entries in its own blocks only: its block table has -1 for those of the others.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.all_reduce import model_index
from dsv4_jax.ops.indexer_topk import indexer_topk
from dsv4_jax.quant import round_to


def select_of_parts(scores: Float[Array, "T E"], lengths: Int[Array, "T"], k: int) -> Int[Array, "T k"]:
    """`indexer_topk` of the scores that all devices have between them: the same entries as on one device.

    Each device offers its best k, all of which anybody needs, and all choose from what is offered.

    Args:
      scores: [T, E] float32, -inf for entries of other devices.
      lengths: [T] int32, as in `indexer_topk`.
      k: entries to select.
    """
    mine = indexer_topk(scores, lengths, k)
    offered = jnp.take_along_axis(scores, jnp.maximum(mine, 0), axis=1)
    # In their order: of equal scores the lower entry is taken. What is no entry comes last.
    last = jnp.iinfo(jnp.int32).max
    pairs = jnp.where(mine >= 0, mine, last), jnp.where(mine >= 0, offered, -jnp.inf)
    entries, offered = (jax.lax.all_gather(x, MODEL_AXIS, axis=1, tiled=True) for x in pairs)
    entries, offered = jax.lax.sort((entries, offered), dimension=1, num_keys=1)
    best = indexer_topk(offered, jnp.full_like(lengths, offered.shape[1]), k)
    return jnp.where(best >= 0, jnp.take_along_axis(entries, jnp.maximum(best, 0), axis=1), -1)


def every_entry(rows: Float[Array, "E D"]) -> Float[Array, "E D"]:
    """Dequantised entries of all devices, from those that this one has and zeros."""
    return jax.lax.psum(rows, MODEL_AXIS)


def attend_to_parts(
    attend: Callable[[Float[Array, "T A D"], Bool[Array, ""]], tuple[Array, Array, Array]],
    q: Float[Array, "T H D"],
    sinks: Float[Array, "H"],
) -> Float[Array, "T H D"]:
    """Attention of this device's heads over the entries of all devices.

    Each device attends with the heads of all of them to its own entries, the first also to the window. The parts go to
    the devices whose heads they are of, and are added up there with the weight of their sums, and the sink once.

    Args:
      attend: of all devices' heads, and whether the window counts, returns float32 sums [T, A, D] of weights times
        values; the largest scores [T, A], of which weights are `exp(score - largest)`, and finite where there is no
        row; sums [T, A] of weights.
      q, sinks: of this device's heads.
    """
    tokens, heads, _ = q.shape
    every = jax.lax.all_gather(q, MODEL_AXIS, axis=1, tiled=True)
    part = attend(every, jnp.asarray(model_index() == 0))

    def to_owners(x):
        """[devices, T, H, ...]: what each has for this device's heads."""
        x = x.reshape(tokens, -1, heads, *x.shape[2:])
        return jax.lax.all_to_all(x, MODEL_AXIS, split_axis=1, concat_axis=0)

    sums, tops, totals = map(to_owners, part)
    sink = sinks[None, :]
    top = jnp.maximum(jnp.max(tops, axis=0), sink)
    share = jnp.exp(tops - top[None])
    total = jnp.sum(totals * share, axis=0) + jnp.exp(sink - top)
    return round_to(jnp.sum(sums * share[..., None], axis=0) / total[..., None], q.dtype)
