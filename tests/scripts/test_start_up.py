"""A second process finds what the first one compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


SCRIPT = Path(__file__).parents[2] / "scripts/start_up.py"


@pytest.mark.slow
def test_a_second_process_compiles_nothing():
    first, second = start_up("--layers", "1", "--context", "256")
    assert first[-1] > second[-1] == 0


@pytest.mark.gpu
def test_a_second_process_starts_soon():
    """With V4-Flash's layers and their kernels."""
    (first, *_), (second, *_) = start_up()
    assert first <= 120 and second <= 25


def start_up(*options):
    """The numbers of the script's two lines."""
    env = os.environ | dict(COLUMNS="100")
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " first " in line or " second " in line]
    return [[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines[-2:]]
