"""Helpers of commands: messages, the package's log, and JAX's folder of compiled programs."""

import logging
import os
import sys

from rich.console import Console

from dsv4_jax.common.private_folder import make_private_folder


_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\t"), ord("\n")})


def show_log() -> None:
    """Prints the package's log from level INFO to stderr, unless the log of "dsv4_jax" has a handler already."""
    from rich.logging import RichHandler

    log = logging.getLogger("dsv4_jax")
    if not log.handlers:
        log.setLevel(logging.INFO)
        console = Console(stderr=True)
        log.addHandler(RichHandler(console=console, show_time=False, show_level=False, show_path=False))


def use_compilation_cache() -> None:
    """Makes JAX keep compiled programs in a folder, so that later runs need not compile them.

    The folder is JAX_COMPILATION_CACHE_DIR or, if this environment variable is not set, `dsv4_jax/programs` in
    XDG_CACHE_HOME or ~/.cache. Programs of whole steps are kept in the subfolder `steps`, see
    `dsv4_jax.decode.program_store`. JAX reads the variable at its import. If JAX is imported already, its configuration
    is set instead.

    JAX_ENABLE_COMPILATION_CACHE=false turns this off. A folder into which other users may write is not used, because
    the programs in it are run.
    """
    # A run needs dozens of small programs, so programs that compile fast are kept, too.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(cache, "dsv4_jax", "programs"))
    programs_folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    is_on = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "true").lower() in ("1", "true", "t", "yes", "y", "on")
    if not is_on or not programs_folder:
        return
    if "://" not in programs_folder:  # a folder of this machine, not of a cloud storage
        try:
            make_private_folder(programs_folder)
        except OSError as error:
            notify(f"Compiled programs are not kept in {programs_folder}: {error.strerror}")
            os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
            if "jax" in sys.modules:
                import jax

                jax.config.update("jax_enable_compilation_cache", False)
            return
        os.environ.setdefault("DSV4_JAX_PROGRAMS", os.path.join(os.path.abspath(programs_folder), "steps"))
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        if jax.config.jax_compilation_cache_dir is None:
            seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
            jax.config.update("jax_compilation_cache_dir", programs_folder)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
            compilation_cache.reset_cache()  # JAX remembers from its first compilation whether there is a folder


def explain_missing_platform() -> str | None:
    """Returns a sentence about JAX_PLATFORMS if JAX is imported and finds no device of this platform; else None."""
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
    """Returns a text without control characters, which a terminal would obey. Tabs and line ends stay."""
    return text.translate(_CONTROLS)


def notify(text: str, style: str = "dim") -> None:
    """Prints a message, such as one about a slow operation, to stderr."""
    Console(stderr=True).print(visible(text), style=style, markup=False, highlight=False, soft_wrap=True)
