"""Compares the tokens of an engine that launches each step before it reads the one before with those of one that waits.

Requests come and go, share prefixes, stop, are cancelled, forked and preempted, and draw greedily or not.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich
import tyro

from dsv4_jax.bench.reports import write_report
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.engine import Engine, PromptLookup, Request
from dsv4_jax.host import KVCacheManager, PrefixCache


TEXT = Path(__file__).parents[2] / "README.md"
SAMPLINGS = SamplingParams(), SamplingParams(1.0), SamplingParams(0.8, top_p=0.95), SamplingParams(1.2, top_k=20)


@dataclasses.dataclass(frozen=True)
class Load:
    """Random requests.

    Attributes:
      seed: seed of the requests.
      prompt_tokens, new_tokens: minimum and maximum of a request.
      vocabulary: number of token ids.
    """

    seed: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    vocabulary: int

    def make(self, total: int, text: bytes) -> list[dict[str, Any]]:
        """Returns requests of about `total` new tokens: parameters of `Engine.add`, and when to fork and cancel.

        Every second prompt begins where the text does.
        """
        rng = np.random.default_rng(self.seed)
        requests = []
        count = 0
        while count < total:
            size, limit = (int(rng.integers(low, high + 1)) for low, high in (self.prompt_tokens, self.new_tokens))
            begin = 0 if len(requests) % 2 else int(rng.integers(len(text) - size))
            prompt = [byte % self.vocabulary for byte in text[begin : begin + size]]
            stops = rng.integers(self.vocabulary, size=rng.integers(3)).tolist()
            params = {"prompt": prompt, "max_new_tokens": limit, "stop_tokens": stops, "seed": len(requests)}
            params |= {"sampling": SAMPLINGS[rng.integers(len(SAMPLINGS))], "priority": int(rng.integers(2))}
            at = {what: int(rng.integers(limit)) for what in ("fork", "cancel") if rng.random() < 0.2}
            requests.append(params | at)
            count += limit * (3 if "fork" in at else 1)
        return requests


class Served(NamedTuple):
    """A request that ran, or a copy of one.

    Attributes:
      name: "request 3", or "request 3, copy 1".
      request: the request.
      alone: parameters of `Engine.add` for one that draws the same tokens; its prompt has those that a copy began with.
    """

    name: str
    request: Request
    alone: dict[str, Any]


def serve(engine: Engine, load: list[dict[str, Any]], most: int) -> list[Served]:
    """Runs the requests, at most `most` at a time; returns them and their copies by name.

    A request is forked or cancelled when it has got a given number of tokens.
    """
    served: list[Served] = []
    plans: dict[Request, tuple[dict[str, int], Served]] = {}
    queue = list(enumerate(load))[::-1]
    while queue or engine.busy:
        while queue and len(engine.running) + len(engine.waiting) < most:
            number, params = queue.pop()
            plan = {what: params[what] for what in ("fork", "cancel") if what in params}
            alone = {name: value for name, value in params.items() if name not in plan}
            served.append(Served(f"request {number}", engine.add(**alone), alone))
            plans[served[-1].request] = plan, served[-1]
        for output in engine.step():
            request = output.request
            if request.error is not None:
                raise request.error
            if request not in plans:  # a copy
                continue
            plan, parent = plans[request]
            for what in ("fork", "cancel"):
                if request.finish_reason is None and len(request.generated) >= plan.get(what, 1 << 30):
                    del plan[what]
                    if what == "cancel":
                        engine.cancel(request)
                        continue
                    known = {"prompt": request.tokens.tolist(), "max_new_tokens": request.remaining}
                    for i, child in enumerate(engine.fork(request, seeds := [101, 102])):
                        alone = parent.alone | known | {"seed": seeds[i]}
                        served.append(Served(f"{parent.name}, copy {i}", child, alone))
    return sorted(served, key=lambda one: one.name)


def compare(left: list[Served], right: list[Served]) -> dict[str, Any]:
    """Counts equal and differing tokens; those behind the first difference of a text are its consequences."""
    differing = []
    tokens = 0
    for one, other in zip(left, right, strict=True):
        assert one.name == other.name
        tokens += len(one.request.generated)
        if one.request.generated != other.request.generated:
            differing.append(one.name)
    return {"tokens": tokens, "texts": len(left), "differing_texts": differing}


def main(
    tokens: int = 100_000, slots: int = 16, batch_invariant: bool = True, seed: int = 0, out: Path | None = None
) -> None:
    """Serves the same requests with the packaged model: with overlap, without it, and with drafts of host and device.

    Drafts of the device overlap, too.

    Args:
      tokens: number of new tokens, about.
      slots: number of requests that run at once.
      batch_invariant: run all steps in one program, so that no rounding depends on when a request is admitted.
      seed: seed of the requests.
      out: also write the report to this file.
    """
    config = read_config(packaged_checkpoint(), mtp=True)
    model = CompiledModel(load_checkpoint(packaged_checkpoint(), config))
    load = Load(seed, (4, 300), (1, 160), config.vocab_size).make(tokens, TEXT.read_bytes())
    results: dict[str, Any] = {}
    report: dict[str, Any] = {"batch_invariant": batch_invariant, "slots": slots}
    engines: dict[str, Any] = {"overlap": {}, "waits": {"overlap": False}, "drafts": {"drafter": PromptLookup()}}
    engines |= {"drafts of the device": {"drafter": "model"}}
    # The same number of tokens with drafts and without: programs of other sizes differ in the last bits of sums.
    budget = {"token_budget": 3 * slots + 32, "batch_invariant": batch_invariant}
    for name, options in engines.items():
        drafts = 2 if "drafter" in options else 0
        sizes = {"max_requests": slots, "max_context": 512, "block_tokens": 128, "max_query_tokens": 1 + drafts}
        manager = KVCacheManager(config, num_blocks=int(1.6 * slots), **sizes)
        prefix = PrefixCache(manager, key="packaged")
        engine = Engine(model, manager, prefix=prefix, **budget, **options)
        # A step with drafts gives several tokens, so a copy would begin elsewhere.
        own = [{k: v for k, v in p.items() if not drafts or k not in ("fork", "cancel")} for p in load]
        results[name] = serve(engine, own, most=2 * slots)
        metrics = engine.metrics
        counts = ("steps", "preemptions", "cancelled", "finished")
        report[name] = {count: getattr(metrics, count) for count in counts} | {"hits": prefix.metrics.hits}
        rich.print(name, report[name])
    report["overlap and waits"] = compare(results["overlap"], results["waits"])
    plain = {f"request {i}" for i, params in enumerate(load) if "cancel" not in params}
    for drafts in list(engines)[2:]:
        one, other = ([row for row in results[name] if row.name in plain] for name in ("overlap", drafts))
        report[f"overlap and {drafts}"] = compare(one, other)
    rich.print(report)
    if out is not None:
        write_report(out, report)


if __name__ == "__main__":
    tyro.cli(main)
