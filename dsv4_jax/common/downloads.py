"""Recognizes what an incomplete download leaves in place of a checkpoint's files, and says what to do."""

from pathlib import Path


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_not_lfs_pointer(file: str | Path, content: bytes) -> None:
    """Raises ValueError, with the command that fetches the file, if its first bytes are those of a Git LFS pointer."""
    if content.startswith(_LFS_POINTER):
        raise ValueError(
            f"{file} is a Git LFS pointer in place of the file itself. Install Git LFS and fetch the files: "
            f"git -C {Path(file).parent} lfs pull"
        )


def snapshot_hint(folder: Path) -> str:
    """Returns a sentence with the folder that was meant if `folder` lies above a hub's snapshot; else ""."""
    snapshots = folder if folder.name == "snapshots" else folder / "snapshots"
    configs = sorted(snapshots.glob("*/config.json"), key=lambda file: file.lstat().st_mtime)
    return f" This is a folder of the hub's cache: give the snapshot in it, {configs[-1].parent}" if configs else ""
