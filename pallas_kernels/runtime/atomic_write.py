"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears at `path`, complete, when the context ends without an error.

    It then replaces an older file. Only the user may read it. Until then, the bytes are in a hidden file in the same
    folder, which is removed if an error ends the context.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(partial, "xb", opener=_open_private) as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
