"""One step of training, and the bits per byte of held-out text: plain functions of arrays, jitted."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import kjv
import numpy as np
import optax
from dense_cache import DenseCache, whole_sequences
from draft_training import draft_losses
from jaxtyping import Array, Float, Int
from needles import training_row
from tiny_model import Tensors, as_stored, assemble, balanced, first_weights, for_training

from dsv4_jax.config import DSV4Config


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run; with the text, they determine the result.

    Attributes:
      config: the model.
      rows, length: number of sequences in a step, and of bytes in each.
      learning_rate: peak learning rate. The rate rises to the peak over the first twentieth of the steps, then falls as
        a cosine to a fiftieth of it.
      weight_decay: weight decay of matrices in AdamW.
      dropout: share of each block's output that is dropped.
      select_from: share of the steps after which CSA attends to the indexer's selection; until then to all entries.
      quantize_from: share of the steps after which weights and cache are rounded as in the saved model.
      needles: share of rows with hidden key-value pairs.
      questions, nearest: number of questions in such a row, and the minimum distance in bytes to the fact.
      needle_weight: weight in the loss of a digit that is asked for.
      kv_format: format of the cache's rows.
      dtype: dtype of activations, and of the copies of weights with which they are multiplied. The trained weights are
        float32.
      balance_rate: change of a router's balancing bias in a step.
      seed: seed of the initial weights, the order of the data and dropout.
    """

    config: DSV4Config
    rows: int = 16
    length: int = 4096
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    select_from: float = 0.15
    quantize_from: float = 0.6
    needles: float = 0.0
    questions: int = 24
    nearest: int = 16
    needle_weight: float = 10.0
    kv_format: str = "v4"
    dtype: str = "bfloat16"
    balance_rate: float = 1e-3
    seed: int = 0


def first_state(recipe: Recipe, start: tuple[Tensors, Tensors] | None = None) -> dict[str, Any]:
    """Returns the training state at step 0, from random weights or from (trained, fixed) in `start`."""
    trained, fixed = first_weights(recipe.config, recipe.seed) if start is None else start
    return {"trained": trained, "fixed": fixed, "optimizer": _optimizer(recipe).init(trained), "step": jnp.int32(0)}


