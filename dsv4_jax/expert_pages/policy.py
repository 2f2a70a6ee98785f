"""Which experts should lie on the GPU: those that tokens select most often, by counts that fade."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass
class PlacementPolicy:
    """Counts how often each expert is selected, and proposes swaps of hot experts for cold ones.

    Frequencies with decay find the experts of a topic that lasts, and forget it when it ends. An expert moves only if
    it gains more than noise would. A cache that moves every selected expert (LRU) does worse where little fits the GPU.

    Attributes:
      frequencies: [layers, E] faded counts.
      half_life: number of tokens after which a selection counts half.
      margin: number of standard deviations by which a count in host memory must exceed that on the GPU. Counts are
        Poisson's, so the deviation of a difference is the root of the sum.
    """

    frequencies: Float[np.ndarray, "L E"]
    half_life: float = 128.0
    margin: float = 1.5

    def count(self, hits: Int[np.ndarray, "L E"], tokens: int) -> None:
        """Adds the number of tokens that selected each expert, `hits`, among so many tokens."""
        # The first of many tokens fade while the others come.
        fading = math.log(2) * tokens / self.half_life
        self.frequencies *= math.exp(-fading)
        self.frequencies += hits * (-math.expm1(-fading) / fading if fading else 1.0)

    def swaps(self, on_host: Bool[np.ndarray, "L E"], limit: int) -> list[tuple[int, int, int]]:
        """Proposes up to `limit` swaps (layer, hot expert in host memory, cold expert on the GPU), the best ones first.

        `on_host` says for each expert whether it lies in host memory.
        """
        # The hottest expert of a layer in host memory changes places with the coldest on the GPU, and so on.
        hot = np.argsort(np.where(on_host, -self.frequencies, np.inf), axis=1, kind="stable")
        cold = np.argsort(np.where(on_host, np.inf, self.frequencies), axis=1, kind="stable")
        pairs = min(int(on_host.sum(1).min()), int((~on_host).sum(1).min()))
        hot = hot[:, :pairs]
        cold = cold[:, :pairs]
        gains, losses = (np.take_along_axis(self.frequencies, experts, axis=1) for experts in (hot, cold))
        saved = gains - losses - self.margin * np.sqrt(gains + losses)
        layers, ranks = np.nonzero(saved > 0)
        best = np.argsort(-saved[layers, ranks], kind="stable")[:limit]
        return [(int(i), int(hot[i, j]), int(cold[i, j])) for i, j in zip(layers[best], ranks[best], strict=True)]
