"""Computes the likelihoods of token ids for `dsv4-jax score`; a separate module because it imports JAX."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from dsv4_jax.cache import Batch, KVCache, LayerCacheHandle
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.decode import CompiledModel, Model
from dsv4_jax.decode.drafts import draft, one_token_batch
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.sharded_step import sharded_step
from dsv4_jax.quant import LayerSlice


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
    """Runs the batch's tokens, `per_row` of each slot; the cache is donated.

    Returns:
      The results, float32, and the cache. The results are "log_likelihoods" [T] of `next_tokens`; with `keep_logits`
      also "logits" [T, vocab]; with `layers` also "attn_in_L" and "attn_out_L" [T, hidden], the input and output of
      attention in layer L; with `drafts` also those of `_score_drafts`.
    """
    model = compiled.module
    names = {"attention_in": "attn_in", "attention_out": "attn_out"} if layers else {}
    hidden, streams, recorded, cache = model.model(cache, batch, record=names)
    logits = model.logits(hidden)
    next_logits = jnp.take_along_axis(logits, next_tokens[:, None], axis=1)[:, 0]
    results = {"log_likelihoods": next_logits - jax.nn.logsumexp(logits, axis=1)}
    if keep_logits:
        results["logits"] = logits
    for numbers, values in recorded:
        for name, stacked in values.items():
            results |= {f"{names[name]}_{i}": x.astype(jnp.float32) for i, x in zip(numbers, stacked, strict=True)}
    if drafts:
        drafted, cache = _score_drafts(model, cache, batch, streams, next_tokens, drafts, per_row)
        results |= drafted
    return results, cache


def _score_drafts(model, cache, batch, streams, next_tokens, count, per_row):
    """Drafts behind the token that follows each token of a step, for a request's tokens one after another.

    Returns "draft_tokens" [T, count], their "draft_logits" [T, count, vocab] and, if the draft layers estimate it,
    "confidence" [T, count]; and the cache.
    """
    slots = cache.lengths.shape[0]
    seeds = jnp.zeros((slots,), jnp.uint32)

    def score_one(cache, i):
        rows = jnp.arange(slots, dtype=jnp.int32) * per_row + i
        positions = batch.positions[rows]
        cache = model.drafts.write(model, streams[rows], cache, one_token_batch(batch.token_ids[rows], positions))
        newest = one_token_batch(next_tokens[rows], jnp.where(positions >= 0, positions + 1, -1))
        tokens, logits, confidence, cache = draft(model, cache, streams[rows], newest, GREEDY, seeds, drafts=count)
        results = {"draft_tokens": tokens, "draft_logits": logits}
        return cache, results if confidence is None else results | {"confidence": confidence}

    cache, results = jax.lax.scan(score_one, cache, jnp.arange(per_row, dtype=jnp.int32))
    return {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in results.items()}, cache


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
    """Runs all rows of ids [B, T] as one batch of requests in lockstep, `sizes` tokens of each row in each step.

    With `window_only`, all layers attend to the sliding window only. Other options are those of `score_step`.

    Yields:
      The results of `score_step` for the n tokens of a step, each array [B, n, ...].
    """
    slots = [manager.admit(row) for row in ids]
    compiled = CompiledModel.of(model)
    cache = manager.init_cache()
    start = 0
    followers = np.pad(ids[:, 1:], ((0, 0), (0, 1)))
    if window_only:
        cache = WindowOnlyCache(**vars(cache))
    for n in sizes:
        stop = start + n
        tokens = manager.check_ids(ids[:, start:stop].reshape(-1))
        batch, begins = manager.prepare_arrays(np.array(slots), np.full((len(slots),), n), tokens)
        places = begins[:, None] + np.arange(n)
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
    for slot in slots:
        manager.release(slot)


def read_ids(path: Path) -> np.ndarray:
    """Reads token ids [B, T] from a .npy file. Raises ValueError if it has none."""
    with path.open("rb") as file:
        try:
            ids = np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:  # a damaged header makes NumPy raise MemoryError, TokenError and others
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"--ids {path} is no .npy file of numbers: {message}") from None
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"--ids {path} has shape {list(ids.shape)}; it must be [B, T], B at least 1 and T at least 2")
    return ids


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """Returns the UTF-8 bytes of each row's text without its first token; [] if a row is not the tokens of a text."""
    lengths = []
    for row in ids.tolist():
        start = tokenizer.decode(row[:1], skip_special_tokens=False)
        text = tokenizer.decode(row, skip_special_tokens=False)
        if tokenizer.encode(text, add_special_tokens=False).ids != row or not text.startswith(start):
            return []
        lengths.append(len(text.encode()) - len(start.encode()))
    return lengths if all(lengths) else []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class WindowOnlyCache(KVCache):
    """A cache whose layers attend to their sliding windows only, for ablations."""

    def handle(self, layer: int | Array, batch: Batch, *, like: int | None = None) -> "WindowOnlyHandle":
        handle = super().handle(layer, batch, like=like)
        return WindowOnlyHandle(self, batch, None, LayerSpec(handle.spec.layer), handle.layer)


class WindowOnlyHandle(LayerCacheHandle):
    """One layer of a `WindowOnlyCache`: stores no compressed entries and selects none, whatever its kind."""

    def flush(self, *_: Any, **__: Any) -> "WindowOnlyHandle":
        return self

    def indexer_scores(self, q: Float[Array, "T H I"], *_: Any, **__: Any) -> Float[Array, "T E"]:
        return jnp.zeros((q.shape[0], 0), jnp.float32)

    def indexer_topk(self, scores: Float[Array, "T E"]) -> Int[Array, "T k"]:
        return jnp.zeros((scores.shape[0], 0), jnp.int32)

    def attend(
        self, q: Float[Array, "T H D"], sinks: Float[Array, "H"] | LayerSlice, indices: Any = None, inv_freq: Any = None
    ) -> tuple[Float[Array, "T H D"], LayerCacheHandle]:
        return super().attend(q, sinks, None, inv_freq)
