"""The command line: `dsv4-jax generate`, `serve`, `chat`, `score`, `convert`, `plan` and `bench`."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments without the program's name. None = the arguments of the process. In this case, Ctrl-C ends the
        process at once.

    Returns:
      The exit code. 0: success. 2: a user's mistake, which is explained on stderr without a traceback. 141, as in a
      shell: the reader of stdout closed it.

    Raises:
      SystemExit: for `--help` (0) and for arguments that do not parse (2).
    """
    if argv is None:
        _exit_at_interrupt()
        # Collect garbage rarely. Imports and tracing make many objects but few cycles, and collections took 8% of the
        # time of `generate`.
        gc.set_threshold(100_000, 20, 100)
    # The import takes half a second, during which Ctrl-C already works.
    from dsv4_jax.cli.commands import run_command

    try:
        try:
            return run_command(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()  # raises here if the pipe is closed, not at exit
    except BrokenPipeError:
        # The interpreter flushes stdout again when it exits, which must not raise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _exit_at_interrupt():
    """Makes Ctrl-C end the process at once, without a traceback.

    Python runs signal handlers only between its own instructions, and so not while XLA compiles. A thread therefore
    reads signals from a pipe, to which Python writes them at once (`signal.set_wakeup_fd`).
    """

    def end(*_):
        """Ends the process. It is also the handler of SIGINT."""
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), b"\x1b[?25h")  # progress bars hide the cursor
        os._exit(130)

    def wait():
        """Ends the process at a SIGINT, unless another handler has been set for it."""
        while os.read(read_end, 1)[0] != signal.SIGINT or signal.getsignal(signal.SIGINT) is not end:
            pass
        end()

    signal.signal(signal.SIGINT, end)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    threading.Thread(target=wait, daemon=True).start()
