"""Trains a byte-level DeepSeek-V4 small enough to ship: `python examples/king_james/train_tiny.py --help`."""

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import kjv
import numpy as np
import orbax.checkpoint as ocp
import tyro
from card import write_card
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tiny_model import TINY, TINY_WINDOW_ONLY, TOY, TOY_WINDOW_ONLY, apart, assemble, first_weights, named_tensors
from training import Recipe, batch, evaluate, evaluate_needles, first_state, train_step

from dsv4_jax.checkpoint import load_checkpoint, save_release
from dsv4_jax.data import packaged_checkpoint


@dataclasses.dataclass(frozen=True)
class TrainTiny:
    """Trains a small DeepSeek-V4 on the bytes of a text: all kinds of layer, MoE, hyper-connections and indexer.

    The step is plain JAX: the package's own modules use a dense, differentiable cache (dense_cache.py). Later steps
    round weights and cache to the FP8 and FP4 of the saved model. The text is split by whole books: two choose the
    checkpoint, four are only scored.

    Run it again with the same options to continue where it stopped. In --out:
      best/     the model with the lowest validation loss so far: weights, tokenizer, model card, curve (PNG)
      log.jsonl a line for each evaluation
      state/    the state of the training, to continue from

    The text: apt-get download bible-kjv-text && dpkg -x bible-kjv-text_*.deb kjv

    For example:
      python examples/king_james/train_tiny.py --text kjv/usr/lib/bible.data --out runs/kjv --steps 2000
      python examples/king_james/train_tiny.py --text kjv/usr/lib/bible.data --out runs/window --steps 2000 \\
        --window-only
      python examples/king_james/train_tiny.py --text kjv/usr/lib/bible.data --out runs/near --init runs/kjv/best \\
        --needles 1 --length 128 --rows 32 --questions 14 --nearest 8 --steps 1000 --learning-rate 1e-3 --dropout 0
      python examples/king_james/train_tiny.py --text kjv/usr/lib/bible.data --out runs/needles --init runs/near/best \\
        --needles 1 --length 512 --rows 32 --questions 32 --steps 800 --learning-rate 1e-3 --dropout 0 --quantize-from 0
      python examples/king_james/train_tiny.py --text kjv/usr/lib/bible.data --out runs/mtp --steps 2000 --mtp \\
        --rows 32 --length 1024
      python examples/king_james/train_tiny.py --text README.md --out toy --size toy --rows 4 --length 256 --steps 40

    Attributes:
      text: the package's bible.data, or any file, taken as bytes.
      out: folder for everything that is written.
      steps: number of steps of the whole training, which may take several commands; schedules depend on it.
      minutes: save and stop after this time; the same command continues from there. Default: no limit.
      window_only: train a model without compressed entries, with wider experts for about as many parameters.
      mtp: train a multi-token-prediction block for the model in --init, by default the packaged one, which stays as it
        is. The loss is the cross-entropy of the block's drafts with the model's own distributions.
      init: folder of a model to fine-tune, which also decides the shape.
      size: tiny is the packaged model's shape; toy is for trying this script on a CPU.
      rows: number of sequences in a step.
      length: number of bytes in a sequence, a multiple of the window (128; toy: 8).
      needles: share of the rows with hidden key-value pairs and questions about them. If it is above 0, the loss of the
        answers chooses the checkpoint. Train on short rows first (lengths 128, 512, 2048, 16384), because retrieval is
        learned at short distances first.
      questions: number of questions in a row with pairs.
      nearest: minimum distance in bytes from a question to its fact.
      learning_rate: peak learning rate.
      weight_decay: weight decay of matrices.
      dropout: share of each block's output that is dropped.
      select_from: share of the steps after which CSA sees the indexer's selection only.
      quantize_from: share of the steps after which weights and cache are rounded.
      dtype: dtype of activations.
      every: number of steps between evaluations. Default: a fortieth of the steps.
      seed: seed of weights, data order and dropout.
    """

    text: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    steps: int = 2000
    minutes: float | None = None
    window_only: bool = False
    mtp: bool = False
    init: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    size: Literal["tiny", "toy"] = "tiny"
    rows: int = 16
    length: int = 4096
    needles: float = 0.0
    questions: int = 24
    nearest: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    select_from: float = 0.15
    quantize_from: float = 0.6
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    every: int | None = None
    seed: int = 0

    def run(self) -> dict[str, Any]:
        """Trains, and returns the last line of the log."""
        begin = time.monotonic()
        parts = kjv.split(kjv.read_books(self.text))
        recipe, state = self._begin()
        for part, tokens in parts.items():
            if len(tokens) <= recipe.length:
                raise ValueError(f"the {part} part of {self.text} has {len(tokens)} bytes: too few for {self.length=}")
        manager = ocp.CheckpointManager(
            (self.out / "state").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False),
        )
        log = self.out / "log.jsonl"
        lines: list[dict[str, Any]] = []
        if (restored_step := manager.latest_step()) is not None:
            state = manager.restore(restored_step, args=ocp.args.StandardRestore(state))
            # Restored arrays are committed to a device, for which `train_step` would be compiled again. Copies through
            # the host are not committed.
            state = jax.tree.map(lambda value: jnp.asarray(np.asarray(value)), state)
            lines = [line for line in map(json.loads, log.read_text().splitlines()) if line["step"] <= restored_step]
        every = self.every or max(self.steps // 40, 1)
        earlier = lines[-1]["seconds"] if lines else 0.0
        saved = begin

        with Progress(*_COLUMNS, console=Console(stderr=True)) as progress:
            bar = progress.add_task("training", total=self.steps, completed=restored_step or 0, state="compiling")
            for step in range(restored_step or 0, self.steps):
                progress_made = np.float32(step / self.steps)
                state, metrics = train_step(recipe, state, progress_made, *batch(recipe, parts["train"], step))
                steps_done = step + 1
                out_of_time = self.minutes is not None and time.monotonic() - begin > 60 * self.minutes
                if steps_done % 10 == 0 or out_of_time:
                    progress.update(bar, completed=steps_done, state=f"{float(metrics['bits']):.3f} bits a byte")
                if steps_done % every == 0 or steps_done == self.steps or out_of_time:
                    check = evaluate_needles if recipe.needles else evaluate
                    bits = np.mean(check(recipe, state["trained"], state["fixed"], parts["validation"]))
                    lines.append({name: float(value) for name, value in metrics.items()})
                    lines[-1] |= {
                        "step": steps_done,
                        "validation": float(bits),
                        "seconds": earlier + time.monotonic() - begin,
                    }
                    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
                    if lines[-1]["validation"] <= min(line["validation"] for line in lines):
                        tensors = state["trained"] | state["fixed"]
                        save_release(assemble(recipe.config, tensors, jnp.float32), self.out / "best")
                    if steps_done == self.steps or out_of_time or time.monotonic() - saved > _SAVE_EVERY:
                        manager.save(steps_done, args=ocp.args.StandardSave(state))
                        saved = time.monotonic()
                if out_of_time:
                    break
        manager.close()
        self._finish(recipe, parts["held_out"], lines)
        return lines[-1]

    def _begin(self) -> tuple[Recipe, dict[str, Any]]:
        shapes = {"tiny": (TINY, TINY_WINDOW_ONLY), "toy": (TOY, TOY_WINDOW_ONLY)}
        config = shapes[self.size][self.window_only]
        start = None
        init = packaged_checkpoint() if self.mtp and self.init is None else self.init
        if init is not None:
            model = load_checkpoint(init, dtype=jnp.float32)
            config = dataclasses.replace(model.config, num_nextn_predict_layers=int(self.mtp))
            tensors = {}
            if self.mtp:
                tensors = {path: x for part in first_weights(config, self.seed) for path, x in part.items()}
            start = apart(tensors | named_tensors(model))
        mine = {field.name for field in dataclasses.fields(self)}
        options: Any = {f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe) if f.name in mine}
        recipe = Recipe(config, **options)
        self.out.mkdir(parents=True, exist_ok=True)
        return recipe, first_state(recipe, start)

    def _finish(self, recipe: Recipe, held_out: np.ndarray, lines: list[dict[str, Any]]) -> None:
        """Scores the best model on the held-out text, and writes its tokenizer and card."""
        best = self.out / "best"
        tensors = named_tensors(load_checkpoint(best, recipe.config, dtype=jnp.float32))
        bits = evaluate(recipe, *apart(tensors), held_out)
        shutil.copy(packaged_checkpoint() / "tokenizer.json", best)  # its tokens are bytes, too
        if self.mtp:
            Console().print(f"held-out text: {bits.mean():.4f} bits a draft; the model with its block is in {best}")
            return
        write_card(best, recipe, self.steps, tensors, lines, bits, self.text.name)
        Console().print(f"held-out text: {bits.mean():.4f} bits a byte; the model and its card are in {best}")


_SAVE_EVERY = 120.0  # seconds
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[state]}"),
)


if __name__ == "__main__":
    command = tyro.cli(TrainTiny)
    try:
        command.run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
