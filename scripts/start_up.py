"""Measures the start of `dsv4-jax bench model` until its first step, with an empty and with a full program cache."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import rich
import rich.table
import tyro


def start_up(layers: int = 4, context: int = 4096) -> None:
    """Starts the command twice, in two processes, and checks that the second finds every compiled program.

    On a GPU the layers are V4-Flash's, with random weights.

    Args:
      layers: number of layers, the first ones.
      context: number of tokens of the one request.
    """
    table = rich.table.Table("seconds", "from start to first step", "traced", "lowered", "compiled", "new files")
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder) / "programs"
        out = Path(folder) / "report.json"
        options = ["--layers", layers, "--batches", 1, "--contexts", context, "--json", out]
        command = [sys.executable, "-c", "from dsv4_jax.cli import main; raise SystemExit(main())", "bench", "model"]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(programs), "JAX_ENABLE_COMPILATION_CACHE": "true"}
        known: set[Path] = set()
        missed: set[Path] = set()
        for name in ("first", "second"):
            subprocess.run([*command, *map(str, options)], env=env, check=True, stdout=subprocess.DEVNULL)
            # Files that end in -atime record the last use of a program.
            files = {path for path in programs.rglob("*") if path.is_file() and not path.name.endswith("-atime")}
            start = json.loads(out.read_text())["start"]
            seconds = [f"{start[key]:.1f}" for key in ("process", "trace", "lower", "compile")]
            missed = files - known
            table.add_row(name, *seconds, str(len(missed)))
            known = files
    rich.print(table)
    if missed:
        raise SystemExit(f"the second process compiled or lowered {len(missed)} programs again: {sorted(missed)[:3]}")


if __name__ == "__main__":
    tyro.cli(start_up)
