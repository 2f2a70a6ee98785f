"""A progress bar of bytes."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


@contextlib.contextmanager
def byte_bar(description: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error, if `shown` is true, until the context ends.

    Args:
      description: text beside the bar.
      total: number of bytes of the whole task.
      shown: whether to show the bar.

    Yields:
      A function that advances the bar by a number of bytes.
    """
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(description, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
