"""The interface that a model needs from a cache; `KVCache` implements it, and other classes may.

`LayerCacheHandle` and `KVCache` document the methods and the types of their arguments and results.
"""

from typing import Any, Protocol, runtime_checkable

from dsv4_jax.cache.batch import Batch


@runtime_checkable
class CacheHandle(Protocol):
    """The interface of one layer's cache in one step. Layers of DeepSeek-V4.1 need a whole `LayerCacheHandle`."""

    @property
    def batch(self) -> Batch: ...

    @property
    def cache(self) -> Any: ...

    def write_swa(self, kv: Any) -> Any: ...

    def norm_rope_append(
        self, q: Any, kv: Any, weight: Any, inv_freq: Any, *, eps: float, norms_queries: bool = True
    ) -> Any: ...

    def flush(self, kv: Any, gate: Any, weights: Any, index: Any = None) -> Any: ...

    def indexer_scores(self, q: Any, weights: Any, inv_freq: Any = None, candidates: Any = None) -> Any: ...

    def indexer_topk(self, scores: Any, candidates: Any = None) -> Any: ...

    def attend(self, q: Any, sinks: Any, indices: Any = None, inv_freq: Any = None) -> Any: ...


@runtime_checkable
class StepCache(Protocol):
    """The interface of a whole model's cache in one step."""

    def begin_step(self, batch: Batch) -> Any: ...

    def handle(self, layer: Any, batch: Batch, *, like: int | None = None) -> CacheHandle: ...
