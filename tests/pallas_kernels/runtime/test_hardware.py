"""Which GPUs are offered the kernels."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


def on_a_gpu(monkeypatch, **device):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="some GPU", **device)])
    return why_no_mosaic_gpu()


@pytest.mark.parametrize("capability", ["9.0", "9.1"])
def test_hopper_has_the_kernels(monkeypatch, capability):
    assert on_a_gpu(monkeypatch, compute_capability=capability) is None


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "10.0", "10.3", "12.0", "90.0"])
def test_others_do_not(monkeypatch, capability):
    reason = f"some GPU has compute capability {capability}; the kernels need 9.x (Hopper)"
    assert on_a_gpu(monkeypatch, compute_capability=capability) == reason


def test_other_backends_do_not(monkeypatch):
    assert "has compute capability None" in on_a_gpu(monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert why_no_mosaic_gpu() == "the default backend is 'cpu', not an NVIDIA GPU"
