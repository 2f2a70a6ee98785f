"""The surroundings of a command: its messages, the package's log, and JAX's cache of compiled programs."""

import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from dsv4_jax.common.private_folder import make_private_folder


_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")})


def show_log() -> None:
    """Prints the package's log to stderr, unless the user handles it."""
    from rich.logging import RichHandler

    log = logging.getLogger("dsv4_jax")
    if not log.handlers:
        log.setLevel(logging.INFO)
        console = Console(stderr=True)
        log.addHandler(RichHandler(console=console, show_time=False, show_level=False, show_path=False))


def use_compilation_cache() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR names another.

    JAX reads this variable when it is imported, so later it is told. JAX_ENABLE_COMPILATION_CACHE=false turns the cache
    off. Whole steps are kept in a folder of their own within, see `dsv4_jax.decode.program_store`. A folder into which
    other users may write is not used, since the programs in it are run.
    """
    # A run needs dozens of small programs: keep these too.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dsv4_jax" / "programs"
        if not folder.is_absolute():
            return
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
    is_on = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "true").lower() in ("1", "true", "t", "yes", "y", "on")
    if not is_on or not programs:
        return
    if "://" not in programs:
        try:
            make_private_folder(programs)
        except OSError as error:
            notify(f"Compiled programs are not kept in {programs}: {error.strerror}")
            _disable_compilation_cache()
            return
        os.environ.setdefault("DSV4_JAX_PROGRAMS", os.path.join(os.path.abspath(programs), "steps"))
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", programs)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
            compilation_cache.reset_cache()  # if a program was compiled before, JAX has noted that there is no cache


def _disable_compilation_cache() -> None:
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if "jax" in sys.modules:
        import jax

        jax.config.update("jax_enable_compilation_cache", False)


def explain_missing_platform() -> str | None:
    """Returns a sentence if JAX has been loaded and the platform of JAX_PLATFORMS is not there; else None."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if not platforms or "jax" not in sys.modules:
        return None
    import jax

    try:
        jax.devices()
    except Exception as error:  # an AssertionError without a text if a plugin finds no GPU
        return (
            f"JAX_PLATFORMS={platforms} asks for devices that JAX does not find here. Unset it, or set "
            f"JAX_PLATFORMS=cpu; for a GPU see https://docs.jax.dev/en/latest/installation.html. {error}".strip()
        )
    return None


def visible(text: str) -> str:
    """Returns a text without control characters but for tabs and line ends: those that a terminal would obey."""
    return text.translate(_CONTROLS)


def notify(text: str) -> None:
    """Prints a message about a slow operation to stderr."""
    Console(stderr=True).print(visible(text), style="dim", markup=False, highlight=False, soft_wrap=True)


def compiling_for(device: str) -> str:
    """Returns the message that is shown while programs are compiled."""
    import jax

    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return f"Compiling for {device} ..." + (f" (compiled programs are kept in {folder})" if folder else "")
