"""`dsv4-jax chat`: its option --thinking. tests/serve/test_chat.py has conversations with a server."""

import pytest

from dsv4_jax.cli.chat_command import _Session


@pytest.mark.parametrize("thinking", ["0", "101", "1000000", "-5", "5.5", "much", "٥"])
def test_another_effort_is_refused(refused, thinking):
    expected = f"thinking {thinking} must be off, low, high, max, or with DeepSeek-V4.1 a number from 1 to 100"
    assert expected in " ".join(refused("chat", "--thinking", thinking, "--url", "http://127.0.0.1:9").split())


def test_an_effort_is_sent_as_a_name_or_a_number():
    options = {}
    session = _Session("", {}, options, None)
    enabled = {"thinking": {"type": "enabled"}}
    for thinking, effort in {"low": "low", "max": "max", "1": 1, "60": 60, "100": 100}.items():
        session.think(thinking)
        assert options == enabled | {"reasoning_effort": effort}
    session.think("off")
    assert options == {"thinking": {"type": "disabled"}}
