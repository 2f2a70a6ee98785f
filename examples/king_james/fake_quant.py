"""Fine-tunes a model with and without rounded weights: `python examples/king_james/fake_quant.py --help`."""

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import kjv
import numpy as np
import optax
import tyro
from dense_cache import DenseCache, whole_sequences
from flax import nnx
from rich.console import Console
from rich.progress import track
from tiny_model import for_training

from dsv4_jax.checkpoint import fake_quantize, load_checkpoint, save_release
from dsv4_jax.data import packaged_checkpoint


@dataclasses.dataclass(frozen=True)
class FineTune:
    """Fine-tunes the packaged model on the bytes of a text, once with float weights and once with `fake_quantize`.

    The cache is rounded in both trainings. Writes the trained weights in float32 to OUT/float and OUT/fake_quant, for
    `dsv4-jax convert` and `dsv4-jax score`.

    For example:
      python examples/king_james/fake_quant.py --text train.txt --out runs/served --steps 60

    Attributes:
      text: file to train on.
      out: folder of the two models.
      steps: number of steps of Adam.
      rows, length: number of sequences in a step, and of bytes in each, a multiple of 128.
      learning_rate: learning rate, which falls to 0 as a cosine.
      seed: seed of the order of the text.
    """

    text: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    steps: int = 60
    rows: int = 4
    length: int = 256
    learning_rate: float = 1e-3
    seed: int = 0

    def run(self) -> None:
        """Trains and writes both models."""
        text = np.frombuffer(self.text.read_bytes(), np.uint8).astype(np.int32)
        for name, rounds in (("float", False), ("fake_quant", True)):
            self._train(name, text, rounds=rounds)

    def _train(self, name: str, text: np.ndarray, *, rounds: bool) -> None:
        model = load_checkpoint(packaged_checkpoint(), dtype=jnp.float32)
        graph, floats, others = nnx.split(model, _is_trained, ...)
        optimizer = optax.adam(optax.cosine_decay_schedule(self.learning_rate, self.steps))
        cache = DenseCache.make(model.config, self.rows, self.length, dtype=jnp.float32)
        cache = dataclasses.replace(cache, quantize=jnp.bool_(True))

        @jax.jit
        def step(floats, state, ids):
            def loss(floats):
                model = nnx.merge(graph, floats, others)
                model = for_training(fake_quantize(model) if rounds else model)
                hidden, after = model(cache, whole_sequences(ids[:, :-1]))
                losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), ids[:, 1:].reshape(-1))
                return losses.mean() + after.index_loss, losses.mean()

            gradient, mean_loss = jax.grad(loss, has_aux=True)(floats)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(floats, updates), state, mean_loss

        rng = np.random.default_rng(self.seed)
        state = optimizer.init(floats)
        mean_losses = []
        for _ in track(range(self.steps), name, console=Console(stderr=True)):
            ids = np.full((self.rows, self.length + 1), kjv.BOS, np.int32)
            for row in ids:
                start = rng.integers(0, len(text) - self.length)
                row[1:] = text[start : start + self.length]
            floats, state, mean_loss = step(floats, state, ids)
            mean_losses.append(float(mean_loss))
        folder = self.out / name
        save_release(nnx.merge(graph, floats, others), folder, weights="float32")
        shutil.copy(packaged_checkpoint() / "tokenizer.json", folder)
        Console().print(f"{name}: {np.mean(mean_losses[-10:]):.4f} nats a byte in the last ten steps")


def _is_trained(_, variable):
    return jnp.issubdtype(variable.get_value().dtype, jnp.floating)


if __name__ == "__main__":
    tyro.cli(FineTune).run()
