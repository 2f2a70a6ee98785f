"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a file to write, which gets its name at the end and replaces an older one. Only the user may read it.

    Until then the bytes lie beside it in a hidden file, which is removed if an error ends the context.
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
