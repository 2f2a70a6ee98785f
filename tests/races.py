"""The race check of interpreted kernels, which `conftest.py` applies to every test."""

import contextlib
from unittest import mock

import jax
import numpy as np


@contextlib.contextmanager
def race_checked():
    """Fails if a kernel that is interpreted within it has a race; the interpreter prints which accesses race.

    JAX keeps the result of the last kernel only, and programs run several.
    """
    from jax._src import callback
    from jax._src.pallas.mosaic.interpret import race_detection_state as any_backend
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state, shared_memory

    running = []
    raced = []

    def start(**options):
        finish()
        # Not `gpu_callbacks`' own: an outer `race_checked` leaves these kernels to this one.
        running.append(race_detection_state.GPURaceDetectionState(**options))
        for accesses in (running[0].reads, running[0].writes):
            accesses.default_factory = Accesses
        return running[0]

    def finish():
        raced.extend(state for state in running if state.races_found)
        running.clear()

    with (
        mock.patch.object(gpu_callbacks, "GPURaceDetectionState", start),
        mock.patch.object(callback, "io_callback_impl", on_host),
        mock.patch.object(shared_memory, "_to_int", lambda x: x if isinstance(x, jax.core.Tracer) else int(x)),
        mock.patch.object(any_backend.RaceDetectionState, "check_read", check_read),
        mock.patch.object(any_backend.RaceDetectionState, "check_write", check_write),
    ):
        yield
        jax.effects_barrier()
    finish()
    assert not raced, f"{len(raced)} of the interpreted kernels have races"


def on_host(*args, callback, **unused):
    """Calls back with copies of NumPy's arrays, as it gets them: JAX moves each to a device first, which is slower."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))


class Accesses(list):
    """The reads, or the writes, of a buffer as JAX lists them, and their clocks in one array, compared at once."""

    clocks = np.zeros((0, 0), np.int32)

    def append(self, access):
        clock = access[1].clock
        if len(self) == len(self.clocks):
            self.clocks = np.resize(self.clocks, (2 * len(self) + 16, len(clock)))
        self.clocks[len(self)] = clock
        super().append(access)

    def unordered(self, clock):
        """Returns the accesses that happened neither before the clock nor after it."""
        if not self:
            return []
        clocks = self.clocks[: len(self)]
        before = (clocks <= clock.clock).all(axis=-1)
        after = (clocks >= clock.clock).all(axis=-1)
        return [self[i] for i in np.flatnonzero(before == after)]


def check_read(state, thread, clock, buffer_key, rnge, source_info=None):
    _check(state, "read", state.reads, [state.writes], (thread, clock, buffer_key, rnge, source_info))


def check_write(state, thread, clock, buffer_key, rnge, source_info=None):
    _check(state, "write", state.writes, [state.writes, state.reads], (thread, clock, buffer_key, rnge, source_info))


def _check(state, kind, own, others, access):
    """Does what JAX's check does, which compares an access with the earlier ones of its buffer one by one."""
    from jax._src import source_info_util
    from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap

    thread, clock, buffer_key, rnge, source_info = access
    frame = "pallas_call" if source_info is None else source_info_util.summarize(source_info)
    with state.lock:
        found = [other for accesses in others for other in accesses[buffer_key].unordered(clock)]
        own[buffer_key].append((thread, clock, rnge, frame))
    for other_thread, other_clock, other_rnge, other_frame in found:
        if _ranges_overlap(rnge, other_rnge):
            print(
                f"RACE DETECTED\n  {kind} of {buffer_key}[{rnge}] from {thread}, {frame}\n  clock: {clock.clock}\n"
                f"  {buffer_key}[{other_rnge}] from {other_thread}, {other_frame}\n  clock: {other_clock.clock}\n"
            )
            state.races_found = True
            return
