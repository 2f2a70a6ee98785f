"""The command `dsv4-jax score`."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4_jax.cli import options, startup
from dsv4_jax.cli.model_options import ModelOptions, open_checkpoint


class ScoreCommand(ModelOptions):
    """Computes the likelihood of given tokens, running them through the cache.

    All rows run as one batch: the first P tokens (--decode-from) in chunks of N (--chunk), the others one at a time, as
    in decoding. Prints each row's mean log-likelihood (natural logarithm) and perplexity over its tokens 1 to T-1. Also
    prints bits per byte of text, if the checkpoint's tokenizer.json turns text into these tokens. Without --out, logits
    do not leave the device. With a plain float32 cache, results for different P and N differ by rounding only, which
    checks the cache.

    For example:
      dsv4-jax score --checkpoint path/to/folder --text held_out.txt
      dsv4-jax score --checkpoint path/to/folder --text held_out.txt --out scores.npz --index-topk 64
      dsv4-jax score --checkpoint path/to/folder --ids ids.npy --out scores.npz --chunk 16 --decode-from 48 --layers

    Attributes:
      checkpoint: folder with config.json and safetensors files, in float32, bfloat16 or the release's FP8 and FP4.
      out: .npz file to write: logits [B, T, vocab], log_likelihoods [B, T-1], perplexity [B] and, if known,
        bits_per_byte [B], float32. Default: none.
      ids: .npy file with integer token ids [B, T], T at least 2.
      text: UTF-8 file to score as one row, in place of --ids. Needs a tokenizer.json in the checkpoint's folder.
      chunk: number of tokens N of each row in a prefill step.
      decode_from: number of tokens P before the first decode step; 0 = every token one at a time. Default: T, so
        that all tokens go in chunks.
      index_topk: number of entries that a token attends to in CSA layers. Default: as in config.json.
      window_only: attend to the sliding window only, in all layers.
      drafts: number of drafts K; also write greedy drafts of the model's draft layers after tokens 0 to t, for t from 1
        to T-1: draft_tokens [B, T-1, K] int32 and draft_logits [B, T-1, K, vocab] float32. With DSpark also confidence
        [B, T-1, K] float32, the logits of the drafts' probabilities to be accepted.
      layers: also write attn_in_L and attn_out_L [B, T, hidden] float32, the input and output of attention in layer L.
    """

    checkpoint: Path
    out: Path | None = None
    ids: Path | None = None
    text: Path | None = None
    chunk: int = 256
    decode_from: int | None = None
    index_topk: int | None = None
    window_only: bool = False
    drafts: int = 0
    layers: bool = False

    def run(self) -> None:
        """Runs the command. Raises ValueError, TypeError or OSError after a user's mistake."""
        # Reading the weights takes long, so all options are checked before. Most are checked before JAX is imported.
        if self.drafts and self.window_only:
            raise ValueError("--window-only is for the model alone: leave out --drafts")
        if (self.ids is None) == (self.text is None):
            raise ValueError("give --ids or --text, one of them")
        options.check_file("ids", self.ids, "read")
        options.check_file("text", self.text, "read")
        options.check_file("out", self.out, "written")
        if self.out is None and (self.layers or self.drafts):
            raise ValueError("--layers and --drafts are for the file that --out names: give --out FILE.npz")
        checkpoint, config = open_checkpoint(self.checkpoint, mtp=self.drafts > 0)
        if self.index_topk is not None:
            config = dataclasses.replace(config, index_topk=self.index_topk)
        self.check_devices(config)
        startup.notify(f"Starting JAX and reading {checkpoint} ...")
        import numpy as np

        from dsv4_jax.checkpoint import read_tokenizer
        from dsv4_jax.cli.scoring import read_ids, score_ids, text_bytes

        tokenizer = read_tokenizer(checkpoint)
        ids = self._read_text(tokenizer) if self.ids is None else read_ids(self.ids)
        rows, length = ids.shape
        prefill = length if self.decode_from is None else self.decode_from
        if prefill > length:
            raise ValueError(f"--decode-from {prefill} must be from 0 to {length}, the number of tokens in a row")
        options.check_context(config, length, "--text" if self.ids is None else "--ids")
        manager = self.make_manager(config, rows, options.whole_blocks(config, length), self.drafts)
        ids = np.stack([manager.check_ids(row, f"ids[{i}]") for i, row in enumerate(ids)])

        model = self.load_model(checkpoint, manager.schema)
        sizes = [min(self.chunk, prefill - start) for start in range(0, prefill, self.chunk)] + [1] * (length - prefill)
        steps = score_ids(
            model,
            manager,
            ids,
            sizes,
            keep_logits=self.out is not None,
            layers=self.layers,
            window_only=self.window_only,
            drafts=self.drafts,
        )
        results = _collect(steps, sizes)
        for name in {"log_likelihoods", "draft_tokens", "draft_logits", "confidence"} & results.keys():
            results[name] = results[name][:, :-1]  # nothing follows the last token
        likelihoods = results["log_likelihoods"]
        means = likelihoods.mean(axis=1)
        results["perplexity"] = np.exp(-means)
        if tokenizer and (lengths := text_bytes(tokenizer, ids)):
            nats = -likelihoods.sum(axis=1, dtype=np.float64)
            results["bits_per_byte"] = (nats / np.log(2) / lengths).astype(np.float32)
        if self.out is not None:
            with self.out.open("wb") as file:  # savez would add .npz to a path without it
                np.savez(file, **results)
        _print_table(means, results.get("bits_per_byte"), length)

    def _read_text(self, tokenizer):
        """Returns the token ids [1, T] int32 of --text.

        Raises ValueError if there is no tokenizer, or the file is no UTF-8 text or has fewer than two tokens.
        """
        import numpy as np

        assert self.text is not None
        if tokenizer is None:
            raise ValueError("--text needs a tokenizer.json beside the weights, and there is none: use --ids")
        try:
            ids = tokenizer.encode(self.text.read_bytes().decode()).ids
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {self.text} is no UTF-8 text: {error}") from None
        if len(ids) < 2:
            raise ValueError(f"--text {self.text} has {len(ids)} tokens; scoring needs at least 2")
        return np.asarray([ids], np.int32)


def _collect(steps, sizes):
    """Runs all steps and joins their arrays along the axis of tokens, while a progress bar is shown.

    Args:
      steps: iterator of `score_ids`, which yields arrays [B, n, ...] by name.
      sizes: number of tokens n of each step; their sum is T.

    Returns:
      {name: array [B, T, ...]}.
    """
    import numpy as np
    from rich.progress import track

    results: dict[str, Any] = {}
    start = 0
    bar = track(steps, "Scoring", len(sizes), console=Console(stderr=True), transient=True)
    for step, n in zip(bar, sizes, strict=True):
        for name, value in step.items():
            whole = results.setdefault(name, np.empty((len(value), sum(sizes), *value.shape[2:]), value.dtype))
            whole[:, start : start + n] = value
        start += n
    return results


def _print_table(means, bits, total):
    """Prints a line for each row. `bits` are the bits per byte of text, or None."""
    table = Table("row", "tokens scored", "mean log-likelihood", "perplexity", *[] if bits is None else ["bits a byte"])
    for row, mean in enumerate(means):
        cells = [str(row), str(total - 1), f"{mean:.4f}", f"{math.exp(-mean):.3f}"]
        table.add_row(*cells, *[] if bits is None else [f"{bits[row]:.4f}"])
    Console().print(table)
