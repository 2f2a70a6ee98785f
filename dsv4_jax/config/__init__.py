"""The model's configuration: sizes, layers, RoPE and draft layers. Importing it imports neither JAX nor NumPy."""

from dsv4_jax.config.draft_config import DSparkConfig
from dsv4_jax.config.dsv4_config import DSV4Config
from dsv4_jax.config.engram_config import EngramConfig
from dsv4_jax.config.layer_spec import LayerSpec, shared_specs
from dsv4_jax.config.rope_scaling import RopeScaling


def __dir__() -> list[str]:
    return ["DSV4Config", "DSparkConfig", "EngramConfig", "LayerSpec", "RopeScaling", "shared_specs"]
