"""GPUs that cannot access each other's memory."""

import ctypes
import logging
from types import SimpleNamespace

import jax
import pytest

from dsv4_jax.parallel import mailboxes
from dsv4_jax.parallel.mailboxes import make_mailboxes


@pytest.mark.parametrize(("error", "answer", "first"), [(0, 0, 4), (101, 1, 6)], ids=["no access", "no such device"])
def test_without_peer_access_sums_are_left_to_xla(monkeypatch, caplog, error, answer, first):
    """One warning that names two of them, and no memory of a device is taken."""

    def can_access(result, device, peer):
        result._obj.value = answer
        return error

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceCanAccessPeer=can_access))
    monkeypatch.setattr(mailboxes, "why_no_mosaic_gpu", lambda: None)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[first : first + 2])
    with caplog.at_level(logging.WARNING, logger="dsv4_jax.parallel"):
        assert make_mailboxes(mesh) is None
        assert make_mailboxes(mesh) is None
    (record,) = caplog.records
    one, two = (str(device) for device in mesh.devices)
    assert f"{one} and {two} cannot access each other's memory" in record.getMessage()
    assert not mailboxes._mailboxes
