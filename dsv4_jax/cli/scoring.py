"""Computes the likelihoods of token ids for `dsv4-jax score`. Importing this module imports JAX."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tokenizers import Tokenizer

from dsv4_jax.cache import Batch
from dsv4_jax.decode import CompiledModel, Model
from dsv4_jax.decode.drafts import draft, one_token_batch
from dsv4_jax.decode.sampling import GREEDY, log_probabilities
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.sharded_step import sharded_step


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("keep_logits", "layers", "drafts", "per_row"))
@sharded_step
def score_step(
    compiled: CompiledModel,
    cache: Any,
    batch: Batch,
    next_tokens: Int[Array, "T"],
    *,
    keep_logits: bool,
    layers: bool,
    drafts: int,
    per_row: int,
) -> tuple[dict[str, Array], Any]:
    """Runs a step and returns the log-likelihoods of the tokens that follow.

    Args:
      compiled: the model.
      cache: the cache, which is donated.
      batch: the tokens of the step.
      next_tokens: the token after each token of the batch.
      keep_logits: whether to return logits.
      layers: whether to return the inputs and outputs of attention.
      drafts: number of tokens to draft after each token of the batch; 0 for none.
      per_row: number of tokens of each request in the batch; used only with drafts.

    Returns:
      ({name: array}, updated cache). The arrays are float32:

        * "log_likelihoods" [T]: log-likelihoods of `next_tokens`.
        * "logits" [T, vocab], with `keep_logits`.
        * "attn_in_L" and "attn_out_L" [T, hidden], with `layers`: input and output of attention in each layer L.
        * With `drafts`, also the arrays of `_score_drafts`. The array "draft_tokens" is int32.
    """
    model = compiled.module
    names = {"attention_in": "attn_in", "attention_out": "attn_out"} if layers else {}
    hidden, streams, recorded, cache = model.model(cache, batch, record=names)
    logits = model.logits(hidden)
    results = {"log_likelihoods": log_probabilities(logits, next_tokens)[0]}
    if keep_logits:
        results["logits"] = logits
    for layer_numbers, values in recorded:
        for name, stacked in values.items():
            for layer, x in zip(layer_numbers, stacked, strict=True):
                results[f"{names[name]}_{layer}"] = x.astype(jnp.float32)
    if drafts:
        drafted, cache = _score_drafts(model, cache, batch, streams, next_tokens, drafts, per_row)
        results |= drafted
    return results, cache


def _score_drafts(model, cache, batch, streams, next_tokens, count, per_row):
    """For each token of the step, greedily drafts `count` tokens that follow its next token.

    A scan over the step's positions runs one token of every request at a time, because the draft layers read the window
    rows of earlier tokens.

    Args:
      model: the model, with draft layers.
      cache: the cache, after the model has run the step.
      batch: the tokens of the step, ordered by slots.
      streams: [T, n, hidden], inputs of the draft layers, see `DeepseekV4ForCausalLM.forward_streams`.
      next_tokens: [T] int32, the token after each token of the step.
      count: number of drafts.
      per_row: number of tokens of each request in the step.

    Returns:
      ({"draft_tokens": [T, count] int32, "draft_logits": [T, count, vocab] and, if the draft layers estimate it,
      "confidence": [T, count]}, updated cache).
    """
    slots = cache.lengths.shape[0]
    seeds = jnp.zeros((slots,), jnp.uint32)

    def score_position(cache, i):
        """Drafts after token i of each request in the step. Returns the cache and the results by slot."""
        rows = jnp.arange(slots, dtype=jnp.int32) * per_row + i
        positions = batch.positions[rows]
        cache = model.drafts.write(model, streams[rows], cache, one_token_batch(batch.token_ids[rows], positions))
        newest = one_token_batch(next_tokens[rows], jnp.where(positions >= 0, positions + 1, -1))
        tokens, logits, confidence, cache = draft(model, cache, streams[rows], newest, GREEDY, seeds, drafts=count)
        results = {"draft_tokens": tokens, "draft_logits": logits}
        if confidence is not None:
            results["confidence"] = confidence
        return cache, results

    def by_token(x):
        """Returns `x`, [per_row, slots, ...], as [T, ...] in the batch's order. The batch's padding gets zeros."""
        x = x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
        return jnp.pad(x, [(0, len(batch.positions) - len(x)), *[(0, 0)] * (x.ndim - 1)])

    cache, results = jax.lax.scan(score_position, cache, jnp.arange(per_row, dtype=jnp.int32))
    return jax.tree.map(by_token, results), cache


def score_ids(
    model: Model,
    manager: KVCacheManager,
    ids: np.ndarray,
    sizes: Sequence[int],
    *,
    keep_logits: bool = True,
    layers: bool = False,
    window_only: bool = False,
    drafts: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Computes the log-likelihoods of rows of token ids. A step runs the same number of tokens of every row.

    Args:
      model: the model.
      manager: manager of the cache, with a slot for each row.
      ids: [B, T] token ids.
      sizes: number of tokens of each row in each step; their sum is T.
      keep_logits, layers, drafts: see `score_step`.
      window_only: whether all layers attend to the sliding window only.

    Yields:
      For each step of n tokens, the arrays of `score_step`, {name: [B, n, ...]}. Values for the last token of a row
      mean nothing, because token id 0 stands for the missing next token.
    """
    slots = np.array([manager.admit(row) for row in ids])
    compiled = CompiledModel.of(model)
    cache = manager.init_cache()
    start = 0
    followers = np.pad(ids[:, 1:], ((0, 0), (0, 1)))
    for n in sizes:
        stop = start + n
        tokens = manager.check_ids(ids[:, start:stop].reshape(-1))
        batch, begins = manager.prepare_arrays(slots, np.full_like(slots, n), tokens)
        if window_only:  # entries need a block to be stored and read
            batch = dataclasses.replace(batch, new_blocks=jnp.full_like(batch.new_blocks, -1))
        places = begins[:, None] + np.arange(n)  # [B, n] indices of the tokens in the batch
        next_tokens = np.zeros(batch.token_ids.shape, np.int32)
        next_tokens[places] = followers[:, start:stop]
        results, cache = compiled.run(
            score_step,
            cache,
            batch,
            manager.devices.put(next_tokens, "tokens"),
            keep_logits=keep_logits,
            layers=layers,
            drafts=drafts,
            per_row=n if drafts else 0,
        )
        yield {name: x[places] for name, x in manager.devices.get(results).items()}
        start = stop
    manager.release_all()


def read_ids(path: Path) -> np.ndarray:
    """Reads an array [B, T] of token ids from a .npy file.

    Raises ValueError if the file is damaged, or the shape is not [B, T] with B at least 1 and T at least 2.
    """
    with path.open("rb") as file:
        try:
            ids = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # for a damaged header, NumPy raises MemoryError, TokenError and others
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"--ids {path} is no .npy file of numbers: {message}") from None
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"--ids {path} has shape {list(ids.shape)}; it must be [B, T], B at least 1 and T at least 2")
    return ids


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """Returns the number of UTF-8 bytes of the text of each row of `ids`, [B, T] token ids, without its first token's.

    Returns [] if the text of a row does not encode to the row's tokens again, does not begin with the text of the first
    token, or has no bytes after it.
    """
    lengths = []
    for row in ids.tolist():
        start = tokenizer.decode(row[:1], skip_special_tokens=False)
        text = tokenizer.decode(row, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != row or not text.startswith(start):
            return []
        lengths.append(len(text.encode()) - len(start.encode()))
    return lengths if all(lengths) else []
