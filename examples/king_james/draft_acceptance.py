"""Measures the acceptance of a model's own drafts: `python examples/king_james/draft_acceptance.py --help`."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import kjv
import numpy as np
import tyro

from dsv4_jax import DSV4Config, KVCacheManager, SamplingParams, load_checkpoint
from dsv4_jax.bench.reports import write_report
from dsv4_jax.data import packaged_checkpoint
from dsv4_jax.decode import CompiledModel
from dsv4_jax.engine import Engine, Request, generate


@dataclasses.dataclass(frozen=True)
class DraftAcceptance:
    """Continues prompts with 0, 1, 2, .. drafts per step, up to the model's maximum, and counts the accepted drafts.

    Steps with and without drafts run in the same compiled program, so their tokens must be equal. Prints one JSON
    object, and a table for the model's card.

    For example:
      python examples/king_james/draft_acceptance.py --text kjv/usr/lib/bible.data

    Attributes:
      text: text of train_tiny.py, from whose held-out part prompts are taken. Default: prompts of random token ids.
      checkpoint: folder of a model with an MTP block or with DSpark layers. Default: the packaged one, with MTP.
      requests: number of prompts, which are continued as one batch.
      prompt: number of tokens in a prompt.
      tokens: number of tokens to generate for each prompt.
      speed_tokens: number of tokens of a request that is timed alone, in the loop on the device; 0 = none.
      out: also write the JSON to this file.
    """

    text: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    requests: int = 16
    prompt: int = 256
    tokens: int = 640
    speed_tokens: int = 512
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None

    def run(self) -> dict[str, Any]:
        """Measures, prints and returns the report."""
        checkpoint = self.checkpoint or packaged_checkpoint()
        config = DSV4Config.from_hf(checkpoint, mtp=True)
        assert config.drafts is not None
        prompts = self._prompts(config)
        max_drafts = config.drafts.max_drafts or 3
        model = CompiledModel(load_checkpoint(checkpoint, config))
        report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        report |= {"requests": self.requests, "prompt": self.prompt, "tokens": self.tokens}
        engine = Engine(
            model,
            self._manager(model, max_drafts),
            token_budget=self.requests * (1 + max_drafts),
            drafter="model",
            draft_tokens=max_drafts,
            batch_invariant=True,
        )
        for name, sampling in {"greedy": SamplingParams(), "temperature_1": SamplingParams(temperature=1.0)}.items():
            plain = self._generate(engine, prompts, sampling, 0)
            total = sum(len(request.generated) for request in plain)
            for drafts in range(1, 1 + max_drafts):
                requests = self._generate(engine, prompts, sampling, drafts)
                pairs = zip(plain, requests, strict=True)
                same = sum(int(np.equal(a.generated, b.generated).sum()) for a, b in pairs)
                report[f"{name}_{drafts}"] = _summary(requests, drafts) | {
                    "tokens": total,
                    "differing_tokens": total - same,
                }
                print(f"{name}, {drafts} drafts: {report[f'{name}_{drafts}']}", flush=True)
        if self.speed_tokens:
            report["tokens_per_second"] = self._speed(model, prompts[0], max_drafts)
        print(json.dumps(report))
        print(_table(report, max_drafts))
        if self.out is not None:
            write_report(self.out, report)
        return report

    def _prompts(self, config: DSV4Config) -> list[np.ndarray]:
        if self.text is None:
            return list(np.random.default_rng(0).integers(config.vocab_size, size=(self.requests, self.prompt)))
        held_out = kjv.split(kjv.read_books(self.text))["held_out"]
        starts = np.linspace(0, len(held_out) - self.prompt, self.requests).astype(int)
        return [np.append(kjv.BOS, held_out[at : at + self.prompt - 1]) for at in starts]

    def _manager(self, model: CompiledModel, drafts: int, requests: int | None = None) -> KVCacheManager:
        requests = requests or self.requests
        context = self.prompt + max(self.tokens, self.speed_tokens)
        blocks = requests * (1 + context // 128)
        return KVCacheManager(
            model.module.config,
            num_blocks=blocks,
            max_requests=requests,
            max_context=128 * (1 + context // 128),
            max_query_tokens=1 + drafts,
        )

    def _generate(
        self, engine: Engine, prompts: list[np.ndarray], sampling: SamplingParams, drafts: int
    ) -> list[Request]:
        options = {"max_new_tokens": self.tokens, "sampling": sampling, "draft_tokens": drafts}
        requests = [engine.add(prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
        while engine.busy:
            for output in engine.step():
                if output.request.error is not None:
                    raise output.request.error
        return requests

    def _speed(self, model: CompiledModel, prompt: np.ndarray, max_drafts: int) -> dict[str, float]:
        """Returns {number of drafts: tokens per second of one greedy request}, the best of three runs each."""
        rates: dict[str, float] = {}
        for turn in range(4):
            for drafts in range(1 + max_drafts):
                options = {"max_new_tokens": self.speed_tokens, "chunk": self.prompt, "drafts": drafts}
                begin = time.perf_counter()
                generate(model, self._manager(model, max_drafts, 1), [prompt.tolist()], **options)
                rate = self.speed_tokens / (time.perf_counter() - begin)
                if turn:  # turn 0 is not counted, because it compiles the programs
                    rates[str(drafts)] = max(rates.get(str(drafts), 0.0), round(rate, 1))
        return rates


def _summary(requests: list[Request], drafts: int) -> dict[str, Any]:
    """Returns the mean number of accepted drafts in a step, and the shares of steps that accepted 1, 2, .. drafts."""
    # A request's first step runs its prompt, and its last steps may verify fewer drafts.
    accepted = np.concatenate([request.accepted[1 : -1 - drafts] for request in requests])
    shares = [round(float((accepted >= count).mean()), 4) for count in range(1, 1 + drafts)]
    return {"mean_accepted": round(float(accepted.mean()), 4), "acceptance": shares}


def _table(report: dict[str, Any], max_drafts: int) -> str:
    lines = ["| drafts a step | accepted, greedy | accepted, temperature 1 | tokens/s |", "| --- | --- | --- | --- |"]
    rates = report.get("tokens_per_second", {})
    for drafts in range(1 + max_drafts):
        means = [report[f"{name}_{drafts}"]["mean_accepted"] if drafts else "" for name in ("greedy", "temperature_1")]
        cells = [f"{mean:.2f}" if drafts else "" for mean in means]
        lines.append(f"| {drafts} | {cells[0]} | {cells[1]} | {rates.get(str(drafts), '')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command = tyro.cli(DraftAcceptance)
    try:
        command.run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
