"""The spec of a layer: its pools in the cache and the entries that it reads, as data."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from dsv4_jax.common.arguments import check_whole


# The names of transformers' config.json for the attention of a layer.
SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, CSA, HCA)

OWN = -1
MAX_ROWS = 2**20  # far beyond any model's window or selection, whose sizes no weight's shape confirms
_LEAST = {"compress_rate": 0, "index": 0, "window": 1, "index_topk": 1}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Describes one layer's use of the cache; without arguments, a layer that has a window only.

    Reading and owning are separate: a layer may attend to entries, and score keys, that an earlier layer stores.

    Attributes:
      layer: number of the layer in the model, which is also its row on axis 0 of the sliding-window rings; -1 until
        `numbered` sets it.
      compress_rate: number of tokens per entry that the layer attends to; 0 = window only.
      overlap: whether an entry pools its own window and the previous one.
      group: name of the pool group with the layer's entries; None without entries.
      index: the layer's row on axis 0 of that group's pools; `numbered` sets it if the layer owns the row.
      owner: whether the layer stores these entries itself, with a compressor.
      keys: whether an index key is stored beside each entry.
      key_compressor: whether a separate compressor pools the keys; otherwise keys are made from the entries' vectors.
      selection: number of the layer whose top-k selection is attended to: this layer, which may be given as -1, or an
        earlier one, whose entries have as many tokens. None = all visible entries.
      window: number of tokens in the layer's window, itself included; None = the configuration's `sliding_window`.
      index_topk: number of entries that a layer which selects them takes; None = the configuration's.
    """

    layer: int = OWN
    compress_rate: int = 0
    overlap: bool = False
    group: str | None = None
    index: int = 0
    owner: bool = False
    keys: bool = False
    key_compressor: bool = False
    selection: int | None = None
    window: int | None = None
    index_topk: int | None = None

    @classmethod
    def csa(cls, rate: int = 4, **fields: Any) -> "LayerSpec":
        """Returns the spec of compressed sparse attention: overlapping windows, and an indexer that selects entries.

        An entry has `rate` tokens. Layers of one rate share the pools of a group, "csa" and the rate. `**fields` are
        values of other attributes, such as `window=64` or `owner=False`.
        """
        spec = cls(
            compress_rate=rate, group=f"csa{rate}", owner=True, overlap=True, keys=True, key_compressor=True,
            selection=OWN,
        )  # fmt: skip
        return dataclasses.replace(spec, **fields)

    @classmethod
    def hca(cls, rate: int = 128, **fields: Any) -> "LayerSpec":
        """Returns the spec of heavily compressed attention: all entries of windows that do not overlap.

        An entry has `rate` tokens. Layers of one rate share the pools of a group, "hca" and the rate. `**fields` are
        values of other attributes, such as `window=64` or `owner=False`.
        """
        return dataclasses.replace(cls(compress_rate=rate, group=f"hca{rate}", owner=True), **fields)

    @classmethod
    def of_ratio(cls, ratio: int) -> "LayerSpec":
        """Returns the spec of a layer from its number in the release's `compress_ratios`."""
        return cls() if ratio in (0, 1) else cls.csa() if ratio == cls.csa().compress_rate else cls.hca(ratio)

    @property
    def layer_type(self) -> str:
        """The name of such attention in transformers' config.json, one of `LAYER_TYPES`."""
        return SLIDING if self.group is None else HCA if self.selection is None else CSA

    @property
    def kind(self) -> "LayerSpec":
        """The spec without the layer's own places: layers of one kind use the same pools in the same way."""
        return dataclasses.replace(self, layer=OWN, index=0, selection=OWN if self.selects else self.selection)

    @property
    def selects(self) -> bool:
        """Whether the layer scores keys and selects entries itself."""
        return self.selection == self.layer


def numbered(specs: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the specs of a model's layers with their places: `layer`, and `index` of owners.

    Raises:
      TypeError: a layer is no LayerSpec, or a number in it is not whole.
      ValueError: a number is out of range; a layer lacks a rate or a group, has a number or row that is not its place,
        differs from the layer that stores its entries, or reads entries or a selection that no layer before it makes.
    """
    owners: dict[str | None, list[LayerSpec]] = {}
    placed: list[LayerSpec] = []
    for layer, unplaced in enumerate(specs):
        name = f"layers[{layer}]"
        if not isinstance(unplaced, LayerSpec):
            raise TypeError(f"{name}={unplaced!r} must be a LayerSpec")
        for field, least in _LEAST.items():
            if (value := getattr(unplaced, field)) is not None:
                check_whole(f"{name}.{field}", value, least, MAX_ROWS)
        stored = owners.setdefault(unplaced.group, [])
        selection = layer if unplaced.selection == OWN else unplaced.selection
        index = len(stored) if unplaced.owner else unplaced.index
        spec = dataclasses.replace(unplaced, layer=layer, index=index, selection=selection)
        placed.append(spec)
        if spec.owner:
            stored.append(spec)
        for fault in _faults(spec, unplaced, placed, stored):
            raise ValueError(f"{name} {fault}")
    return tuple(placed)


def _faults(spec, unplaced, placed, owners):
    """Yields what a layer claims wrongly. The caller stops at the first fault: later checks rely on earlier ones.

    Args:
      spec: the spec with its places.
      unplaced: the spec without.
      placed: specs of all layers up to this one.
      owners: those that store a row of its group.
    """
    rate = spec.compress_rate
    group = spec.group
    if unplaced.layer not in (OWN, spec.layer):
        yield f"is given as layer={unplaced.layer}; leave the number out, as LayerSpec.kind does"
    if (rate > 0) != (group is not None):
        yield f"has compress_rate={rate} and group={group!r}; entries need a rate above 0 and a group"
    if group is None:
        if spec != LayerSpec(spec.layer, window=spec.window):
            yield f"has no group, so it can have no attribute but its window: {spec}"
        return
    if unplaced.index not in (0, spec.index):
        yield f"has index={unplaced.index}, but stores row {spec.index} of group {group!r}"
    if spec.index >= len(owners):
        yield f"reads row {spec.index} of group {group!r}, which no layer before it stores"
    for field in ("compress_rate", "overlap", "keys", "key_compressor"):
        if (mine := getattr(spec, field)) != (stored := getattr(owners[0], field)):
            yield f"has {field}={mine}, but group {group!r} has {field}={stored} in layers[{owners[0].layer}]"
    if (spec.selects or spec.key_compressor) and not spec.keys:
        yield "selects entries by index keys, or pools them, which its group does not store: give keys=True"
    if spec.index_topk and not spec.selects:
        yield f"has index_topk={spec.index_topk}, but does not select entries itself"
    if spec.selection is None:
        return
    if not 0 <= spec.selection <= spec.layer or not (chosen := placed[spec.selection]).selects:
        yield f"attends to the selection of layer {spec.selection}, which is not an earlier indexer's"
    if chosen.compress_rate != rate:
        yield (
            f"has entries of {rate} tokens, but attends to the selection of layer {chosen.layer}, whose entries have "
            f"{chosen.compress_rate}: some would not exist yet"
        )
