"""A model whose layers have rates and sizes that no release has, and read entries that other layers store."""

import dataclasses

from dsv4_jax.config import DSV4Config, LayerSpec
from tests.paths import TINY


R2 = dict(compress_rate=2, overlap=True, group="r2", keys=True, key_compressor=True)
SPECS = (
    LayerSpec(0, window=13),
    LayerSpec(1, **R2, index=0, owner=True, selection=1),
    LayerSpec(2, compress_rate=8, group="r8", owner=True),
    LayerSpec(3, compress_rate=64, group="r64", owner=True, window=1),
    # Three that own nothing: one reuses a selection, one makes its own over another layer's keys, one takes everything.
    LayerSpec(4, **R2, index=0, selection=1),
    LayerSpec(5, **R2, index=0, selection=5, index_topk=7),
    LayerSpec(6, compress_rate=8, group="r8"),
    LayerSpec(7, **R2, index=1, owner=True, selection=7),
)


def rates_config(**changes):
    """The packaged model's widths with layers of rates 2, 8 and 64."""
    return dataclasses.replace(DSV4Config.from_hf(TINY).with_layers(SPECS), **changes)
