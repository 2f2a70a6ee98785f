"""Reads small files of checkpoints, and explains mistakes in downloads of checkpoints."""

import json
from pathlib import Path
from typing import Any


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_not_lfs_pointer(file: str | Path, content: bytes) -> None:
    """Raises ValueError, with the command that fetches the file, if its content is a Git LFS pointer.

    Args:
      file: the file, for the message.
      content: the file's content, or at least its first 64 bytes.
    """
    if content.startswith(_LFS_POINTER):
        raise ValueError(
            f"{file} is a Git LFS pointer in place of the file itself. Install Git LFS and fetch the files: "
            f"git -C {Path(file).parent} lfs pull"
        )


def snapshot_hint(folder: Path) -> str:
    """Returns a hint for a user who gave a folder of the Hugging Face hub's cache in place of the checkpoint in it.

    The hub's cache keeps the files of a checkpoint in `MODEL/snapshots/HASH`. If `folder` is `MODEL` or `snapshots`,
    the hint is a sentence with the path of the newest checkpoint. For other folders it is "".
    """
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    configs = sorted(snapshots.glob("*/config.json"), key=lambda file: file.lstat().st_mtime)
    return f" This is a folder of the hub's cache: give the snapshot in it, {configs[-1].parent}" if configs else ""


def read_json_object(file: Path, title: str = "", hint: str = "") -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Args:
      file: the file.
      title: text before the file's path in the error if it cannot be read.
      hint: text at the end of this error.

    Raises:
      ValueError: the file cannot be read, is a Git LFS pointer, no valid JSON or no object, or an object has duplicate
        keys.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {title}{file}: {error.strerror}.{hint}") from None
    check_not_lfs_pointer(file, content)

    def unique_object(pairs):
        """Returns the pairs of a JSON object as a dict. Raises ValueError if a key occurs twice."""
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{duplicate!r} appears twice")
        return result

    try:
        parsed = json.loads(content, object_pairs_hook=unique_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: its JSON is broken (truncated?): {error}.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{file}: its JSON is no object but {type(parsed).__name__}.")
    return parsed
