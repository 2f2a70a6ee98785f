"""Token ids, their bytes and their likelihoods, for `dsv4-jax score`; a module of its own because it imports JAX."""

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
from dsv4_jax.cache.streams import advance_streams
from dsv4_jax.decode.drafts import draft, one_token_batch
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import KVCacheManager
from dsv4_jax.host.forward import first_tokens
from dsv4_jax.layer_spec import LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.ops import CompressorWeights
from dsv4_jax.parallel.sharded_step import sharded_step


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("layers", "drafts", "per_row"))
@sharded_step
def score_step(
    model: DeepseekV4ForCausalLM, cache: Any, batch: Batch, *, layers: bool, drafts: int, per_row: int
) -> tuple[dict[str, Array], Any]:
    """Runs the batch's tokens, `per_row` of each slot; the cache is donated.

    Returns:
      ({"logits": [T, vocab] float32}, cache); with `layers` also "attn_in_L" and "attn_out_L" [T, hidden], what enters
      and leaves the attention of layer L, in float32; with `drafts` also what `_score_drafts` returns.
    """
    hidden, streams, activations, cache = model.model(cache, batch, record=layers)
    results = {name: x.astype(jnp.float32) for name, x in activations.items()} | {"logits": model.logits(hidden)}
    if drafts:
        drafted, cache = _score_drafts(model, cache, batch, streams, results["logits"], drafts, per_row)
        results |= drafted
    return results, cache


def _score_drafts(model, cache, batch, streams, logits, count, per_row):
    """What the multi-token-prediction block makes of a step's tokens, each request's one after another.

    Returns:
      ({"mtp_logits": [T, vocab] of the row before each token, "draft_tokens" [T, count] and "draft_logits" [T, count,
      vocab] after it}, cache).
    """
    before, shifted, cache = advance_streams(cache, streams, batch)
    slots = cache.lengths.shape[0]
    seeds = jnp.zeros((slots,), jnp.uint32)

    def one(cache, i):
        at = jnp.arange(slots, dtype=jnp.int32) * per_row + i
        mine = one_token_batch(shifted.token_ids[at], shifted.positions[at])
        hidden, _, cache = model.mtp_forward(before[at], cache, mine)
        newest = one_token_batch(jnp.argmax(logits[at], axis=1).astype(jnp.int32), batch.positions[at])
        tokens, guessed, cache = draft(model, cache, streams[at], newest, GREEDY, seeds, count=count)
        return cache, dict(mtp_logits=model.logits(hidden), draft_tokens=tokens, draft_logits=guessed)

    cache, results = jax.lax.scan(one, cache, jnp.arange(per_row, dtype=jnp.int32))
    return {name: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) for name, x in results.items()}, cache


def score_ids(
    model: DeepseekV4ForCausalLM,
    manager: KVCacheManager,
    ids: np.ndarray,
    sizes: Sequence[int],
    *,
    layers: bool = False,
    window_only: bool = False,
    drafts: int = 0,
) -> Iterator[dict[str, np.ndarray]]:
    """Runs all rows of ids [B, T] as one batch of requests in lockstep.

    Each step takes `sizes[step]` tokens of each row; the sizes add up to T. Where `window_only`, no layer attends to
    compressed entries. The manager has a slot for each row.

    Yields:
      What `score_step` returns for the n tokens of a step, each array [B, n, ...].
    """
    slots = [manager.admit(row) for row in ids]
    cache, at = manager.init_cache(), 0
    if window_only:
        cache = WindowOnlyCache(cache)
    for n in sizes:
        batch = manager.prepare_forward({slot: row[at : at + n] for slot, row in zip(slots, ids, strict=True)})
        results, cache = score_step(model, cache, batch, layers=layers, drafts=drafts, per_row=n if drafts else 0)
        starts = first_tokens(
            manager.requests, dict.fromkeys(slots, n), len(batch.slots) // manager.requests.num_shards
        )
        here = np.array([starts[slot] for slot in slots])[:, None] + np.arange(n)
        yield {name: x[here] for name, x in manager.requests.get(results).items()}
        at += n
    for slot in slots:
        manager.release(slot)


