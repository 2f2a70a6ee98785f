"""The small trained model that comes with the package, and defaults of commands and benchmarks for checkpoints."""

import math
from importlib import resources
from pathlib import Path

from dsv4_jax.config import DSV4Config


BLOCK_TOKENS = 128  # a multiple of the released models' compression rates


def block_tokens(config: DSV4Config) -> int:
    """Returns the default number of tokens per block.

    It is the smallest common multiple of all compression rates that is not below `BLOCK_TOKENS`.
    """
    multiple = math.lcm(*(spec.compress_rate or 1 for spec in config.layers))
    return multiple * -(-BLOCK_TOKENS // multiple)


def packaged_checkpoint() -> Path:
    """Returns the folder of the small trained model that comes with the package."""
    return Path(str(resources.files("dsv4_jax") / "data" / "king_james"))


def read_config(checkpoint: Path, *, mtp: bool = False) -> DSV4Config:
    """Reads the config.json in a checkpoint's folder, or beside its file; `mtp` as in `DSV4Config.from_hf`."""
    return DSV4Config.from_hf(checkpoint, mtp=mtp)
