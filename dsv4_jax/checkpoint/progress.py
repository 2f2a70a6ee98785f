"""A progress bar of bytes."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def byte_bar(title: str | None, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error until the context ends.

    Args:
      title: text beside the bar; None for no bar.
      total: number of bytes of the whole task.

    Yields:
      A function that advances the bar by a number of bytes.
    """
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=title is None) as bar:
        task = bar.add_task(title or "", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
