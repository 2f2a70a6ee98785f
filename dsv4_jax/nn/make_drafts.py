"""The choice of the module that makes a model's drafts."""

from typing import Any

from dsv4_jax.config import DSparkConfig, DSV4Config, MTPConfig
from dsv4_jax.nn.draft_layers import DraftLayers
from dsv4_jax.nn.dspark import DSparkDrafts
from dsv4_jax.nn.mtp import MTPDrafts


_MODULES: dict[type[Any], type[DraftLayers]] = {MTPConfig: MTPDrafts, DSparkConfig: DSparkDrafts}


def make_drafts(config: DSV4Config, **options: Any) -> DraftLayers | None:
    """Returns the module that `config.drafts` describes, or None.

    The options are its arguments `param_dtype` and `rngs`.
    """
    return None if config.drafts is None else _MODULES[type(config.drafts)](config, **options)
