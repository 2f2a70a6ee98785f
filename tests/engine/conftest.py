"""The model and geometries of the decode tests."""

import sys

from tests.decode.conftest import manager, model, roomy, small, tight, wide  # noqa: F401
from tests.paths import DATA


sys.path.insert(0, str(DATA.parents[1] / "scripts"))  # scripts are imported by bare names, as they do among themselves
