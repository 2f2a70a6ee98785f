"""Parses the command line and runs a command. A command imports JAX only when it runs."""

from typing import Annotated

import tyro

from dsv4_jax import __version__
from dsv4_jax.cli.bench_command import BenchCommand
from dsv4_jax.cli.chat_command import ChatCommand
from dsv4_jax.cli.convert_command import ConvertCommand
from dsv4_jax.cli.generate_command import GenerateCommand
from dsv4_jax.cli.options import subcommands
from dsv4_jax.cli.plan_command import PlanCommand
from dsv4_jax.cli.score_command import ScoreCommand
from dsv4_jax.cli.serve_command import ServeCommand
from dsv4_jax.cli.startup import explain_missing_platform, notify, use_compilation_cache
from dsv4_jax.common.xla_flags import jax_has_started, set_xla_flags


_DESCRIPTION = """DeepSeek-V4's quantized, paged KV cache and sparse-attention decode.

To begin: dsv4-jax generate (a tiny model comes with the package). --version prints the version."""
_BENCH = """Times operations, decode steps, prefill or serving on this device.

For example:
  dsv4-jax bench ops append gather
  dsv4-jax bench model --layers 8 --batches 1 8

Each benchmark explains its options: dsv4-jax bench NAME --help."""
_Command = subcommands(
    generate=GenerateCommand,
    serve=ServeCommand,
    chat=ChatCommand,
    score=ScoreCommand,
    convert=ConvertCommand,
    plan=PlanCommand,
)
_Command |= Annotated[BenchCommand, tyro.conf.subcommand("bench", description=_BENCH)]


def run_command(argv: list[str]) -> int:
    """Runs the command that the arguments name. Returns the exit code, see `dsv4_jax.cli.main`."""
    if argv == ["--version"]:
        print(f"dsv4-jax {__version__}")
        return 0
    command = tyro.cli(
        _Command, prog="dsv4-jax", description=_DESCRIPTION, args=argv, config=(tyro.conf.FlagCreatePairsOff,)
    )
    if not jax_has_started():  # it has started if a Python program that uses JAX calls `main`
        set_xla_flags()
    use_compilation_cache()
    try:
        command.check_minimums()
        command.run()
    except BrokenPipeError:
        raise
    except Exception as error:
        text = explain_missing_platform()
        if text is None and not isinstance(error, ValueError | TypeError | OSError):
            raise
        notify(f"Error: {text or command.explain(error)}", style="bold red")
        return 2
    return 0