def batch(recipe: Recipe, text: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the step's ids and their weights in the loss, int32 and float32 [rows, length + 1].

    Every row is BOS and an excerpt from a random place. A share `recipe.needles` of the rows, the first ones, has
    key-value pairs and questions, see `training_row`.
    """
    rng = np.random.default_rng([recipe.seed, step])
    ids = np.full((recipe.rows, recipe.length + 1), kjv.BOS, np.int32)
    weights = np.ones(ids.shape, np.float32)
    for row, start in enumerate(rng.integers(0, len(text) - recipe.length, recipe.rows)):
        if row < recipe.needles * recipe.rows:
            excerpt = np.take(text, np.arange(start, start + recipe.length + 1), mode="wrap")
            needles = recipe.questions, recipe.nearest, recipe.needle_weight
            ids[row], weights[row] = training_row(rng, excerpt, recipe.length + 1, *needles)
        else:
            ids[row, 1:] = text[start : start + recipe.length]
    return ids, weights


@functools.partial(jax.jit, static_argnames="recipe", donate_argnames="state")
def train_step(
    recipe: Recipe,
    state: dict[str, Any],
    progress: Float[Array, ""],
    ids: Int[Array, "B S1"],
    weights: Float[Array, "B S1"],
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Runs one step of AdamW.

    Args:
      recipe: the hyperparameters (static).
      state: from `first_state` or the last step; donated.
      progress: share of the steps that are done, float32.
      ids, weights: from `batch`.

    Returns:
      (new state, metrics). The metrics are scalars: "bits" per byte, "index_loss" in nats, the norm of the "gradient",
      and "load", the largest load of an expert divided by the mean load. With a multi-token-prediction block, there is
      also "accepted" from `draft_losses`.
    """
    cache = dataclasses.replace(
        DenseCache.make(
            recipe.config, ids.shape[0], ids.shape[1] - 1, kv_format=recipe.kv_format, dtype=jnp.dtype(recipe.dtype)
        ),
        select=progress >= recipe.select_from,
        quantize=progress >= recipe.quantize_from,
        key=jax.random.fold_in(jax.random.key(recipe.seed), state["step"]) if recipe.dropout else None,
        dropout=recipe.dropout,
        token_weights=weights[:, 1:].reshape(-1),
    )

    def loss(trained):
        losses, after, metrics = _losses(recipe, trained, state["fixed"], ids, cache)
        mean = jnp.sum(losses * weights[:, 1:]) / jnp.sum(weights[:, 1:])
        return mean + after.index_loss, (mean, after, metrics)

    gradient, (mean, after, metrics) = jax.grad(loss, has_aux=True)(state["trained"])
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, optimizer = _optimizer(recipe).update(gradient, state["optimizer"], state["trained"])
    rate = recipe.learning_rate * jnp.minimum(20 * progress + 1e-2, 0.51 + 0.49 * jnp.cos(np.float32(np.pi) * progress))
    new = {
        "trained": jax.tree.map(lambda value, update: value - rate * update, state["trained"], updates),
        "fixed": balanced(recipe.config, state["fixed"], after.expert_load, recipe.balance_rate),
        "optimizer": optimizer,
        "step": state["step"] + 1,
    }
    metrics |= {
        "bits": mean / np.float32(np.log(2)),
        "index_loss": after.index_loss,
        "gradient": jnp.sqrt(sum((jnp.sum(g * g) for g in gradient.values()), start=jnp.float32(0))),
        "load": jnp.max(after.expert_load) * recipe.config.n_routed_experts,
    }
    return new, metrics


def evaluate(recipe: Recipe, trained: Tensors, fixed: Tensors, text: np.ndarray) -> np.ndarray:
    """Returns the bits of every byte of consecutive excerpts, with weights and cache rounded as in the saved model.

    Returns:
      [excerpts, length] float32; an incomplete excerpt at the end of the text is left out.
    """
    rows = len(text) // recipe.length
    ids = np.full((rows, recipe.length + 1), kjv.BOS, np.int32)
    ids[:, 1:] = text[: rows * recipe.length].reshape(rows, -1)
    bits = []
    for at in range(0, rows, recipe.rows):
        part = ids[at : at + recipe.rows]
        padded = np.pad(part, ((0, recipe.rows - len(part)), (0, 0)))
        bits.append(np.asarray(_score(recipe, trained, fixed, padded))[: len(part)])
    return np.concatenate(bits) / np.float32(np.log(2))


def evaluate_needles(recipe: Recipe, trained: Tensors, fixed: Tensors, text: np.ndarray) -> float:
    """Returns the mean bits of the digits that are asked for, in a fixed batch of rows. Guesses would take 3.3 bits."""
    ids, weights = batch(dataclasses.replace(recipe, needles=1.0), text, step=2**31)
    bits = np.asarray(_score(recipe, trained, fixed, ids)) / np.float32(np.log(2))
    return float(bits[weights[:, 1:] == recipe.needle_weight].mean())


@functools.partial(jax.jit, static_argnames="recipe")
def _score(recipe, trained, fixed, ids):
    cache = DenseCache.make(
        recipe.config, ids.shape[0], ids.shape[1] - 1, kv_format=recipe.kv_format, dtype=jnp.dtype(recipe.dtype)
    )
    cache = dataclasses.replace(cache, quantize=jnp.bool_(True))
    return _losses(recipe, trained, fixed, ids, cache)[0]


def _losses(recipe, trained, fixed, ids, cache):
    """Returns the losses [B, S] in nats, the cache with its losses and loads, and further metrics.

    The losses are the negative log-likelihoods of ids[:, 1:], or `draft_losses` of a multi-token-prediction block.
    """
    tensors = as_stored(recipe.config, trained | fixed)
    tensors = {path: jnp.where(cache.quantize, tensors[path], value) for path, value in trained.items()}
    model = for_training(assemble(recipe.config, tensors | fixed, recipe.dtype))
    if recipe.config.num_nextn_predict_layers:
        return draft_losses(model, cache, ids)
    hidden, cache = model(cache, whole_sequences(ids[:, :-1]))
    assert isinstance(cache, DenseCache)
    logits = model.logits(hidden).reshape(*ids[:, 1:].shape, -1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]), cache, {}


def _optimizer(recipe):
    """Returns AdamW without its learning rate, which the step applies. The moments of all tensors are one vector."""
    return optax.chain(
        optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95))),
        optax.add_decayed_weights(recipe.weight_decay, lambda tensors: jax.tree.map(lambda x: x.ndim > 1, tensors)),
    )
