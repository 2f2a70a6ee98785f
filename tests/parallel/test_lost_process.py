"""Errors of programs that several processes run."""

import jax
import pytest

from dsv4_jax.parallel.processes import lost_process_named


@pytest.mark.parametrize(
    ("processes", "kind", "message"),
    [
        (1, jax.errors.JaxRuntimeError, "^DEADLINE"),
        (2, RuntimeError, "process 1 of 2: another process .* start again. JAX says: DEADLINE"),
    ],
)
def test_the_loss_of_another_process_is_named(processes, kind, message, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(kind, match=message) as caught, lost_process_named():
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
    assert (type(caught.value) is RuntimeError) == (processes > 1)


def test_other_errors_are_as_they_were(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="^another$"), lost_process_named():
        raise ValueError("another")
