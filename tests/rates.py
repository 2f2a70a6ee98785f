"""A model whose layers compress at rates that no release has, and read entries that other layers store."""

import dataclasses

from dsv4_jax.config import SLIDING, DSV4Config, LayerSpec
from tests.paths import TINY


R2 = dict(compress_rate=2, overlap=True, group="r2", keys=True, key_compressor=True)
SPECS = (
    LayerSpec(0, ring=0),
    LayerSpec(1, ring=1, **R2, index=0, owner=True, selection=1),
    LayerSpec(2, ring=2, compress_rate=8, group="r8", owner=True),
    LayerSpec(3, ring=3, compress_rate=64, group="r64", owner=True),
    # Three that own nothing: one reuses a selection, one makes its own over another layer's keys, one takes everything.
    LayerSpec(4, ring=4, **R2, index=0, selection=1),
    LayerSpec(5, ring=5, **R2, index=0, selection=5),
    LayerSpec(6, ring=6, compress_rate=8, group="r8"),
    LayerSpec(7, ring=7, **R2, index=1, owner=True, selection=7),
)


def rates_config(**changes):
    """The packaged model's widths with layers of rates 2, 8 and 64."""
    count = len(SPECS)
    kinds = dict(num_hidden_layers=count, layer_types=(SLIDING,) * count, mlp_layer_types=("moe",) * count)
    return dataclasses.replace(DSV4Config.from_hf(TINY), **kinds | changes, specs=SPECS)
