"""Configurations of models that have only some of a model's layers.

A layer may read entries that another layer stores, or use another layer's selection, as most layers of V4.1 do. A model
with this layer therefore includes the other layer, too.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable

from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import OWN


def with_sources(config: DSV4Config, layers: Iterable[int]) -> tuple[int, ...]:
    """Returns the sorted indices of some layers and of all layers that store or select entries for them."""
    needed = set(layers)
    while more := {source for layer in needed for source in _sources(config, layer)} - needed:
        needed |= more
    return tuple(sorted(needed))


def _sources(config, layer):
    """Returns the indices of the layers whose entries, selection or candidates a layer uses; may include the layer."""
    spec = config.specs[layer]
    owners = [other.layer for other in config.specs if other.owner and _place(other) == _place(spec)]
    return [source for source in (*owners, spec.selection, spec.candidates) if source is not None]


def _place(spec):
    """Returns the group and the index under which the cache stores the entries that a layer attends to."""
    return spec.group, spec.index


def slice_config(config: DSV4Config, layers: Iterable[int], repeats: int = 1, *, hashed: bool = True) -> DSV4Config:
    """Returns the configuration of a model that has only some of a model's layers.

    Args:
      config: configuration of the whole model.
      layers: indices of the layers in ascending order, with all layers that they need, see `with_sources`.
      repeats: number of copies of the last layer.
      hashed: whether the layers that select experts by token id still do so. If False, all layers select by scores.
    """
    numbers = list(layers)
    specs = _sliced_specs(config, numbers)
    numbers += numbers[-1:] * (repeats - 1)
    specs += specs[-1:] * (repeats - 1)
    mlps = [config.mlp_layer_types[number] for number in numbers] if hashed else None
    sliced = dataclasses.replace(config, engram=None).with_layers(specs, mlps)
    engram_layers = [i for i, number in enumerate(numbers) if config.has_engram(number)]
    if config.engram is None or not engram_layers:
        return sliced
    return dataclasses.replace(sliced, engram=config.engram.resized(engram_layers, config.engram.vocab_size))


def _sliced_specs(config, numbers):
    """Returns the specs of the layers `numbers`. A spec refers to another layer by its position in `numbers`."""
    new_numbers = {number: i for i, number in enumerate(numbers)}
    indices = {}  # {group and index in the whole model: index in the slice}
    counts = collections.Counter()
    specs = []
    for number in numbers:
        spec = config.specs[number]
        if spec.owner:
            indices[_place(spec)] = counts[spec.group]
            counts[spec.group] += 1
        changes = {"layer": OWN, "index": 0 if spec.owner else indices.get(_place(spec), 0)}
        for name in ("selection", "candidates"):
            source = getattr(spec, name)
            if source is not None:
                changes[name] = OWN if source == number else new_numbers[source]
        specs.append(dataclasses.replace(spec, **changes))
    return specs


def layer_kinds(config: DSV4Config) -> dict[int, int]:
    """Returns {index of the first layer of a kind: number of layers of this kind} for all kinds of layers.

    Two layers are of the same kind if they use the cache in the same way, and so do the layers that they read from. A
    layer with Engram and one without it are of different kinds.
    """
    firsts = {}  # {properties of a kind: index of the kind's first layer}
    counts = collections.Counter()
    for layer in range(config.num_hidden_layers):
        specs = _sliced_specs(config, with_sources(config, [layer]))
        counts[firsts.setdefault((tuple(specs), config.has_engram(layer)), layer)] += 1
    return dict(counts)


def chosen_layers(config: DSV4Config, count: int) -> tuple[int, ...]:
    """Returns the indices of up to `count` layers that represent the model.

    The first layer of each kind is chosen, with the layers that it needs, unless the result would exceed `count`. Then
    the model's other layers are added in ascending order under the same condition.
    """
    chosen = set()
    for layer in (*layer_kinds(config), *range(config.num_hidden_layers)):
        more = chosen.union(with_sources(config, [layer]))
        if len(more) <= count:
            chosen = more
    return tuple(sorted(chosen))


def numbers_label(numbers: Collection[int]) -> str:
    """Formats ascending numbers, with ranges of consecutive ones, such as "0-3, 14, 20-24"."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    ranges = zip(starts, ends, strict=True)
    return ", ".join(f"{start}-{end}" if start < end else str(start) for start, end in ranges)
