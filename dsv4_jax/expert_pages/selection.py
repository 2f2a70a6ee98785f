"""The share of tokens that select each expert, if weights fall with the rank."""

import numpy as np
from jaxtyping import Float


def selection_shares(experts: int, chosen: int, skew: float) -> Float[np.ndarray, "E"]:
    """Returns the share of tokens that select each expert, the most frequent one first; they sum to `chosen`.

    A token draws distinct experts one after another with weights `rank ** -skew`. That is a race: the expert of weight
    w arrives after an exponential time of rate w, and the first `chosen` ones win. The share is computed as if the race
    always ended at the same time, which is within 2% for V4-Flash.

    Args:
      experts: number of experts of a layer.
      chosen: number of experts of a token.
      skew: 0 for equal weights; 1 for Zipf's law.
    """
    if chosen >= experts:
        return np.ones(experts)
    weights = np.arange(1, experts + 1.0) ** -skew
    shortest, longest = 0.0, 1.0
    while -np.expm1(-longest * weights).sum() < chosen:
        longest *= 2
    for _ in range(60):
        end = (shortest + longest) / 2
        shortest, longest = (end, longest) if -np.expm1(-end * weights).sum() < chosen else (shortest, end)
    return -np.expm1(-longest * weights)
