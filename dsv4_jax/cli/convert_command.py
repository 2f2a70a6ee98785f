"""The command `dsv4-jax convert`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from dsv4_jax.cli import startup
from dsv4_jax.cli.options import Command
from dsv4_jax.cli.weight_plan import number_table


class ConvertCommand(Command):
    """Writes a checkpoint's weights to a new folder, in another storage or under other names.

    bfloat16 and float32 hold every value of the release's FP8 and FP4 exactly, so a release that was converted to them
    can be converted back to the same values. Other weights that become FP8 or FP4 are rounded to nearest. Weights that
    stay FP8 or FP4 are copied. One tensor is in memory at a time, and the folder appears when it is complete. Needs no
    GPU.

    Prints the loss by rounding for each storage in the new files: the shares of values that changed and that became 0,
    and the average and the largest relative error of the tensors. The relative error of a tensor is the root
    mean square of the differences, divided by that of the values. It is 0 if the new storage holds the values exactly.

    For example:
      dsv4-jax convert path/to/release path/to/new --weights bfloat16
      dsv4-jax convert path/to/release path/to/new --weights bfloat16 --naming module
      dsv4-jax convert path/to/new path/to/other --weights quantized --naming release

    Attributes:
      source: folder with config.json and safetensors files, in float32, bfloat16 or the release's FP8 and FP4.
      dest: folder to write. It must be empty or not exist.
      weights: storage of linear maps and experts. quantized: FP8, and FP4 for experts, as the release. bfloat16:
        norms, embedding and head are bfloat16 too, sinks and biases float32. float32: everything.
      naming: names of the tensors. release: DeepSeek's, such as layers.1.attn.wkv.weight. hybrid: the release's names
        with model. before them, as transformers saves them. module: transformers' modules, such as
        model.layers.1.self_attn.kv_proj.weight, with a layer's experts in one tensor; not with quantized. Default: the
        source's names.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    dest: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DEST")]
    weights: Literal["quantized", "bfloat16", "float32"]
    naming: Literal["release", "hybrid", "module"] | None = None

    def run(self) -> None:
        """Runs the command. Raises ValueError or OSError after a user's mistake."""
        startup.notify(f"Reading {self.source} ...")
        startup.show_log()
        from dsv4_jax.checkpoint import convert_checkpoint

        losses = convert_checkpoint(self.source, self.dest, weights=self.weights, naming=self.naming, progress=True)
        _print_losses(losses)
        print(f"wrote {startup.visible(str(self.dest))}")


def _print_losses(losses):
    """Prints the result of `convert_checkpoint` as a table with a row for each storage."""
    columns = "tensors", "values", "changed", "became 0", "relative error", "largest"
    table = number_table("Loss of rounding", "stored as", *columns)
    largest = []
    for storage, loss in sorted(losses.items()):
        error, name = loss.largest
        shares = [f"{count / loss.num_values:.2%}" if count else "0" for count in (loss.num_rounded, loss.num_zeroed)]
        errors = [f"{error:.2e}" if error else "0" for error in (loss.error, error)]
        table.add_row(storage, str(len(loss.tensors)), str(loss.num_values), *shares, *errors)
        if error:
            largest.append(f"The largest error in {storage} is that of {startup.visible(name)}.\n")
    Console().print(table)
    print(*largest, sep="", end="")
