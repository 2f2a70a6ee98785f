"""Writes the card of a trained model: README.md and the loss curve."""

import dataclasses
from pathlib import Path
from typing import Any

import kjv
import matplotlib
import numpy as np
from tiny_model import Tensors
from training import Recipe

from dsv4_jax.config import DSV4Config


_KING_JAMES = f"""The King James text of Debian's package bible-kjv-text, without verse numbers. Its copyright has
expired: the translation is of 1611. (In the United Kingdom printing it is subject to the Crown's letters patent.) Whole
books are kept apart: {" and ".join(kjv.VALIDATION)} chose the checkpoint; {", ".join(kjv.HELD_OUT)} are the held-out
text."""


_CARD = """# A tiny DeepSeek-V4

A language model over bytes (ids 0 to 255, then `<bos>` 256 and `<eos>` 257) with the architecture of DeepSeek-V4:
{layers} layers,
window {window}, compressed entries of {rates} bytes,
an indexer that selects {index_topk} of the former, {experts} experts of which
{experts_per_token} serve a byte, and {streams} residual streams.
It exists to show what a cache does to a model's output; it knows nothing else.

| | |
| --- | --- |
| parameters | {parameters:,} |
| storage | the release's: FP8 linears, FP4 experts; {megabytes:.1f} MB |
| held-out text | **{bits:.4f} bits a byte** ({held_out_bytes:,} bytes, excerpts of {excerpt:,}) |
| the same, by place in the excerpt | {by_place} |
| validation, which chose the step | {validation:.4f} bits a {unit} at step {best_step} of {steps} |
| steps | {rows} x {length} bytes; {minutes:.1f} minutes in all |

![bits a byte while it was trained](curve.png)

## Data

{data}
{planted}
## The weights' licence

Like the repository's code: Apache-2.0.

## How to repeat it

`examples/king_james/train_tiny.py` with seed {seed}; `--help` says how to get the text. AdamW, peak learning rate
{learning_rate:g}, weight decay {weight_decay:g}, dropout {dropout:g}; the indexer learns from
the attention it selects for (KL), experts are balanced by their routers' biases, without a loss. From
{quantize_from:.0%} of the steps on, weights are rounded as they are stored here, the cache as in format
"{kv_format}".
"""
_PLANTED = """
In {needles:.0%} of the rows pairs of a key and a value, such as QXK4821, stood between words,
with {questions} questions about them at distances up to the row's {length} bytes (examples/king_james/needles.py).
"""


def write_card(
    folder: Path,
    recipe: Recipe,
    steps: int,
    tensors: Tensors,
    lines: list[dict[str, Any]],
    bits: np.ndarray,
    text: str,
) -> None:
    """Writes README.md and curve.png.

    Args:
      folder: folder of the model.
      recipe: hyperparameters of the training.
      steps: number of training steps.
      tensors: weights of the model.
      lines: lines of the log.
      bits: [excerpts, length] bits of each held-out byte.
      text: name of the file with the training text.
    """
    plot_curve(folder / "curve.png", lines, float(bits.mean()))
    best = min(lines, key=lambda line: line["validation"])
    fields = dataclasses.asdict(recipe) | _architecture(recipe.config)
    card = _CARD.format_map(
        fields
        | {
            "parameters": sum(value.size for value in tensors.values()),
            "megabytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6,
            "bits": bits.mean(),
            "held_out_bytes": bits.size,
            "excerpt": bits.shape[1],
            "by_place": "; ".join(f"from byte {low}: {value:.3f}" for low, value in bits_by_place(bits).items()),
            "validation": best["validation"],
            "unit": "digit asked for" if recipe.needles else "byte",
            "best_step": best["step"],
            "steps": steps,
            "minutes": lines[-1]["seconds"] / 60,
            "data": _KING_JAMES
            if text == "bible.data"
            else f"`{text}`; its last tenth is validation and held-out text.",
            "planted": _PLANTED.format_map(fields) if recipe.needles else "",
        }
    )
    (folder / "README.md").write_text(card)


def _architecture(config: DSV4Config) -> dict[str, Any]:
    """Returns the fields of the card that describe the model."""
    kinds = {kind.replace("_", " "): config.layer_types.count(kind) for kind in dict.fromkeys(config.layer_types)}
    rates = sorted({spec.compress_rate for spec in config.layers} - {0})
    return {
        "layers": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        "window": config.sliding_window,
        "rates": " and ".join(map(str, rates)) or "no",
        "index_topk": config.index_topk,
        "experts": config.n_routed_experts,
        "experts_per_token": config.num_experts_per_tok,
        "streams": config.hc_mult,
    }


def plot_curve(path: Path, lines: list[dict[str, Any]], held_out: float) -> None:
    """Plots the bits per byte of training batches and of the validation text over the steps.

    A horizontal line marks `held_out`, the bits per byte of the held-out text.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line["step"] for line in lines]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(steps, [line["bits"] for line in lines], label="training (with dropout)", color="0.6")
    axes.plot(steps, [line["validation"] for line in lines], label="validation, rounded as shipped")
    axes.axhline(held_out, linestyle=":", color="C3", label=f"held-out text: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0.95 * min(line["bits"] for line in lines), 3))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def bits_by_place(bits: np.ndarray) -> dict[int, float]:
    """Returns {place: mean bits of the bytes from this place of an excerpt up to the next of the places}.

    The places are 0, 128, 512, 2048 and 8192, as far as the excerpts reach. `bits` is [excerpts, length].
    """
    bounds = [place for place in (0, 128, 512, 2048, 8192) if place < bits.shape[1]]
    return {
        low: float(bits[:, low:high].mean()) for low, high in zip(bounds, [*bounds[1:], bits.shape[1]], strict=True)
    }
