"""A cache whose compressed entries nobody attends to: what a model can do by its window alone."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, KVCache, LayerCacheHandle
from dsv4_jax.config import SLIDING


class WindowOnlyHandle(LayerCacheHandle):
    """Attends as in a sliding layer, whatever the layer's kind; writes as ever."""

    def attend(
        self, q: Float[Array, "T H D"], sinks: Float[Array, "H"], indices: Int[Array, "T K"] | None = None
    ) -> tuple[Float[Array, "T H D"], LayerCacheHandle]:
        """As `LayerCacheHandle.attend`, over the window alone."""
        sliding = dataclasses.replace(self.layer, kind=SLIDING)
        return LayerCacheHandle.attend(dataclasses.replace(self, layer=sliding), q, sinks)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowOnlyCache(KVCache):
    """A cache for the ablation, accepted wherever a `KVCache` is."""

    @classmethod
    def of(cls, cache: KVCache) -> "WindowOnlyCache":
        """The same arrays."""
        return cls(**vars(cache))

    def handle(self, layer: int, batch: Batch) -> WindowOnlyHandle:
        """As `KVCache.handle`."""
        return WindowOnlyHandle(**vars(super().handle(layer, batch)))
