"""`dsv4-jax score`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsv4_jax.cli.common import CacheFormat, Dtype, check_positive, make_manager, read_config


@dataclasses.dataclass(frozen=True)
class Score:
    """Computes how likely given tokens are, reading them through the cache.

    All rows run as one batch: the first P tokens in chunks of N, the others one at a time, as in decoding. Prints each
    row's mean log-likelihood (natural logarithm) and perplexity over its tokens 1 to T-1, each given those before it.
    With a plain float32 cache P and N change nothing but rounding, which is a way to check the cache.

    For example:
      dsv4-jax score --checkpoint path/to/folder --ids ids.npy --out scores.npz
      dsv4-jax score --checkpoint path/to/folder --ids ids.npy --out scores.npz --chunk 16 --decode-from 48 --layers

    Attributes:
      checkpoint: folder with config.json and safetensors files, in float32, bfloat16 or the release's FP8 and FP4.
      ids: .npy file with integer token ids [B, T], T at least 2.
      out: .npz file to write: logits [B, T, vocab], log_likelihoods [B, T-1] and perplexity [B], float32.
      chunk: N, prompt tokens of each row that go through the model at once.
      decode_from: P; 0 = every token one at a time. Default: T, so that all tokens go in chunks.
      cache_format: what the cache's bytes mean. v4: as released (FP8 rows, FP4 indexer keys). per_entry: one float32
        scale a row. plain: not quantised.
      dtype: of weights and activations.
      layers: also write attn_in_L and attn_out_L [B, T, hidden] float32, what enters and leaves the attention of each
        layer L.
    """

    checkpoint: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    ids: Annotated[Path, tyro.conf.arg(metavar="FILE.npy")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.npz")]
    chunk: Annotated[int, tyro.conf.arg(metavar="N")] = 256
    decode_from: Annotated[int | None, tyro.conf.arg(metavar="P", help_behavior_hint="")] = None
    cache_format: CacheFormat = "v4"
    dtype: Dtype = "bfloat16"
    layers: bool = False

    def run(self) -> None:
        """Runs the command; raises ValueError, TypeError or OSError where the user has to change something."""
        import jax.numpy as jnp

        from dsv4_jax.checkpoint import load_checkpoint
        from dsv4_jax.cli.scoring import score_ids

        # All that can be wrong is found before the weights are read.
        check_positive(chunk=self.chunk)
        if self.out.is_dir() or not self.out.parent.is_dir():
            raise ValueError(f"--out {self.out} must name a file in an existing folder")
        ids = _read_ids(self.ids)
        rows, total = ids.shape
        prefill = total if self.decode_from is None else self.decode_from
        if not 0 <= prefill <= total:
            raise ValueError(f"--decode-from {prefill} must be from 0 to {total}, the number of tokens in a row")
        config = read_config(self.checkpoint)
        manager = make_manager(config, rows, total, self.cache_format, self.dtype)
        ids = np.stack([manager.check_ids(row, f"ids[{i}]") for i, row in enumerate(ids)])

        model = load_checkpoint(self.checkpoint, config, dtype=jnp.dtype(self.dtype))
        sizes = [min(self.chunk, prefill - at) for at in range(0, prefill, self.chunk)] + [1] * (total - prefill)
        results: dict[str, Any] = {}
        at = 0
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("Scoring", total=total)
            for part, n in zip(score_ids(model, manager, ids, sizes, layers=self.layers), sizes, strict=True):
                for name, value in part.items():
                    whole = results.setdefault(name, np.empty((rows, total, value.shape[-1]), np.float32))
                    whole[:, at : at + n] = value
                at += n
                progress.advance(bar, n)
        likelihoods = np.stack([_log_likelihoods(*row) for row in zip(results["logits"], ids, strict=True)])
        means = likelihoods.mean(axis=1)
        with self.out.open("wb") as file:  # savez would add an ending to a bare name
            np.savez(file, log_likelihoods=likelihoods, perplexity=np.exp(-means), **results)
        _print_table(means, total)


def _read_ids(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        try:
            ids = np.lib.format.read_array(file, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"--ids {path} is no .npy file of numbers: {error}") from None
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"--ids {path} has shape {list(ids.shape)}; it must be [B, T], B at least 1 and T at least 2")
    return ids


def _log_likelihoods(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[T-1] float32 log-probabilities of ids[1:] from logits [T, vocab], each from the row before it."""
    logits = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
    return (chosen - np.log(np.exp(logits).sum(axis=1, dtype=np.float64))).astype(np.float32)


def _print_table(means: np.ndarray, total: int) -> None:
    table = Table("row", "tokens scored", "mean log-likelihood", "perplexity")
    for row, mean in enumerate(means):
        table.add_row(str(row), str(total - 1), f"{mean:.4f}", f"{np.exp(-mean):.3f}")
    Console().print(table)
