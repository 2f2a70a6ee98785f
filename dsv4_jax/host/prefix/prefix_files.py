"""Files of a prefix cache: one for each block and each snapshot, written by a thread while steps go on.

The name of a file is the digest of its `CachedBlock`, with an extension. All files of a kind have one `FileLayout`. A
file gets its name when all bytes are on disk, so a process that is killed leaves no incomplete file under such a name.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import KVCache, RequestRows, read_blocks
from dsv4_jax.common.private_folder import make_private_folder
from dsv4_jax.common.sizes import parse_bytes, readable_bytes
from dsv4_jax.common.summary import Summarized
from dsv4_jax.host.cache_devices import CacheDevices
from dsv4_jax.host.file_layout import FileLayout
from dsv4_jax.host.offload import blocks_struct, identity, rows_struct
from dsv4_jax.host.prefix.prefix_tree import CachedBlock
from pallas_kernels.runtime.atomic_write import atomic_write


_log = logging.getLogger("dsv4_jax.host")

FORMAT = "dsv4_jax prefix, version 2"  # all digests depend on this text
_NAME = re.compile(r"[0-9a-f]{64}\.(block|snapshot)")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.(block|snapshot)\.[0-9a-f]{16}")
_PARTIAL_SECONDS = 600.0  # an unfinished file that is older than this counts as abandoned and is deleted
_READERS = 8  # threads that read files; most of their time goes into SHA-256
_WARNING_SECONDS = 60.0  # minimum time between two log messages of the same kind of fault
_FEW_BLOCKS = 4  # up to this number of blocks are read from the device one by one, more in padded chunks


@dataclasses.dataclass
class PrefixFileMetrics:
    """Counters of a `PrefixFiles` since it was opened.

    Attributes:
      blocks: number of blocks on disk. Blocks of other processes count if the newest listing of the folder found them.
      bytes: size of all files in bytes. Files of other processes count if the newest listing found them.
      hit_tokens: number of prompt tokens whose blocks were read from disk.
      read_bytes, written_bytes: number of bytes read and written.
      dropped: number of blocks and snapshots that were not written, because the queue was full or the writer failed.
      errors: number of faults: files that could not be read, written or deleted, or that were damaged.
    """

    blocks: int = 0
    bytes: int = 0
    hit_tokens: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    dropped: int = 0
    errors: int = 0


class PrefixFiles(Summarized):
    """A folder of blocks and snapshots for a `PrefixCache`, which several processes of one user may share.

    The folder has mode 0700 and the files have mode 0600, since the files reveal what users wrote.

    One thread writes the files. Arrays wait for this thread in a queue. So that no step waits for the disk, new arrays
    are dropped and counted if others are waiting and the queue would exceed `max_pending_bytes`. A file that cannot
    be read or written raises no exception: the fault is logged and counted, and the block or snapshot counts as not
    cached.

    If the files would exceed `max_bytes`, the least recently used files are deleted. A process finds the files of other
    processes by listing the folder, which it does again after writing 1/16 of `max_bytes`. So each process can exceed
    the limit by this size.

    Attributes:
      directory: the folder.
      max_bytes: maximum size of all files in bytes.
      max_pending_bytes: maximum size in bytes of the arrays that wait to be written; they may occupy GPU memory.
      metrics: the counters.
    """

    max_pending_bytes = 2**28

    def __init__(self, directory: str | Path, max_bytes: int | str):
        """Opens the folder, which is made if it does not exist.

        Args:
          directory, max_bytes: see the class. The size may be text, such as "200GB".

        Raises:
          TypeError, ValueError: `max_bytes` is neither a positive integer nor text such as "200GB".
          ValueError: the folder cannot be written, belongs to another user, or other users may write into it.
        """
        self.directory = Path(directory)
        self.max_bytes = parse_bytes(max_bytes, "max_bytes")
        self.metrics = PrefixFileMetrics()
        self._pending_bytes = 0
        self._pending = threading.Condition()
        self._warned: dict[str, float] = {}
        self._unlisted_bytes = 0  # number of bytes written since the folder was listed
        partial = self.directory / f".{'0' * 64}.block.{secrets.token_hex(8)}"
        try:
            make_private_folder(self.directory)
            partial.write_bytes(b"")
            partial.unlink()
        except OSError as error:
            raise ValueError(f"directory={str(directory)!r} cannot be used: {error.strerror}") from None
        # The writer is one thread. It ends with this object, or at the process's exit after the queue is empty.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "prefix files")
        self._writer.submit(self._guarded, self._list)
        self._readers = concurrent.futures.ThreadPoolExecutor(_READERS, "prefix files, reader")

    def _summary(self) -> dict[str, Any]:
        sizes = {"size": readable_bytes(self.metrics.bytes), "at most": readable_bytes(self.max_bytes)}
        return {"blocks": self.metrics.blocks, **sizes, "folder": self.directory}

    def exists(self, layout: FileLayout, digest: bytes) -> bool:
        """Returns whether a file of this layout exists for a digest."""
        return os.path.exists(self._path(layout, digest))

    def save(
        self,
        layout: FileLayout,
        digests: Sequence[bytes],
        get_arrays: Callable[[], Any],
        *,
        used: int,
        nbytes: int = 0,
        wait: bool = False,
    ) -> bool:
        """Queues the arrays of files to be written.

        Args:
          layout: kind of the files.
          digests: 32-byte digest of each file, in the order of last use, the most recently used file first.
          get_arrays: function that returns the arrays of all files, on the device or the host. It is called only if the
            queue has room.
          used: time of the first file's last use in ns since the epoch. Each further file counts as used 1 ns earlier.
          nbytes: size of the arrays in bytes, needed only if padding makes the arrays larger than the files.
          wait: whether to wait until the queue has room.

        Returns:
          Whether the arrays were queued. If not, the files are counted as dropped: the queue is full, or `get_arrays`
          failed, which is logged.
        """
        nbytes = max(nbytes, len(digests) * layout.nbytes)
        with self._pending:
            if wait:
                self._pending.wait_for(lambda: self._has_room(nbytes))
            if not self._has_room(nbytes):
                self.metrics.dropped += len(digests)
                return False
            self._pending_bytes += nbytes
        try:
            arrays = [get_arrays()]  # `_write` pops the only reference, so that it can free device memory early
        except Exception as error:  # the cache was donated or is deleted, or the device has no memory for a copy
            self.metrics.dropped += len(digests)
            self._release(nbytes)
            self._warn("copied from the device", error)
            return False
        self._writer.submit(self._guarded, self._write, layout, list(digests), arrays, used, nbytes=nbytes)
        return True

    def read(self, layout: FileLayout, digests: Sequence[bytes]) -> tuple[int, Any]:
        """Reads files up to the first one that is missing or damaged. Damaged files are deleted.

        Returns:
          (n, arrays): the number of files that were read, and their NumPy arrays [layers, n * rows, ...]. The arrays
          are None if n is 0.
        """
        contents = np.empty((len(digests), layout.nbytes), np.uint8)
        are_whole = self._readers.map(functools.partial(self._read_file, layout), digests, contents)
        count = sum(itertools.takewhile(bool, are_whole))
        self.metrics.read_bytes += count * layout.nbytes
        return count, layout.unpack(contents[:count]) if count else None

    def touch(self, layout: FileLayout, digests: Sequence[bytes], *, used: int) -> None:
        """Queues a change of files' modification times, which record when the files were last used.

        Args:
          layout, digests, used: as in `save`.
        """
        self._writer.submit(self._guarded, self._touch, layout, list(digests), used)

    def flush(self) -> None:
        """Waits until the writer thread has done everything that was queued before this call."""
        self._writer.submit(int).result()

    # --- in the caller's thread ---

    def _path(self, layout, digest):
        return os.path.join(self.directory, layout.name(digest))

    def _has_room(self, nbytes):
        # Arrays that exceed the limit by themselves are accepted if nothing else is pending.
        return not self._pending_bytes or self._pending_bytes + nbytes <= self.max_pending_bytes

    def _read_file(self, layout, digest, content):
        """Reads a file into `content`, [nbytes] uint8. Returns False if it is missing, unreadable or damaged."""
        path = self._path(layout, digest)
        try:
            with open(path, "rb", buffering=0, opener=_open_at_once) as file:
                is_whole = file.readinto(content) == layout.nbytes and not file.read(1)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._warn("read", error)
            return False
        if is_whole and layout.is_valid(digest, content):
            return True
        self._warn("read", f"{path} is damaged or no file of a prefix cache; it is deleted")
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False

    def _release(self, nbytes):
        with self._pending:
            self._pending_bytes -= nbytes
            self._pending.notify_all()

    def _warn(self, done, error):
        """Counts a fault, and logs it unless one of the same kind was logged in the last `_WARNING_SECONDS`.

        `done` is a past participle for the message, such as "read"; `error` is an exception or text.
        """
        self.metrics.errors += 1
        now = time.monotonic()
        kind = f"{done}: {type(error).__name__} {getattr(error, 'errno', '')}"
        if now - self._warned.get(kind, -_WARNING_SECONDS) >= _WARNING_SECONDS:
            self._warned[kind] = now
            _log.warning("prefix cache: a file could not be %s: %s", done, error)

    # --- in the writer's thread ---

    def _guarded(self, function, *args, nbytes=0):
        """Runs a job of the writer's thread. Logs its error, and takes `nbytes` off the bytes that wait."""
        try:
            function(*args)
        except Exception as error:
            self._warn("written", error)
        finally:
            self._release(nbytes)

    def _write(self, layout, digests, arrays, used):
        """Writes the files that do not exist yet. The arguments come from `save`; `arrays` is a list with one item."""
        num_written = 0
        try:
            # The list holds the only reference, so device memory is freed once the arrays are on the host.
            tree = jax.device_get(arrays.pop())
            for i, (digest, content) in enumerate(zip(digests, layout.pack(digests, tree), strict=True)):
                if not self.exists(layout, digest):
                    self._make_room(len(content))
                    with atomic_write(Path(self._path(layout, digest))) as file:
                        file.write(content)
                        file.flush()
                        os.utime(file.fileno(), ns=(used - i, used - i))
                        os.fsync(file.fileno())
                    self._count(layout.kind, len(content))
                    self.metrics.written_bytes += len(content)
                    self._unlisted_bytes += len(content)
                num_written += 1
        finally:
            self.metrics.dropped += len(digests) - num_written

    def _touch(self, layout, digests, used):
        for i, digest in enumerate(digests):
            with contextlib.suppress(OSError):
                os.utime(self._path(layout, digest), ns=(used - i, used - i))

    def _make_room(self, nbytes):
        """Deletes the least recently used files if the folder has no room for `nbytes` more. May list the folder."""
        is_full = self.metrics.bytes + nbytes > self.max_bytes
        if not is_full and self._unlisted_bytes <= self.max_bytes // 16:
            return
        files = self._list()
        if self.metrics.bytes + nbytes <= self.max_bytes:
            return
        for _, size, name in sorted(files):
            # Frees 1/32 of the limit more than needed, so that the next listing comes later. To list a large folder
            # takes a second.
            if self.metrics.bytes + nbytes <= self.max_bytes - self.max_bytes // 32:
                break
            try:
                (self.directory / name).unlink(missing_ok=True)
            except OSError as error:
                self._warn("deleted", error)
                continue
            self._count(name.rpartition(".")[2], -size)

    def _list(self):
        """Returns [(time of last use in ns, size in bytes, name)] of all files, and sets the counters from this list.

        Deletes unfinished files that are older than `_PARTIAL_SECONDS`.
        """
        files = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):  # another process has deleted the file
                    stat = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name):
                        files.append((stat.st_mtime_ns, stat.st_size, entry.name))
                    elif _PARTIAL.fullmatch(entry.name) and time.time() - stat.st_mtime > _PARTIAL_SECONDS:
                        os.unlink(entry)
        self.metrics.blocks = sum(name.endswith(".block") for *_, name in files)
        self.metrics.bytes = sum(size for _, size, _ in files)
        self._unlisted_bytes = 0
        return files

    def _count(self, kind, nbytes):
        """Adds a file of this size to the counters; if `nbytes` is negative, removes a deleted file from them."""
        self.metrics.bytes += nbytes
        if kind == "block":
            self.metrics.blocks += 1 if nbytes > 0 else -1


