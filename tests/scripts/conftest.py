"""The scripts are imported by bare names, since they are no package."""

import sys

from tests.paths import DATA


sys.path.insert(0, str(DATA.parents[1] / "scripts"))
