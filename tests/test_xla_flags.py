"""XLA's options for decoding are added to those that a user has set."""

import os

import jax
import pytest

from dsv4_jax import set_xla_flags
from dsv4_jax.common import xla_flags
from dsv4_jax.common.xla_flags import FLAGS


OURS = " ".join(f"--{name}={value}" for name, value in FLAGS.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, OURS),
        ("", OURS),
        ("--xla_dump_to=x", f"--xla_dump_to=x {OURS}"),
        (OURS, OURS),
        (
            "--xla_disable_hlo_passes=dce",
            "--xla_disable_hlo_passes=dce --xla_cpu_enable_platform_dependent_math=false",
        ),
        (
            "--xla_cpu_enable_platform_dependent_math=true",
            "--xla_cpu_enable_platform_dependent_math=true --xla_disable_hlo_passes=rematerialization",
        ),
    ],
)
def test_flags_are_added_and_given_ones_stay(monkeypatch, before, after):
    monkeypatch.setattr(xla_flags, "jax_has_started", lambda: False)
    if before is None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    else:
        monkeypatch.setenv("XLA_FLAGS", before)
    set_xla_flags()
    assert os.environ["XLA_FLAGS"] == after


def test_flags_that_xla_would_not_see_are_refused(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", OURS)
    set_xla_flags()  # nothing to add
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    with pytest.raises(RuntimeError, match=f"JAX has started, so XLA would not see {OURS}: call set_xla_flags"):
        set_xla_flags()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x"
