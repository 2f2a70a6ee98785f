"""The prefix cache's files: the same bytes in another process's cache, and faults that end in a miss."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from dsv4_jax.cache.request_rows import read_blocks, read_request
from dsv4_jax.host import CacheFullError, PrefixFiles
from dsv4_jax.host.file_layout import FileLayout
from tests.host.managers import BLOCK, host_state, ids, make, random_cache
from tests.host.test_prefix_cache import Cached
from tests.ops.pools import same_bytes


SIZE = "10MB"
LAYOUT = FileLayout("block", dict(x=jax.ShapeDtypeStruct((2, 1, 3), np.float32)), {"format": "test"})


def stored(folder, n=0, manager=None, size=SIZE, **options):
    """A cache with files in `folder`: of zeros, or of random bytes that a prompt of `n` tokens has used."""
    cached = Cached(manager=manager, files=PrefixFiles(folder, size, **options))
    cached.prefix.get_cache = lambda: cached.cache
    if n:
        cached.cache = random_cache(cached.manager)
        cached.run(ids(n))
    return cached


def request_bytes(cached, slot):
    """The blocks, and the rows at the end, of a request at a block boundary."""
    manager = cached.manager
    length = np.int32(cached.manager.length(slot))
    blocks = np.array(manager.requests.state(slot).blocks, np.int32)
    rows = read_request(cached.cache, np.int32(slot), length, length, boundary=True)
    return jax.device_get((read_blocks(cached.cache, blocks, np.int32(0), length), rows))


def saved(folder, n=80):
    """Writes the blocks of a prompt of `n` tokens. Returns the bytes of a request that finds them."""
    cached = stored(folder, n)
    slot, hit = cached.admit(ids(n + 1))
    assert hit == n
    before = request_bytes(cached, slot)
    cached.prefix.save(cached.cache)
    return before


def names(folder, kind=""):
    return sorted(name for name in os.listdir(folder) if name.endswith(kind))


def digest(i):
    return bytes([i]) * 32


def value(i, n=1):
    return {"x": np.full((2, n, 3), i, np.float32)}


class TestRestart:
    def test_too_few_bytes_keep_the_beginning_of_a_running_requests_prefix(self, tmp_path):
        sizes = stored(tmp_path).prefix._stored
        room = 2 * (sizes._blocks.nbytes + sizes._snapshots.nbytes)
        cached = stored(tmp_path, size=room)
        cached.run(ids(64), keep=True)
        cached.prefix.save(cached.cache)
        assert stored(tmp_path).admit(ids(65))[1] == 32

    def test_another_cache_finds_the_same_bytes(self, tmp_path):
        before = saved(tmp_path)
        assert len(names(tmp_path, "block")) == len(names(tmp_path, "snapshot")) == 5
        again = stored(tmp_path)
        slot, hit = again.admit(ids(90))
        assert hit == 80
        same_bytes(request_bytes(again, slot), before)
        state = again.manager.requests.state(slot)
        assert (state.length, state.min_length, len(state.cached_blocks)) == (80, 80, 5)
        files = again.prefix.metrics.files
        assert (files.hit_tokens, files.errors, files.dropped) == (80, 0, 0) and files.read_bytes > 0
        # They are cached in memory now.
        again.manager.release(slot)
        assert again.hit(ids(90)) == 80 and again.prefix.metrics.files.hit_tokens == 80

    @pytest.mark.parametrize(("prompt", "found"), [(ids(80), 64), (ids(40), 32), (ids(16), 0), (ids(40, 1), 0)])
    def test_the_longest_prefix_of_whole_blocks(self, tmp_path, prompt, found):
        saved(tmp_path)
        assert stored(tmp_path).hit(prompt) == found

    def test_part_in_memory_and_part_on_disk(self, tmp_path):
        before = saved(tmp_path)
        again = stored(tmp_path)
        assert again.hit(ids(40)) == 32
        slot, hit = again.admit(ids(90))
        assert (hit, again.prefix.metrics.files.hit_tokens, again.prefix.metrics.blocks) == (80, 80, 5)
        same_bytes(request_bytes(again, slot), before)

    def test_a_snapshot_that_only_the_disk_has(self, tmp_path):
        size = Cached().prefix.bytes_per_snapshot
        cached = Cached(files=PrefixFiles(tmp_path, SIZE), max_bytes=size)
        cached.run(ids(80))
        cached.prefix.files.flush()
        assert len(names(tmp_path, "snapshot")) == 4 and not names(tmp_path, "block")
        assert cached.hit(ids(50)) == 48

    @pytest.mark.parametrize("change", [dict(kv_format="plain"), dict(max_query_tokens=1)])
    def test_another_format_finds_nothing_and_another_size_does(self, tmp_path, change):
        saved(tmp_path)
        again = stored(tmp_path, manager=make(**change))
        assert again.hit(ids(90)) == (0 if "kv_format" in change else 80)
        assert not again.prefix.metrics.files.errors

    def test_without_room_the_prefix_is_shorter(self, tmp_path):
        saved(tmp_path)
        again = stored(tmp_path, manager=make(num_blocks=6))
        again.manager.allocate(again.manager.admit(), 3 * BLOCK)
        slot, hit = again.admit(ids(90))
        assert hit == 48
        before = host_state(again.manager)
        with pytest.raises(CacheFullError):
            again.manager.allocate(slot, BLOCK)
        assert host_state(again.manager) == before


class TestEviction:
    def test_evicted_blocks_are_written_and_found_again(self, tmp_path):
        cached = stored(tmp_path, 80)
        slot, _ = cached.admit(ids(81))
        before = request_bytes(cached, slot)
        cached.manager.release(slot)
        assert cached.prefix.evict(2) == 2  # read one by one
        assert cached.prefix.evict(9) == 3
        # Whoever gets the blocks may overwrite them at once.
        cached.cache = jax.tree.map(lambda x: x * 0, cached.cache)
        cached.prefix.files.flush()
        slot, hit = cached.admit(ids(81))
        assert hit == 80
        same_bytes(request_bytes(cached, slot), before)
        assert cached.prefix.metrics.files.blocks == 5

    def test_without_a_cache_to_read_nothing_fails(self, tmp_path, caplog):
        cached = stored(tmp_path, 32)
        cached.prefix.get_cache = lambda: 1 / 0
        assert cached.prefix.evict(2) == 2
        cached.prefix.files.flush()
        assert cached.prefix.metrics.files.dropped == 2 and "could not be copied from the device" in caplog.text

    def test_beyond_the_limit_the_ends_are_dropped(self, tmp_path):
        cached = stored(tmp_path, 80)
        go = threading.Event()
        files = cached.prefix.files
        layout = cached.prefix._stored._blocks
        files.max_pending_bytes = 3 * layout.nbytes
        files._writer.submit(go.wait)
        assert cached.prefix.evict(4) == 4
        go.set()
        files.flush()
        digests = list(cached.prefix._digests(np.array(ids(90), np.int32)))
        assert names(tmp_path) == sorted(map(layout.name, digests[1:4]))
        assert cached.prefix.metrics.files.dropped == 5


class TestFiles:
    def test_round_trip(self, tmp_path):
        files = PrefixFiles(tmp_path, SIZE)
        two = {"x": np.concatenate([value(1)["x"], value(2)["x"]], axis=1)}
        assert files.save(LAYOUT, [digest(1), digest(2)], lambda: two, used=10**18)
        files.flush()
        count, found = files.read(LAYOUT, [digest(2), digest(1), digest(3), digest(1)])
        assert count == 2 and found["x"].tolist() == two["x"][:, ::-1].tolist()
        assert files.read(LAYOUT, []) == (0, None)
        assert os.stat(tmp_path / LAYOUT.name(digest(2))).st_mtime_ns == 10**18 - 1

    def test_the_oldest_used_go_first(self, tmp_path):
        files = PrefixFiles(tmp_path, 5 * LAYOUT.nbytes)
        (tmp_path / "notes.txt").write_text("stays")
        for i in range(5):
            files.save(LAYOUT, [digest(i)], lambda i=i: value(i), used=i)
        files.touch(LAYOUT, [digest(0)], used=9)
        files.save(LAYOUT, [digest(8)], lambda: value(8), used=8)
        files.flush()
        assert names(tmp_path) == sorted([*(LAYOUT.name(digest(i)) for i in (0, 3, 4, 8)), "notes.txt"])
        assert (files.metrics.blocks, files.metrics.bytes) == (4, 4 * LAYOUT.nbytes)
        other = PrefixFiles(tmp_path, SIZE)
        other.flush()
        assert (other.metrics.blocks, other.metrics.bytes) == (4, 4 * LAYOUT.nbytes)

    def test_unfinished_files_go_when_they_are_old(self, tmp_path):
        old, new = (tmp_path / f".{LAYOUT.name(digest(1))}.{c * 16}" for c in "ab")
        for path in (old, new):
            path.touch()
        os.utime(old, (1, 1))
        PrefixFiles(tmp_path, SIZE).flush()
        assert names(tmp_path) == [new.name]


@pytest.mark.slow
def test_killed_writers_leave_whole_files():
    script = Path(__file__).parents[1] / "stress" / "prefix_kills.py"
    done = subprocess.run([sys.executable, script, "--rounds", "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 kills left" in done.stdout


class TestFaults:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda content: content[:-1],
            lambda content: content + b"0",
            lambda content: b"",
            lambda content: bytes([*content[:-40], content[-40] ^ 1, *content[-39:]]),
            lambda content: bytes(len(content)),
        ],
        ids=["torn", "longer", "empty", "one bit", "zeros"],
    )
    def test_a_damaged_file_is_a_miss(self, tmp_path, caplog, damage):
        saved(tmp_path)
        again = stored(tmp_path)
        third = tmp_path / again.prefix._stored._blocks.name(
            list(again.prefix._digests(np.array(ids(90), np.int32)))[2]
        )
        third.write_bytes(damage(third.read_bytes()))
        assert again.hit(ids(90)) == 32
        assert "is damaged or no file of a prefix cache; it is deleted" in caplog.text and not third.exists()
        assert again.prefix.metrics.files.errors == 1

    def test_a_file_under_another_name_is_a_miss(self, tmp_path):
        saved(tmp_path)
        blocks = names(tmp_path, "block")
        for a, b in zip(blocks, [*blocks[1:], blocks[0]], strict=True):
            os.rename(tmp_path / a, tmp_path / f"{b}.new")
        for name in blocks:
            os.rename(tmp_path / f"{name}.new", tmp_path / name)
        again = stored(tmp_path)
        assert again.hit(ids(90)) == 0 and again.prefix.metrics.files.errors > 0

    def test_a_folder_that_goes_away_is_a_warning(self, tmp_path, caplog):
        folder = tmp_path / "gone"
        cached = stored(folder, 32)
        cached.prefix.files.flush()
        folder.rename(tmp_path / "elsewhere")
        with caplog.at_level(logging.WARNING):
            cached.prefix.save(cached.cache)
        assert cached.hit(ids(40)) == 32
        assert caplog.text.count("could not be written") == 1  # for four files
        assert cached.prefix.metrics.files.dropped == 4

    def test_a_full_disk_leaves_no_part_of_a_file(self, tmp_path, monkeypatch, caplog):
        def full(fd):
            raise OSError(28, "No space left on device")

        files = PrefixFiles(tmp_path, SIZE)
        monkeypatch.setattr(os, "fsync", full)
        files.save(LAYOUT, [digest(1)], lambda: value(1), used=1)
        files.flush()
        assert not os.listdir(tmp_path) and files.metrics.dropped == 1
        assert "could not be written: [Errno 28] No space left on device" in caplog.text

    @pytest.mark.parametrize("kind", ["pipe", "loop", "folder", "device"])
    def test_what_lies_under_a_blocks_name_is_a_miss_and_stops_no_write(self, tmp_path, kind):
        make = {
            "pipe": os.mkfifo,
            "loop": lambda path: os.symlink(path, path),
            "folder": os.mkdir,
            "device": lambda path: os.symlink("/dev/zero", path),
        }
        block = LAYOUT.name(digest(1))
        partial = f".{LAYOUT.name(digest(2))}.{'a' * 16}"
        for name in block, partial:
            make[kind](tmp_path / name)
            os.utime(tmp_path / name, (1, 1), follow_symlinks=False)
        files = PrefixFiles(tmp_path, 3 * LAYOUT.nbytes)
        assert files.read(LAYOUT, [digest(1)]) == (0, None)
        files.touch(LAYOUT, [digest(1), digest(3)], used=1)
        for i in range(3, 9):  # more than fit, so that old files are deleted
            assert files.save(LAYOUT, [digest(i)], lambda i=i: value(i), used=i)
        files.flush()
        assert files.metrics.dropped == 0
        assert files.read(LAYOUT, [digest(8)])[0] == 1 and files.read(LAYOUT, [digest(3)])[0] == 0
        if kind != "folder":
            assert not (tmp_path / partial).is_symlink() and not (tmp_path / partial).exists()
            files.save(LAYOUT, [digest(1)], lambda: value(1), used=9)
            files.flush()
            assert files.read(LAYOUT, [digest(1)])[0] == 1

    def test_only_the_user_may_read_and_write(self, tmp_path, monkeypatch):
        before = os.umask(0)
        try:
            files = PrefixFiles(tmp_path / "new", SIZE)
            files.save(LAYOUT, [digest(1)], lambda: value(1), used=1)
            files.flush()
        finally:
            os.umask(before)
        modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "new", *(tmp_path / "new").iterdir())]
        assert modes == [0o700, 0o600]
        (tmp_path / "new").chmod(0o770)
        with pytest.raises(ValueError, match="directory='.*new' cannot be used: others may write into it: chmod 700 "):
            PrefixFiles(tmp_path / "new", SIZE)
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        with pytest.raises(ValueError, match="directory='.*' cannot be used: it belongs to another user"):
            PrefixFiles(tmp_path, SIZE)

    def test_refusals(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match="directory='.*file' cannot be used: File exists"):
            PrefixFiles(tmp_path / "file", SIZE)
        with pytest.raises(ValueError, match="max_bytes='12' must be a number with one of the units"):
            PrefixFiles(tmp_path, "12")
        with pytest.raises(ValueError, match=r"max_bytes=100 holds no block with its snapshot, which take \d+ bytes"):
            stored(tmp_path, size=100)
        with pytest.raises(ValueError, match="the prefix cache has no files: give it files="):
            (cached := Cached()).prefix.save(cached.cache)
