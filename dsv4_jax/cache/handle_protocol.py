"""The interface that a model needs from a cache; `KVCache` implements it, and other classes may."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from dsv4_jax.cache.batch import Batch
from dsv4_jax.ops import CompressorWeights
from dsv4_jax.quant import LayerSlice


@runtime_checkable
class CacheHandle(Protocol):
    """The interface of one layer's cache in one step; `LayerCacheHandle` documents the methods."""

    @property
    def batch(self) -> Batch: ...

    @property
    def cache(self) -> Any: ...

    def write_swa(self, kv: Float[Array, "T D"]) -> "CacheHandle": ...

    def norm_rope_append(
        self,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T D"],
        weight: Float[Array, "D"] | LayerSlice,
        inv_freq: Float[Array, "P"],
        *,
        eps: float,
    ) -> tuple[Float[Array, "T H D"], "CacheHandle"]: ...

    def flush(
        self, kv: Float[Array, "T W"], gate: Float[Array, "T W"], weights: CompressorWeights, index: tuple | None = None
    ) -> "CacheHandle": ...

    def indexer_scores(
        self, q: Float[Array, "T H I"], weights: Float[Array, "T H"], inv_freq: Float[Array, "P"] | None = None
    ) -> Float[Array, "T E"]: ...

    def indexer_topk(self, scores: Float[Array, "T E"]) -> Int[Array, "T k"]: ...

    def attend(
        self,
        q: Float[Array, "T H D"],
        sinks: Float[Array, "H"] | LayerSlice,
        indices: Int[Array, "T K"] | None = None,
        inv_freq: Float[Array, "P"] | None = None,
    ) -> tuple[Float[Array, "T H D"], "CacheHandle"]: ...


@runtime_checkable
class StepCache(Protocol):
    """The interface of a whole model's cache in one step; `KVCache` documents the methods."""

    def begin_step(self, batch: Batch) -> Any: ...

    def handle(self, layer: int | Int[Array, ""], batch: Batch, *, like: int | None = None) -> CacheHandle: ...
