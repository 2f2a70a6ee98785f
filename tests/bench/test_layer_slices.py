"""Models with some of a model's layers."""

import pytest

from dsv4_jax.bench.layer_slices import (
    chosen_layers,
    layer_kinds,
    numbers_label,
    slice_config,
    with_sources,
)
from dsv4_jax.bench.step_options import ModelSetup
from dsv4_jax.config import DSV4Config
from dsv4_jax.parallel.mesh import make_mesh
from tests.v41 import v41_config


FLASH = DSV4Config.v4_flash()
V41 = DSV4Config.v41_flash()


def test_kinds_of_layers():
    assert layer_kinds(FLASH) == {0: 2, 2: 21, 3: 20}
    # Layers 1 and 14 have Engram. Layers 3, 21 and 25 reuse the selections of layers 2, 20 and 24.
    assert layer_kinds(V41) == {0: 1, 1: 1, 2: 2, 3: 15, 14: 1, 20: 1, 21: 3, 24: 4, 25: 12}


@pytest.mark.parametrize(
    ("config", "count", "numbers"),
    [
        (FLASH, 1, "0"),
        (FLASH, 2, "0, 2"),
        (FLASH, 29, "0-28"),
        (V41, 4, "0-3"),
        (V41, 9, "0-3, 14, 20-21, 24-25"),
        (V41, 12, "0-6, 14, 20-21, 24-25"),
        (V41, 40, "0-39"),
    ],
)
def test_some_layers_stand_for_the_model(config, count, numbers):
    layers = chosen_layers(config, count)
    assert numbers_label(layers) == numbers and len(layers) == count


def test_a_slice_renumbers_what_its_layers_read():
    sliced = slice_config(V41, (1, 8, 9, 20, 28, 30))
    engram, stores, reuses, makes, selects, reuses_it = sliced.specs
    assert engram.group is None and sliced.engram is not None and sliced.engram.layer_ids == (0,)
    assert (stores.index, stores.selection, reuses.index, reuses.selection) == (0, 1, 0, 1)
    assert (makes.candidates, selects.candidates, selects.selection) == (3, 3, 4)
    assert (reuses_it.group, reuses_it.selection, reuses_it.candidates) == ("full1", 4, None)
    for config, count in ((FLASH, 5), (V41, 16), (V41, 40)):
        assert slice_config(config, range(count)) == config.first_layers(count)


@pytest.mark.parametrize(("layer", "sources"), [(0, ()), (2, ()), (9, (8,)), (28, (20,)), (39, (20, 36))])
def test_a_layer_is_repeated_behind_its_sources(layer, sources):
    layers = with_sources(V41, [layer])
    assert layers == (*sources, layer)
    specs = slice_config(V41, layers, 3).specs
    assert len(specs) == len(sources) + 3
    assert len({spec.kind for spec in specs[len(sources) :]}) == 1
    assert [spec.owner for spec in specs[-3:]] == [V41.specs[layer].owner] * 3


def test_tables_are_reduced_to_what_a_device_holds():
    one = ModelSetup().fit_tables(V41)
    two = ModelSetup(mesh=make_mesh({"model": 2})).fit_tables(V41)
    for config, devices in ((one, 1), (two, 2)):
        size = 264 * sum(config.engram.num_embeddings)
        assert size == pytest.approx(devices * 2**33, rel=2e-3)
    assert one.engram.rows == V41.engram.rows
    for config in (FLASH, v41_config()):
        assert ModelSetup().fit_tables(config) == config
