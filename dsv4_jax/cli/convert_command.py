"""The command `dsv4-jax convert`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dsv4_jax.cli import startup
from dsv4_jax.cli.options import optional


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Writes a checkpoint's weights to a new folder, in another storage or under other names.

    bfloat16 and float32 hold every value of the release's FP8 and FP4 exactly, so such a checkpoint can be converted
    back to the same values. Other weights that become FP8 or FP4 are rounded to nearest. Weights that stay FP8 or FP4
    are copied. One tensor is in memory at a time, and the folder appears when it is complete. Needs no GPU.

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
    naming: Annotated[Literal["release", "hybrid", "module"] | None, optional("{release,hybrid,module}")] = None

    def run(self) -> None:
        """Runs the command. Raises ValueError or OSError after a user's mistake."""
        startup.notify(f"Reading {self.source} ...")
        startup.show_log()
        from dsv4_jax.checkpoint import convert_checkpoint

        convert_checkpoint(self.source, self.dest, weights=self.weights, naming=self.naming, progress=True)
        print(f"wrote {startup.visible(str(self.dest))}")
