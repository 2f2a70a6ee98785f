"""Counts the tokens that depend on other requests, and measures what `batch_invariant` costs."""

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich
import tyro

from dsv4_jax.bench.reports import write_report
from dsv4_jax.checkpoint import load_checkpoint, read_tokenizer
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import KVCacheManager


DRAFTS = 2
BLOCK_TOKENS = 128
TEXTS = {"readme": Path(__file__).parents[2] / "README.md", "license": Path(__file__).parents[2] / "LICENSE"}


def main(
    text: str = "readme", requests: int = 48, new_tokens: int = 64, temperature: float = 0.8, out: Path | None = None
) -> None:
    """Runs requests one at a time, and together in other programs, and compares their tokens.

    Args:
      text: text of the prompts, which begin at random places: "readme" or "license".
      requests: number of requests.
      new_tokens: number of new tokens of each.
      temperature: temperature of the sampling, with top_p=0.95; 0 = greedy.
      out: also write the report to this file.
    """
    content = TEXTS[text].read_bytes()
    rng = np.random.default_rng(0)
    tokenizer = read_tokenizer(packaged_checkpoint())
    assert tokenizer is not None
    prompts = []
    for _ in range(requests):
        size = int(rng.integers(16, 300))
        begin = int(rng.integers(len(content) - size))
        prompts.append(tokenizer.encode(content[begin : begin + size].decode(errors="ignore")).ids)
    model = CompiledModel(load_checkpoint(packaged_checkpoint()))
    params = {"max_new_tokens": new_tokens, "sampling": SamplingParams(temperature, 0, 0.95 if temperature else 1.0)}

    def run(slots: int, token_budget: int, drafts: int = DRAFTS, **options: Any) -> tuple[list[list[int]], float]:
        """Returns the new tokens of each request, and the seconds after compilation."""
        sizes = {
            "max_requests": slots,
            "max_context": 512,
            "block_tokens": BLOCK_TOKENS,
            "max_query_tokens": 1 + drafts,
        }
        manager = KVCacheManager(read_config(packaged_checkpoint()), num_blocks=4 * slots, **sizes)
        drafter = PromptLookup() if drafts else None
        engine = Engine(model, manager, token_budget=token_budget, drafter=drafter, **options)
        engine.warm_up()
        start = time.perf_counter()
        added = [engine.add(prompt, seed=i, **params) for i, prompt in enumerate(prompts)]
        while engine.busy:
            engine.step()
        return [request.generated for request in added], time.perf_counter() - start

    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "text": text, "runs": []}
    report |= {"requests": requests, "new_tokens": new_tokens, "temperature": temperature}
    expected, _ = run(1, 256, 0)  # as `dsv4-jax generate` runs them
    for slots, budget, invariant in ((4, 256, False), (16, 256, False), (16, 256, True), (16, 48, True)):
        options = {"slots": slots, "token_budget": budget, "batch_invariant": invariant}
        found, seconds = run(**options)
        # Tokens after the first difference of a text are its consequences.
        first = [
            next((i for i, (a, b) in enumerate(zip(*two, strict=False)) if a != b), None)
            for two in zip(expected, found, strict=True)
        ]
        compared = sum(len(ids) if at is None else at + 1 for at, ids in zip(first, found, strict=True))
        differing = sum(at is not None for at in first)
        options |= {"differing_texts": differing, "compared_tokens": compared, "seconds": round(seconds, 2)}
        report["runs"].append(options)
        rich.print(options)
    if out is not None:
        write_report(out, report)


if __name__ == "__main__":
    tyro.cli(main)
