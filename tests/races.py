"""The race check of interpreted kernels, which `conftest.py` applies to every test."""

import contextlib
from unittest import mock

import jax


@contextlib.contextmanager
def race_checked():
    """Fails if a kernel that is interpreted within it has a race; the interpreter prints which accesses race.

    JAX keeps the result of the last kernel only, and programs run several.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state

    running, raced = [], []

    def start(**options):
        finish()
        # Not `gpu_callbacks`' own: an outer `race_checked` leaves these kernels to this one.
        running.append(race_detection_state.GPURaceDetectionState(**options))
        return running[0]

    def finish():
        raced.extend(state for state in running if state.races_found)
        running.clear()

    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", start):
        yield
        jax.effects_barrier()
    finish()
    assert not raced, f"{len(raced)} of the interpreted kernels have races"
