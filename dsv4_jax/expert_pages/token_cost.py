"""Estimates the time of a decode step of a model whose experts lie partly in host memory."""

import dataclasses

import numpy as np
from jaxtyping import Float


READ_RATES = {"h100": 3.0e12, "h200": 4.2e12}  # bytes a second that kernels read from memory of this GPU, measured
BUS_RATE = 45e9  # bytes a second that kernels read from host memory through PCIe 5, measured
# In a step of few tokens, a layer takes this time for launches and dependent work, besides reading weights; measured.
LAYER_SECONDS = 45e-6


@dataclasses.dataclass(frozen=True)
class TokenCost:
    """An estimate of the time of a decode step, from the weights that it reads from GPU memory and from host memory.

    A step of n tokens reads an expert once if at least one of them selects it. A share p(r) of tokens selects the
    expert of rank r, so a step reads it with probability 1 - (1 - p(r))**n. The most frequent experts lie on the GPU.
    Then

        seconds = (layers * LAYER_SECONDS + (other_bytes + expert_bytes * hits) / read_rate
                   + expert_bytes * misses / BUS_RATE)

    where `hits` and `misses` are the numbers of experts, in all layers, that a step reads from GPU memory and from host
    memory. The estimate leaves out the cache and the computation. Both are small beside the weights for few requests of
    a moderate context.

    Attributes:
      layers: number of layers with experts.
      experts: number of experts in a layer.
      chosen: number of experts that a token selects in a layer.
      expert_bytes: bytes of the codes of one expert of a layer, all its matrices together.
      other_bytes: bytes of the weights outside the routed experts, which every step reads.
      read_rate: bytes a second that kernels read from GPU memory, see `READ_RATES`.
    """

    layers: int
    experts: int
    chosen: int
    expert_bytes: int
    other_bytes: int
    read_rate: float

    def misses(self, on_host: int, skew: float, tokens: int = 1) -> float:
        """Returns the expected number of experts, summed over all layers, that a step reads from host memory.

        Args:
          on_host: number of experts of each layer in host memory.
          skew: how unequally tokens select experts, see `selection_shares`.
          tokens: number of tokens of the step.
        """
        return self.layers * float(self._read(skew, tokens)[self.experts - on_host :].sum())

    def milliseconds(self, on_host: int, skew: float, tokens: int = 1) -> float:
        """Returns the expected milliseconds of a step.

        Args:
          on_host, skew, tokens: as in `misses`.
        """
        misses = self.misses(on_host, skew, tokens)
        hits = self.layers * float(self._read(skew, tokens).sum()) - misses
        on_device = (self.other_bytes + self.expert_bytes * hits) / self.read_rate
        return 1e3 * (self.layers * LAYER_SECONDS + on_device + self.expert_bytes * misses / BUS_RATE)

    def _read(self, skew, tokens):
        """Returns the probability that a step reads each expert of a layer, the most frequent one first."""
        shares = np.minimum(selection_shares(self.experts, self.chosen, skew), 1.0)
        return 1 - (1 - shares) ** tokens


def selection_shares(experts: int, chosen: int, skew: float) -> Float[np.ndarray, "E"]:
    """Returns the share of tokens that select each expert, the most frequent one first.

    A token draws distinct experts one after another. The expert of rank r, from 1, has the weight r ** -skew. These
    draws are equivalent to a race in which the expert of weight w arrives after an exponential time of rate w, and the
    first `chosen` ones win. The shares are computed as if the race always ended at the same time, which changes them by
    at most 2% for V4-Flash.

    Args:
      experts: number of experts of a layer.
      chosen: number of experts that a token selects.
      skew: 0 for equal weights; 1 for Zipf's law.

    Returns:
      [experts] float64 shares between 0 and 1, whose sum is `chosen`.
    """
    if chosen >= experts:
        return np.ones(experts)
    weights = np.arange(1, experts + 1.0) ** -skew

    def arrived(seconds):
        """Returns the probability that each expert has arrived."""
        return -np.expm1(-seconds * weights)

    # Bisection finds the end of the race: the time when `chosen` experts are expected to have arrived.
    shortest = 0.0
    longest = 1.0
    while arrived(longest).sum() < chosen:
        longest *= 2
    for _ in range(60):
        middle = (shortest + longest) / 2
        if arrived(middle).sum() < chosen:
            shortest = middle
        else:
            longest = middle
    return arrived(longest)
