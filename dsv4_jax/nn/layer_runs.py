"""Division of a model's layers into runs. A model computes each run in one loop.

A run repeats a period, a sequence of layers: layers A B A B A B are a run of 3 repeats of the period A B.
"""

import dataclasses
from collections.abc import Hashable, Sequence


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """A sequence of layers, the period, that occurs `repeats` times in a row.

    Attributes:
      start: index of the run's first layer.
      period: number of layers in a period.
      repeats: number of periods.
    """

    start: int
    period: int
    repeats: int

    @property
    def stop(self) -> int:
        """The index of the first layer after the run."""
        return self.start + self.period * self.repeats

    def layers(self, position: int) -> range:
        """Returns the indices of the layers at a position within the period, one for each repeat."""
        return range(self.start + position, self.stop, self.period)


def find_runs(forms: Sequence[tuple[Hashable, Sequence[int | None]]], start: int = 0) -> tuple[LayerRun, ...]:
    """Divides layers into runs with the smallest sum of periods, and among such divisions, with the fewest runs.

    A layer of a run repeats the layer one period earlier: their forms are equal, and so are their sources. Two sources
    count as equal in three cases:

    * Both are None.
    * Both are the same layer, which precedes the run.
    * They are one period apart, and each lies in the same repeat of the period as the layer that reads from it.

    Args:
      forms: (form, sources) of each layer. The form is equal for layers of one kind. A source is the index of an
        earlier layer from which the layer reads a value, such as the selected entries, or None. All layers have the
        same number of sources.
      start: index of the first layer.

    Returns:
      The runs, in the order of the layers.
    """
    stop = start + len(forms)

    def form_in_run(layer, first, period):
        """Returns a value that is equal for the layers at one position of a run that begins at `first`."""
        form, sources = forms[layer - start]

        def place(source):
            """Returns a source before the run as it is, and one in the layer's repeat relative to the layer."""
            if source is None or source < first:
                return source
            return source - layer if layer - source <= (layer - first) % period else (layer, source)

        return form, [place(source) for source in sources]

    # {index of a layer: (sum of periods, number of runs, runs) of the best division of this and all later layers}.
    best: dict[int, tuple[int, int, tuple[LayerRun, ...]]] = {stop: (0, 0, ())}
    for first in reversed(range(start, stop)):
        choices = []  # the runs that can begin here
        for period in range(1, (stop - first) // 2 + 1):
            end = first + period  # layers from `first + period` to `end - 1` repeat those one period earlier
            while end < stop and form_in_run(end, first, period) == form_in_run(end - period, first, period):
                end += 1
            choices += [LayerRun(first, period, repeats) for repeats in range(2, (end - first) // period + 1)]
        choices.append(LayerRun(first, 1, 1))
        results = []
        for run in choices:
            later_periods, num_runs, later_runs = best[run.stop]
            results.append((run.period + later_periods, 1 + num_runs, (run, *later_runs)))
        best[first] = min(results, key=lambda result: result[:2])
    return best[start][2]
