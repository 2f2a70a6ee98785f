"""Compiled programs that tests keep for one another, and for the next run: JAX's persistent compilation cache.

Files of tests share few large programs, but thousands of small operations.
"""

import contextlib
import shutil
from pathlib import Path

import jax

from pallas_kernels.runtime import lowering_cache


FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "programs"
MAX_BYTES = 2**30
KERNELS_FOLDER = lowering_cache.kernels_folder  # `keep` replaces it


def remove_if_many() -> None:
    """Removes the programs if they take too much space. Each change of a source adds some."""
    with contextlib.suppress(FileNotFoundError):  # another run removes them
        if sum(path.stat().st_size for path in FOLDER.iterdir()) > MAX_BYTES:
            shutil.rmtree(FOLDER)


def keep() -> None:
    """Lets JAX keep the programs of this process, but no lowered kernels."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(FOLDER))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    lowering_cache.kernels_folder = lambda: None
