"""The spec of a layer: its pools in the cache and the entries that it reads, as data."""

import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Describes one layer's use of the cache. `DSV4Config.layers` makes specs; no other code asks for a kind of layer.

    Reading and owning are separate: a layer may attend to entries, and score keys, that an earlier layer stores.

    Attributes:
      layer: number of the layer in the model.
      ring: the layer's row on axis 0 of the sliding-window rings.
      compress_rate: number of tokens per entry that the layer attends to; 0 = window only.
      overlap: whether an entry pools its own window and the previous one.
      group: name of the pool group with the layer's entries; None without entries.
      index: the layer's row on axis 0 of that group's pools.
      owner: whether the layer stores these entries itself, with a compressor.
      keys: whether an index key is stored beside each entry.
      key_compressor: whether a separate compressor pools the keys; otherwise keys are made from the entries' vectors.
      selection: number of the layer whose top-k selection is attended to: this layer, or an earlier one. None = all
        visible entries.
    """

    layer: int = 0
    ring: int = 0
    compress_rate: int = 0
    overlap: bool = False
    group: str | None = None
    index: int = 0
    owner: bool = False
    keys: bool = False
    key_compressor: bool = False
    selection: int | None = None

    @property
    def selects(self) -> bool:
        """Whether the layer scores keys and selects entries itself."""
        return self.selection == self.layer


def numbered(specs: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns specs with their places in the model: `layer`, `ring`, and `index` where a layer stores entries."""
    stored: collections.Counter[str | None] = collections.Counter()
    placed = []
    for layer, spec in enumerate(specs):
        index = stored[spec.group] if spec.owner else spec.index
        stored[spec.group] += spec.owner
        placed.append(dataclasses.replace(spec, layer=layer, ring=layer, index=index))
    return tuple(placed)
