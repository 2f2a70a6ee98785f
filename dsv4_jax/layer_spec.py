"""The spec of a layer: its pools in the cache and the entries that it reads, as data."""

import collections
import dataclasses
from collections.abc import Iterable


OWN = -1


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Describes one layer's use of the cache; without arguments, a layer that has a window only.

    Reading and owning are separate: a layer may attend to entries, and score keys, that an earlier layer stores.

    Attributes:
      layer: number of the layer in the model; `numbered` sets it.
      ring: the layer's row on axis 0 of the sliding-window rings; `numbered` sets it.
      compress_rate: number of tokens per entry that the layer attends to; 0 = window only.
      overlap: whether an entry pools its own window and the previous one.
      group: name of the pool group with the layer's entries; None without entries.
      index: the layer's row on axis 0 of that group's pools; `numbered` sets it if the layer owns the row.
      owner: whether the layer stores these entries itself, with a compressor.
      keys: whether an index key is stored beside each entry.
      key_compressor: whether a separate compressor pools the keys; otherwise keys are made from the entries' vectors.
      selection: number of the layer whose top-k selection is attended to: this layer, which may be given as -1, or an
        earlier one. None = all visible entries.
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

    @classmethod
    def csa(cls, rate: int = 4, *, group: str | None = None) -> "LayerSpec":
        """Returns the spec of compressed sparse attention: overlapping windows, and an indexer that selects entries.

        An entry has `rate` tokens. Layers of one rate share the pools named `group`; None = "csa" and the rate.
        """
        options = dict(overlap=True, keys=True, key_compressor=True, selection=OWN)
        return cls(compress_rate=rate, group=group or f"csa{rate}", owner=True, **options)

    @classmethod
    def hca(cls, rate: int = 128, *, group: str | None = None) -> "LayerSpec":
        """Returns the spec of heavily compressed attention: all entries of windows that do not overlap.

        An entry has `rate` tokens. Layers of one rate share the pools named `group`; None = "hca" and the rate.
        """
        return cls(compress_rate=rate, group=group or f"hca{rate}", owner=True)

    @property
    def kind(self) -> "LayerSpec":
        """The spec without the layer's own places: layers of one kind use the same pools in the same way."""
        return dataclasses.replace(self, layer=0, ring=0, index=0, selection=OWN if self.selects else self.selection)

    @property
    def selects(self) -> bool:
        """Whether the layer scores keys and selects entries itself."""
        return self.selection == self.layer


def numbered(specs: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the specs of a model's layers with their places: `layer`, `ring`, and `index` of owners.

    Raises ValueError if a layer lacks a rate or a group, or reads entries or a selection that no layer before it makes.
    """
    stored: collections.Counter[str | None] = collections.Counter()
    placed: list[LayerSpec] = []
    for layer, spec in enumerate(specs):
        name, selection = f"layers[{layer}]", layer if spec.selection == OWN else spec.selection
        if spec.compress_rate < 0 or (spec.compress_rate > 0) != (spec.group is not None):
            given = f"compress_rate={spec.compress_rate} and group={spec.group!r}"
            raise ValueError(f"{name} has {given}; entries need a rate above 0 and a group")
        index = stored[spec.group] if spec.owner else spec.index
        stored[spec.group] += spec.owner
        if spec.group is not None and index >= stored[spec.group]:
            raise ValueError(f"{name} reads row {index} of group {spec.group!r}, which no layer before it stores")
        spec = dataclasses.replace(spec, layer=layer, ring=layer, index=index, selection=selection)
        placed.append(spec)
        if selection is not None and not (selection <= layer and placed[selection].selects):
            raise ValueError(f"{name} attends to the selection of layer {selection}, which is not an earlier indexer's")
        if spec.selects and not spec.keys:
            raise ValueError(f"{name} selects entries by index keys, which its group does not store: give keys=True")
    return tuple(placed)
