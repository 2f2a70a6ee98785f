"""Runs of layers: periods of consecutive layer forms that repeat, which a model computes in one loop each."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A period of layers that occurs `repeats` times in a row.

    Attributes:
      start: number of the first layer.
      period: number of layers in a period.
      repeats: number of periods.
    """

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        """The number of the first layer behind the run."""
        return self.start + self.period * self.repeats

    def layers(self, position: int) -> range:
        """Returns the numbers of the layers at a position of the period, one for each repeat."""
        return range(self.start + position, self.stop, self.period)


def find_runs(forms: Sequence[tuple[Hashable, int | None]], start: int = 0) -> tuple[LayerRun, ...]:
    """Divides layers into runs with the fewest different layers in all, and among those into the fewest runs.

    Args:
      forms: for each layer what equal layers have in common, and the number of the earlier layer whose selection it
        reads, or None. Layers repeat only if these lie at the same distance within the period, or are one layer before
        the run.
      start: number of the first layer.
    """
    stop = start + len(forms)

    def equal(first: int, period: int, layer: int) -> bool:
        """Whether a layer may be that of its position in a run which begins at `first`."""
        form, source = forms[layer - start]
        earlier_form, earlier_source = forms[layer - period - start]
        if form != earlier_form or (source is None) != (earlier_source is None):
            return False
        if source is None or earlier_source is None or source == earlier_source:
            return source is None or source < first
        in_period = (layer - first) % period
        return source - earlier_source == period and layer - source <= in_period

    @functools.cache
    def best(first: int) -> tuple[int, int, tuple[LayerRun, ...]]:
        """Returns the number of different layers and of runs from a layer on, and the runs."""
        if first == stop:
            return 0, 0, ()
        choices = []
        for period in range(1, (stop - first) // 2 + 1):
            end = first + period
            while end < stop and equal(first, period, end):
                end += 1
            choices += [LayerRun(first, period, repeats) for repeats in range(2, (end - first) // period + 1)]
        choices.append(LayerRun(first, 1, 1))
        results = []
        for run in choices:
            different, count, rest = best(run.stop)
            results.append((run.period + different, 1 + count, (run, *rest)))
        return min(results, key=lambda result: result[:2])

    for first in reversed(range(start, stop)):  # so that recursion is never deep
        best(first)
    return best(start)[2]
