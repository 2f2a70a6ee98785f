"""The spec of a layer, which says what the layer stores in the cache and to which entries it attends."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from dsv4_jax.common.arguments import check, check_whole


# Kinds of attention, by their names in transformers' config.json.
SLIDING = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
LAYER_TYPES = (SLIDING, CSA, HCA)

OWN = -1  # stands for the layer's own number
MAX_ROWS = 2**20  # maximum of rates, window sizes, top-k and the like; far beyond any model
# Fields of `LayerSpec` that hold the number of a layer.
_SOURCES = ("selection", "candidates")
# {field of `LayerSpec`: its minimum}.
_LEAST = {"compress_rate": 0, "index": 0, "window": 1, "index_topk": 1}


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer's use of the cache. `LayerSpec()` is a layer that attends to a sliding window only.

    A compressed entry stands for a number of consecutive tokens. An index key is a vector by which the indexer scores
    an entry. A layer need not store the entries that it attends to, nor the keys that it scores: an earlier layer of
    its group may store them.

    Attributes:
      layer: number of the layer in the model, which is also its index on axis 0 of the array of sliding windows; -1
        until `numbered` sets it.
      compress_rate: number of tokens per entry that the layer attends to; 0 = it attends to no entries.
      overlap: whether an entry pools the tokens of the previous entry, too.
      group: name of the pool group that holds the entries; None without entries.
      index: index of the layer's entries on axis 0 of the group's pools. `numbered` sets it if the layer is an owner.
      owner: whether the layer stores the entries itself, with a compressor.
      keys: whether the group stores an index key for each entry.
      key_compressor: whether a separate compressor makes the keys; otherwise they are made from the entries' vectors.
      selection: number of the layer whose top-k selection of entries the layer attends to. It is the layer itself,
        which may be given as -1, or an earlier layer with the same compression rate. None = all visible entries.
      window: number of tokens in the layer's sliding window, including the token itself; None = the configuration's
        `sliding_window`.
      index_topk: number of entries that the layer selects, if it selects them itself; None = the configuration's
        `index_topk`.
      position_bias: whether the compressor adds a bias by position in the window to the pooling logits.
      candidates: number of the layer whose candidate blocks restrict what the layer selects (V4.1). If it is the layer
        itself, which may be given as -1, the layer selects freely and makes candidates. None = the layer selects freely
        and makes no candidates.
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
    position_bias: bool = True
    candidates: int | None = None

    @classmethod
    def csa(cls, rate: int = 4, **fields: Any) -> "LayerSpec":
        """Returns the spec of compressed sparse attention (CSA): entries overlap, and an indexer selects the top k.

        Args:
          rate: number of tokens per entry. Layers with the same rate share a pool group, named "csa" and the rate.
          **fields: values of other attributes, such as `window=64` or `owner=False`.
        """
        differences = {
            "group": f"csa{rate}", "overlap": True, "keys": True, "key_compressor": True, "selection": OWN,
        }  # fmt: skip
        return cls.hca(rate, **differences | fields)

    @classmethod
    def hca(cls, rate: int = 128, **fields: Any) -> "LayerSpec":
        """Returns the spec of heavily compressed attention (HCA): entries do not overlap, and all are attended to.

        Args:
          rate: number of tokens per entry. Layers with the same rate share a pool group, named "hca" and the rate.
          **fields: values of other attributes, such as `window=64` or `owner=False`.
        """
        return dataclasses.replace(cls(compress_rate=rate, group=f"hca{rate}", owner=True), **fields)

    @classmethod
    def full(cls, rate: int, **fields: Any) -> "LayerSpec":
        """Returns the spec of a V4.1 layer that stores entries and their keys, and selects the top k of them.

        The keys are made from the pooled vectors of the entries, which do not overlap.

        Args:
          rate: number of tokens per entry. Layers with the same rate share a pool group, named "full" and the rate.
          **fields: values of other attributes, such as `candidates=-1`.
        """
        differences = {"group": f"full{rate}", "keys": True, "selection": OWN, "position_bias": False}
        return cls.hca(rate, **differences | fields)

    @classmethod
    def of_ratio(cls, ratio: int) -> "LayerSpec":
        """Returns the spec of a layer from its element of `compress_ratios` in a release of DeepSeek-V4.

        0 and 1 stand for a sliding window only, 4 for CSA, and any other number for HCA with this rate.
        """
        return cls() if ratio in (0, 1) else cls.csa() if ratio == cls.csa().compress_rate else cls.hca(ratio)

    @property
    def layer_type(self) -> str:
        """The name of the layer's kind of attention in transformers' config.json, one of `LAYER_TYPES`."""
        return SLIDING if self.group is None else HCA if self.selection is None else CSA

    @property
    def kind(self) -> "LayerSpec":
        """The spec without `layer` and `index`, which is equal for layers that use the cache in the same way.

        If the layer selects entries itself, `selection` is -1. If it makes candidates itself, `candidates` is -1.
        """
        return _renumbered(self, self.layer, OWN, 0)

    @property
    def selects(self) -> bool:
        """Whether the layer scores keys and selects entries itself."""
        return self.selection == self.layer

    @property
    def makes_candidates(self) -> bool:
        """Whether the layer makes the candidate blocks to which later layers are restricted."""
        return self.candidates == self.layer


def _renumbered(spec, old, new, index):
    """Returns the spec with the number `new` and the given index. Its sources with the number `old` get `new`, too."""
    sources: dict[str, Any] = {name: new for name in _SOURCES if getattr(spec, name) == old}
    return dataclasses.replace(spec, layer=new, index=index, **sources)


def numbered(specs: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Returns the specs of a model's layers with the attributes that follow from their order.

    These are `layer`, the `index` of each owner, and each `selection` or `candidates` that is given as -1.

    Raises:
      TypeError: a layer is no LayerSpec, or a number in it is no integer.
      ValueError: a number is out of range, or a layer's attributes contradict one another, its place in the model, its
        group or the layers before it. The message names the layer and the attribute.
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
        group_owners = owners.setdefault(unplaced.group, [])
        spec = _renumbered(unplaced, OWN, layer, len(group_owners) if unplaced.owner else unplaced.index)
        placed.append(spec)
        if spec.owner:
            group_owners.append(spec)
        for fault in _faults(spec, unplaced, placed, group_owners):
            raise ValueError(f"{name} {fault}")
    return tuple(placed)


def check_layers(name: str, layers: Sequence[int], num_layers: int) -> None:
    """Checks numbers of layers of a model with `num_layers` layers.

    Raises TypeError for a number that is no integer, and ValueError if one is out of range or they do not ascend.
    """
    for i, layer in enumerate(layers):
        check_whole(f"{name}[{i}]", layer, 0, num_layers - 1)
    check(sorted({*layers}) == list(layers), f"{name}={list(layers)} must ascend")


def shared_specs(
    rates: Sequence[int], kv_sources: Sequence[int], index_sources: Sequence[int], candidate_source: int | None
) -> tuple[LayerSpec, ...]:
    """Returns the specs of V4.1's layers, of which few store entries or select entries.

    A layer with a rate above 0 has a KV source and an index source. Each is the layer itself or an earlier layer. The
    KV source is the latest layer that stores entries, and the layer attends to these entries. The index source is the
    latest layer that selects entries, and the layer attends only to the selected ones.

    Args:
      rates: number of tokens per entry that each layer attends to; 0 = a sliding window only.
      kv_sources: numbers of the layers that store entries, ascending. Each of them selects entries, too.
      index_sources: numbers of the layers that select entries, ascending.
      candidate_source: number of the layer that makes candidates for the layers that select after it; None = no layer.

    Raises:
      TypeError: the number of a source is no integer.
      ValueError: in one of these cases, where the message calls the arguments by their names in config.json:

        * The number of a source is out of range or belongs to a layer with rate 0, or the numbers do not ascend.
        * `index_sources` lacks a KV source.
        * `candidate_source` is not an index source with rate 1.
        * A layer with a rate above 0 has no KV source, or a KV source with another rate.
    """
    _check_sources(rates, kv_sources, index_sources, candidate_source)
    specs: list[LayerSpec] = []
    source_specs: list[LayerSpec] = []  # specs of the KV sources so far
    index_source = None  # number of the index source
    for layer, rate in enumerate(rates):
        if rate == 0:
            specs.append(LayerSpec())
            continue
        is_kv_source = layer in kv_sources
        if is_kv_source:
            source_specs.append(LayerSpec.full(rate, index=sum(spec.compress_rate == rate for spec in source_specs)))
        is_index_source = layer in index_sources
        if is_index_source:
            index_source = layer
        check(
            bool(source_specs),
            f"compress_ratios[{layer}]={rate}, but kv_source_layer_ids={list(kv_sources)} begin later",
        )
        source_spec = source_specs[-1]
        check(
            source_spec.compress_rate == rate,
            f"compress_ratios[{layer}]={rate}, but the layer attends to entries of {source_spec.compress_rate} tokens, "
            f"by kv_source_layer_ids={list(kv_sources)}",
        )
        is_restricted = is_index_source and candidate_source is not None and candidate_source <= layer
        candidates = candidate_source if is_restricted else None
        specs.append(
            dataclasses.replace(source_spec, owner=is_kv_source, selection=index_source, candidates=candidates)
        )
    return numbered(specs)


def _check_sources(rates, kv_sources, index_sources, candidate_source):
    """Checks the arguments of `shared_specs`, but not whether each layer has a source with its rate."""
    for name, layers in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
        check_layers(name, layers, len(rates))
        for i, layer in enumerate(layers):
            check(rates[layer] > 0, f"{name}[{i}]={layer}, but compress_ratios[{layer}]=0: the layer has no entries")
    missing = sorted({*kv_sources} - {*index_sources})
    check(not missing, f"index_source_layer_ids={list(index_sources)} must have kv_source_layer_ids' {missing}, too")
    if candidate_source is not None:
        name = f"candidate_source_layer_id={candidate_source!r}"
        check(candidate_source in index_sources, f"{name} must be one of index_source_layer_ids={list(index_sources)}")
        rate = rates[candidate_source]
        check(rate == 1, f"{name} must be a layer of rate 1, but compress_ratios[{candidate_source}]={rate}")


def _faults(spec, unplaced, placed, owners):
    """Yields a description of each mistake in a layer's spec.

    Later checks rely on earlier ones, so the caller must stop at the first mistake.

    Args:
      spec: the spec with the attributes that `numbered` sets.
      unplaced: the spec as it was given.
      placed: specs of all layers up to this one.
      owners: specs of the layers up to this one that store entries of its group.
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
    for field in ("compress_rate", "overlap", "keys", "key_compressor", "position_bias"):
        if (value := getattr(spec, field)) != (group_value := getattr(owners[0], field)):
            yield f"has {field}={value}, but group {group!r} has {field}={group_value} in layers[{owners[0].layer}]"
    if (spec.selects or spec.key_compressor) and not spec.keys:
        yield "selects entries by index keys, or pools them, which its group does not store: give keys=True"
    if spec.index_topk and not spec.selects:
        yield f"has index_topk={spec.index_topk}, but does not select entries itself"
    if spec.candidates is not None:
        if not spec.selects:
            yield f"has candidates={spec.candidates}, but does not select entries itself"
        source = placed[spec.candidates] if 0 <= spec.candidates <= spec.layer else None
        if source is None or not source.makes_candidates:
            yield f"is restricted to the candidates of layer {spec.candidates}, which makes none before it"
        elif source.compress_rate != rate:
            yield f"scores entries of {rate} tokens, but layer {source.layer} makes candidates of other entries"
    if spec.selection is None:
        return
    selector = placed[spec.selection] if 0 <= spec.selection <= spec.layer else None
    if selector is None or not selector.selects:
        yield f"attends to the selection of layer {spec.selection}, which is not an earlier indexer's"
    elif selector.compress_rate != rate:
        yield (
            f"has entries of {rate} tokens, but attends to the selection of layer {selector.layer}, whose entries have "
            f"{selector.compress_rate}: some would not exist yet"
        )
