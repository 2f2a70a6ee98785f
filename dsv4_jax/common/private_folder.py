"""Folders into which only the user may write, so that a process can trust the files in them."""

import os
import stat
from pathlib import Path


def make_private_folder(path: str | Path) -> Path:
    """Returns the path of a folder into which only the user may write. Makes a missing folder with mode 0700.

    Raises OSError if the folder cannot be made, belongs to another user, or others may write into it.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(0, f"it belongs to another user (id {status.st_uid}): give a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(0, f"others may write into it: chmod 700 {folder}")
    return folder
