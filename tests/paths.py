"""Where the oracle data and the packaged checkpoint lie."""

from pathlib import Path

import dsv4_jax


DATA = Path(__file__).parent / "data"
# Random weights; official_tiny has what the released code makes of them.
TINY = DATA / "official_tiny"
PACKAGED = Path(dsv4_jax.__file__).parent / "data" / "king_james"
