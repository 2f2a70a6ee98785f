"""Kills processes with SIGKILL while they write files of a prefix cache, and checks all files after each."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import tyro

from dsv4_jax.host.file_layout import FileLayout
from dsv4_jax.host.prefix.prefix_files import PrefixFiles


# A file is twice as large as a block of the packaged model.
STRUCT = {name: jax.ShapeDtypeStruct((4, 1, size), np.uint8) for name, size in (("entries", 40_000), ("keys", 9_000))}
LAYOUT = FileLayout("block", STRUCT, {"format": "a test"})
BATCH = 16


def digest(i: int) -> bytes:
    """Returns the digest of file i."""
    return i.to_bytes(32, "little")


def content(first: int) -> dict[str, np.ndarray]:
    """Returns the arrays of the files from `first` on, which follow from their digests."""
    rngs = [np.random.default_rng(first + i) for i in range(BATCH)]
    draws = ([rng.integers(0, 256, x.shape, np.uint8) for x in STRUCT.values()] for rng in rngs)
    return {name: np.concatenate(x, axis=1) for name, x in zip(STRUCT, zip(*draws, strict=True), strict=True)}


def write(folder: Path, first: int) -> None:
    """Writes files until the process is killed."""
    files = PrefixFiles(folder, "1GB")
    while True:
        digests = [digest(first + i) for i in range(BATCH)]
        files.save(LAYOUT, digests, lambda: content(first), used=time.time_ns(), wait=True)  # noqa: B023
        first += BATCH


def check(folder: Path) -> tuple[int, int]:
    """Reads all files as the next start does. Returns the number of whole files and of unfinished ones."""
    names = os.listdir(folder)
    found = sorted(int.from_bytes(bytes.fromhex(n[:64]), "little") for n in names if not n.startswith("."))
    files = PrefixFiles(folder, "1GB")
    for i in found:
        count, arrays = files.read(LAYOUT, [digest(i)])
        assert count == 1, f"file {i} is damaged"
        expected = content(i - i % BATCH)
        for name, x in arrays.items():
            np.testing.assert_array_equal(x[:, 0], expected[name][:, i % BATCH])
    files.flush()
    assert files.metrics.errors == 0 and files.metrics.blocks == len(found)
    return len(found), len(names) - len(found)


def kill(rounds: int = 100, seed: int = 0) -> None:
    """Kills a writer in each round, 0.1 to 0.6 s after its start, and prints what it left.

    Args:
      rounds: number of rounds.
      seed: seed of the times.
    """
    rng = random.Random(seed)
    whole = 0
    unfinished = 0
    for round_ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            # JAX has not started a backend, so a fork is safe; the child uses NumPy only.
            if not (pid := os.fork()):
                try:
                    write(Path(folder), 1000 * BATCH * round_)
                finally:
                    os._exit(1)
            time.sleep(rng.uniform(0.1, 0.6))
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the writer failed"
            found = check(Path(folder))
            whole = whole + found[0]
            unfinished = unfinished + found[1]
    print(f"{rounds} kills left {whole} whole files, all with the right bytes, and {unfinished} unfinished ones")
    if not whole or not unfinished:
        raise SystemExit("no kill came during a write: the test shows nothing")


if __name__ == "__main__":
    tyro.cli(kill)
