"""README's example runs as it stands, on the packaged checkpoint."""

import re
from pathlib import Path

from tests.paths import TINY


def test_the_example_runs(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert code.count('"path/to/checkpoint"') == 2
    scope = {}
    exec(code.replace('"path/to/checkpoint"', repr(str(TINY))), scope)
    assert scope["manager"].free_slots == 8
    assert int(scope["cache"].lengths[0]) == 103