def read_ids(path: Path) -> np.ndarray:
    """[B, T] token ids of a .npy file; ValueError if it holds none."""
    with path.open("rb") as file:
        try:
            ids = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"--ids {path} is no .npy file of numbers: {error}") from None
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"--ids {path} has shape {list(ids.shape)}; it must be [B, T], B at least 1 and T at least 2")
    return ids


def text_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> list[int]:
    """UTF-8 bytes of each row's text without its first token; [] if a row's tokens are not those of any text."""
    lengths = []
    for row in ids.tolist():
        first, text = (tokenizer.decode(part, skip_special_tokens=False) for part in (row[:1], row))
        if tokenizer.encode(text, add_special_tokens=False).ids != row or not text.startswith(first):
            return []
        lengths.append(len(text.encode()) - len(first.encode()))
    return lengths if all(lengths) else []


def log_likelihoods(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[T-1] float32 log-probabilities of ids[1:] given logits [T, vocab], each from the token before it."""
    logits = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
    return (chosen - np.log(np.exp(logits).sum(axis=1, dtype=np.float64))).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOnlyCache:
    """A cache of sliding windows only, for ablations: no layer stores compressed entries or attends to them."""

    cache: KVCache

    def begin_step(self, batch: Batch) -> "WindowOnlyCache":
        return WindowOnlyCache(self.cache.begin_step(batch))

    def handle(self, layer: int, batch: Batch) -> "WindowOnlyHandle":
        handle = self.cache.handle(layer, batch)
        return WindowOnlyHandle(dataclasses.replace(handle, spec=LayerSpec(layer, ring=handle.spec.ring)))


@dataclasses.dataclass(frozen=True)
class WindowOnlyHandle:
    """One layer of a `WindowOnlyCache`: a `CacheHandle` that drops entries and selects none, in layers of any kind."""

    window: LayerCacheHandle

    @property
    def batch(self) -> Batch:
        return self.window.batch

    @property
    def cache(self) -> WindowOnlyCache:
        return WindowOnlyCache(self.window.cache)

    def write_swa(self, kv: Float[Array, "T D"]) -> "WindowOnlyHandle":
        return WindowOnlyHandle(self.window.write_swa(kv))

    def norm_rope_append(
        self,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T D"],
        weight: Float[Array, "D"],
        inv_freq: Float[Array, "P"],
        *,
        eps: float,
    ) -> tuple[Float[Array, "T H D"], "WindowOnlyHandle"]:
        q, window = self.window.norm_rope_append(q, kv, weight, inv_freq, eps=eps)
        return q, WindowOnlyHandle(window)

    def flush(
        self, kv: Float[Array, "T W"], gate: Float[Array, "T W"], weights: CompressorWeights, index: tuple | None = None
    ) -> "WindowOnlyHandle":
        return self

    def indexer_scores(
        self, q: Float[Array, "T H I"], weights: Float[Array, "T H"], inv_freq: Float[Array, "P"] | None = None
    ) -> Float[Array, "T E"]:
        return jnp.zeros((q.shape[0], 0), jnp.float32)

    def indexer_topk(self, scores: Float[Array, "T E"]) -> Int[Array, "T k"]:
        return jnp.zeros((scores.shape[0], 0), jnp.int32)

    def attend(
        self,
        q: Float[Array, "T H D"],
        sinks: Float[Array, "H"],
        indices: Int[Array, "T K"] | None = None,
        inv_freq: Float[Array, "P"] | None = None,
    ) -> tuple[Float[Array, "T H D"], "WindowOnlyHandle"]:
        out, window = self.window.attend(q, sinks, None, inv_freq)
        return out, WindowOnlyHandle(window)
