"""The policy that decides which experts lie on the GPU: the experts that tokens selected most often recently."""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclasses.dataclass
class PlacementPolicy:
    """Counts how often each expert is selected, and proposes swaps of hot experts in host memory for cold ones.

    The counts decay exponentially, so that they follow the topic of the requests. An expert is moved only if the
    difference of counts exceeds the noise. LRU, which would move every selected expert, is slower if few experts fit
    the GPU.

    Attributes:
      frequencies: [layers, E] float64 decayed counts.
      half_life: number of tokens after which a selection counts half.
      margin: number of standard deviations by which the count of an expert in host memory must exceed the count of an
        expert on the GPU. Counts are Poisson distributed, so the standard deviation of the difference of two counts is
        the square root of their sum.
    """

    frequencies: Float[np.ndarray, "L E"]
    half_life: float = 128.0
    margin: float = 1.5

    def count(self, hits: Int[np.ndarray, "L E"], tokens: int) -> None:
        """Decays the counts and adds new selections.

        Args:
          hits: number of new tokens that selected each expert.
          tokens: number of new tokens.
        """
        # The tokens come one after another, so selections of early tokens have decayed when the final token comes.
        fading = math.log(2) * tokens / self.half_life
        self.frequencies *= math.exp(-fading)
        self.frequencies += hits * (-math.expm1(-fading) / fading if fading else 1.0)

    def swaps(self, on_host: Bool[np.ndarray, "L E"], limit: int) -> list[tuple[int, int, int]]:
        """Proposes swaps of experts between host memory and the GPU, those with the largest gain first.

        Args:
          on_host: whether each expert of each layer lies in host memory.
          limit: maximum number of swaps.

        Returns:
          (layer, hot expert in host memory, cold expert on the GPU) of each swap.
        """
        # In each layer, the hottest expert in host memory is paired with the coldest one on the GPU, the second hottest
        # with the second coldest, and so on.
        hot = np.argsort(np.where(on_host, -self.frequencies, np.inf), axis=1, kind="stable")
        cold = np.argsort(np.where(on_host, np.inf, self.frequencies), axis=1, kind="stable")
        num_pairs = min(int(on_host.sum(1).min()), int((~on_host).sum(1).min()))
        hot = hot[:, :num_pairs]
        cold = cold[:, :num_pairs]
        gains = np.take_along_axis(self.frequencies, hot, axis=1)
        losses = np.take_along_axis(self.frequencies, cold, axis=1)
        net_gains = gains - losses - self.margin * np.sqrt(gains + losses)
        layers, ranks = np.nonzero(net_gains > 0)
        best = np.argsort(-net_gains[layers, ranks], kind="stable")[:limit]
        return [(int(i), int(hot[i, j]), int(cold[i, j])) for i, j in zip(layers[best], ranks[best], strict=True)]