class StoredPrefixes:
    """Writes the blocks and snapshots of a `PrefixCache` to `PrefixFiles`, and finds prefixes in them.

    Attributes:
      files: the folder of files.
    """

    def __init__(self, files: PrefixFiles, devices: CacheDevices, *, key: str):
        """Describes the files of a cache; reads and writes none.

        Args:
          files: see the class.
          devices: transfers to and from the devices that hold the cache.
          key: name of the model's weights.

        Raises:
          ValueError: `files.max_bytes` is less than a block and its snapshot take, or the mesh has several processes.
        """
        if devices.mesh is not None and devices.mesh.is_multi_process:
            raise ValueError("files of a prefix cache need a mesh of one process: others might find other files")
        self.files = files
        self._devices = devices
        metadata = {"format": FORMAT, **identity(devices.schema, key)}
        self._blocks = FileLayout("block", blocks_struct(devices.schema, 1), metadata)
        self._snapshots = FileLayout("snapshot", rows_struct(devices.schema, boundary=True), metadata)
        if files.max_bytes < (nbytes := self._blocks.nbytes + self._snapshots.nbytes):
            raise ValueError(f"max_bytes={files.max_bytes} holds no block with its snapshot, which take {nbytes} bytes")

    def save_blocks(
        self, nodes: Sequence[CachedBlock], get_cache: Callable[[], KVCache], *, wait: bool = False
    ) -> None:
        """Queues blocks to be written unless they are on disk. Launches their copies to the host without waiting.

        Args:
          nodes: nodes of the blocks, in the order of last use, the most recently used first.
          get_cache: function that returns the cache with these blocks. If it raises, the blocks are dropped.
          wait: whether to wait while the writer's queue is full. If not, blocks without room in it are dropped.
        """
        now = time.time_ns()
        missing = self._missing(self._blocks, nodes)
        for start, ids in self._chunks([node.block for node in missing]):
            digests = [node.digest for node in missing[start : start + len(ids)]]
            get_arrays = functools.partial(self._read, get_cache, ids)
            nbytes = len(ids) * self._blocks.nbytes
            self.files.save(self._blocks, digests, get_arrays, nbytes=nbytes, used=now - start, wait=wait)

    def save_snapshot(self, node: CachedBlock, *, wait: bool = False) -> None:
        """Queues the snapshot of a block to be written, unless it is on disk. `wait` is as for `save_blocks`."""
        if self._missing(self._snapshots, [node]):
            get_arrays = functools.partial(self._devices.begin_get, node.snapshot)
            self.files.save(self._snapshots, [node.digest], get_arrays, used=time.time_ns(), wait=wait)

    def _missing(self, layout, nodes):
        """Returns the nodes that have no file of this layout. Marks the files of all other nodes as used."""
        missing = [node for node in nodes if not self.files.exists(layout, node.digest)]
        if len(missing) < len(nodes):
            self.files.touch(layout, [node.digest for node in nodes], used=time.time_ns())
        return missing

    def save_all(self, nodes: Iterable[CachedBlock], get_cache: Callable[[], KVCache]) -> None:
        """Writes blocks and their snapshots, and waits until they are on disk.

        If they exceed `files.max_bytes`, blocks of running requests come first, then the most recently used
        blocks. The blocks that no longer fit are not written.

        Args:
          nodes: nodes of the blocks.
          get_cache: function that returns the cache with these blocks.
        """
        bytes_left = self.files.max_bytes
        chosen = []

        def order(node):
            """Returns a sort key. As a rule, it puts the earlier blocks of a prefix before the later ones."""
            if node.in_use:
                return 0, node.length
            return 1, -node.last_used  # `PrefixTree.touch` makes the first block of a prefix the most recently used

        for node in sorted(nodes, key=order):
            bytes_left -= self._blocks.nbytes
            if node.snapshot is not None:
                bytes_left -= self._snapshots.nbytes
            if bytes_left < 0:
                break
            chosen.append(node)
        self.save_blocks(chosen, get_cache, wait=True)
        for node in chosen:
            if node.snapshot is not None:
                self.save_snapshot(node, wait=True)
        self.files.flush()

    def find(
        self, digests: Iterable[bytes], nodes: list[CachedBlock], min_blocks: int, room: int
    ) -> tuple[list[CachedBlock], list[bytes], Any, RequestRows] | None:
        """Finds the longest prefix of a prompt whose last block has a snapshot on disk, and reads its files.

        Each of the prefix's blocks is in the cache or on disk.

        Args:
          digests: digests of the prompt's blocks that may be used, in order.
          nodes: nodes of the prompt's first blocks, as far as these are in the cache.
          min_blocks: number of blocks in the longest prefix that can be used without files.
          room: maximum number of blocks in the prefix.

        Returns:
          None if no such prefix has more than `min_blocks` blocks. Otherwise a tuple of

          * the first of `nodes`, as far as they are in the prefix,
          * the digests of the further blocks, which were read from disk,
          * the entries and keys of these blocks, as `CacheDevices.read_blocks` returns them; None if there are none,
          * rows of a slot at the end of the prefix.
        """
        usable: list[bytes] = []
        for digest in itertools.islice(digests, room):
            if len(usable) >= len(nodes) and not self.files.exists(self._blocks, digest):
                break
            usable.append(digest)
        while len(usable) > min_blocks:
            has_snapshot, snapshot = self.files.read(self._snapshots, usable[-1:])
            if not has_snapshot:
                usable.pop()
                continue
            on_disk = usable[len(nodes) :]
            num_read, blocks = self.files.read(self._blocks, on_disk)
            if num_read == len(on_disk):
                self.files.metrics.hit_tokens += num_read * self._devices.schema.block_tokens
                now = time.time_ns()
                self.files.touch(self._blocks, usable, used=now)
                self.files.touch(self._snapshots, usable[-1:], used=now)
                return nodes[: len(usable)], on_disk, blocks, snapshot
            del usable[len(nodes) + num_read :]  # the blocks that follow a damaged or missing file are of no use
        return None

    def warm_up(self, cache: KVCache) -> None:
        """Compiles the program that reads a single block. Chunks of blocks are read by the program of `offload`."""
        self._read(lambda: cache, np.array([-1], np.int32))

    def _chunks(self, blocks):
        """Splits block ids as `CacheDevices.block_chunks` does. Up to `_FEW_BLOCKS` ids become chunks of one block."""
        if len(blocks) > _FEW_BLOCKS:
            return self._devices.block_chunks(blocks)
        return ((i, np.array([block], np.int32)) for i, block in enumerate(blocks))

    def _read(self, get_cache, ids):
        """Launches a copy of full blocks to the host, and returns the device arrays that are being copied.

        `get_cache` returns the cache; `ids` [n] int32 are ids of blocks, padded with -1.
        """
        length = np.int32(len(ids) * self._devices.schema.block_tokens)
        return self._devices.begin_get(read_blocks(get_cache(), *self._devices.put((ids, np.int32(0), length))))


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file with O_NONBLOCK: if it is a named pipe, the call does not wait for a process that writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)
