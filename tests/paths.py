"""Where the oracle data and the packaged checkpoint lie."""

from pathlib import Path

import dsv4_jax


DATA = Path(__file__).parent / "data"
PACKAGED = Path(dsv4_jax.__file__).parent / "data" / "tiny"
