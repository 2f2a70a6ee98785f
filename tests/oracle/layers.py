"""Runs one attention layer on a golden's own inputs, through the real cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import Batch, CacheHandle
from dsv4_jax.config.layer_spec import CSA
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import StepCarry


@dataclasses.dataclass(frozen=True)
class RecordingHandle:
    """A `CacheHandle` that keeps the indexer's results, and can be told what to select instead."""

    handle: CacheHandle
    given: Any
    record: dict

    batch = property(lambda self: self.handle.batch)
    cache = property(lambda self: self.handle.cache)

    def write_swa(self, kv):
        return dataclasses.replace(self, handle=self.handle.write_swa(kv))

    def norm_rope_append(self, *args, **kwargs):
        q, handle = self.handle.norm_rope_append(*args, **kwargs)
        return q, dataclasses.replace(self, handle=handle)

    def pool_windows(self, *args):
        closed, handle = self.handle.pool_windows(*args)
        return closed, dataclasses.replace(self, handle=handle)

    def write_entries(self, *args):
        return dataclasses.replace(self, handle=self.handle.write_entries(*args))

    def write_keys(self, *args):
        return dataclasses.replace(self, handle=self.handle.write_keys(*args))

    def candidate_blocks(self, scores):
        return self.handle.candidate_blocks(scores)

    def flush(self, *args, **kwargs):
        return dataclasses.replace(self, handle=self.handle.flush(*args, **kwargs))

    def attend(self, *args):
        out, handle = self.handle.attend(*args)
        return out, dataclasses.replace(self, handle=handle)

    def indexer_scores(self, *args):
        self.record["scores"] = self.handle.indexer_scores(*args)
        return self.record["scores"]

    def indexer_topk(self, scores, candidates=None):
        self.record["topk"] = self.handle.indexer_topk(scores, candidates)
        return self.record["topk"] if self.given is None else self.given


@dataclasses.dataclass(frozen=True)
class Source:
    """A layer that runs before another one, which reads its entries and its candidates; inputs [B, S, hidden]."""

    layer: int
    x: np.ndarray
    candidates: np.ndarray  # [B, S, blocks], in place of those that the layer makes


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("layer", "source"))
def attention_step(model, cache, batch, x, given, layer, source=None, source_x=None, candidates=None):
    """(output [T, hidden], {"scores", "topk"} of a layer that selects, and "candidates" of the source, cache)."""
    cache = cache.begin_step(batch)
    record = {}
    carry = StepCarry()
    if source is not None:
        _, made, cache = model.model.layers[source].self_attn(source_x, cache.handle(source, batch), carry)
        carry = dataclasses.replace(carry, candidates={source: candidates})
    handle = RecordingHandle(cache.handle(layer, batch), given, record)
    y, _, cache = model.model.layers[layer].self_attn(x, handle, carry)
    return y, record | ({} if source is None else {"candidates": made.candidates[source]}), cache


def run_layer(model, layer, x, chunks, *, kv_format, dtype, given=None, block_tokens=16, source=None):
    """Feeds x [B, S, hidden] in chunks of so many tokens. In each step, a `Source` runs before.

    Returns:
      (out [B, S, hidden], {"scores" [B, S, E], "topk" [B, S, k]}, cache), numpy.
    """
    rows, total, hidden = x.shape
    manager = KVCacheManager(
        model.config, num_blocks=64, max_requests=rows, max_context=128, block_tokens=block_tokens,
        kv_format=kv_format, dtype=dtype,
    )  # fmt: skip
    cache = manager.init_cache()
    slots = [manager.admit(num_tokens=total) for _ in range(rows)]
    parts = []
    at = 0
    for n in chunks:
        batch = manager.prepare_forward({slot: [0] * n for slot in slots})
        padding = batch.slots.shape[0] - rows * n

        def flat(values, at=at, n=n, padding=padding):
            values = values[:, at : at + n].reshape(rows * n, -1)
            return jnp.asarray(np.concatenate([values, np.zeros((padding, values.shape[1]), values.dtype)]))

        chosen = None
        if given is not None and model.config.layer_types[layer] == CSA:
            chosen = flat(given.astype(np.int32))
        before = ()
        if source is not None:
            before = source.layer, flat(source.x).astype(dtype), flat(source.candidates.astype(np.int32))
        y, record, cache = attention_step(model, cache, batch, flat(x).astype(dtype), chosen, layer, *before)
        parts.append({k: np.asarray(v)[: rows * n].reshape(rows, n, -1) for k, v in {"out": y, **record}.items()})
        at += n
    assert at == total
    joined = {k: np.concatenate([part[k] for part in parts], axis=1) for k in parts[0]}
    return joined.pop("out").astype(np.float32), joined, cache


def reader(cache, layer):
    """A handle to look at a layer with."""
    none = jnp.zeros((0,), jnp.int32)
    return cache.handle(layer, Batch(none, none, none, none[:, None], none, prefill=False))


def entries(view, count):
    """The first `count` entries of every slot as (rows [slots, count, ...])."""
    slots = view.block_table.shape[0]
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], (slots, count))
    rows, valid = view.read(jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[:, None], (slots, count)), index)
    assert np.asarray(valid).all()
    return rows
