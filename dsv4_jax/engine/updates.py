"""Applies a step's output to the requests that it ran."""

from typing import Any

import numpy as np

from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.drafters import accept
from dsv4_jax.engine.requests import Request
from dsv4_jax.engine.scheduler import Scheduler
from dsv4_jax.engine.steps import ScheduledRequest


def update(scheduler: Scheduler, item: ScheduledRequest, output: StepOutput, snapshot: Any = None) -> None:
    """Gives a request the accepted tokens of a step, forgets rejected drafts, and finishes the request if it is done.

    Args:
      scheduler: the scheduler of the request.
      item: the request and the tokens that it brought to the step.
      output: the request's rows of the step's output, on the host.
      snapshot: the request's rows at its last block boundary, for the prefix cache, if a later step was launched.
    """
    request, manager, metrics = item.request, scheduler.manager, scheduler.metrics
    known, length, scored = len(request.tokens), item.end, item.num_scored
    drafts = item.tokens[len(item.tokens) - item.num_drafts :].tolist()
    new = accept(drafts, output.tokens[scored:].tolist()) if item.samples else []
    bad = np.flatnonzero(~np.isfinite(output.logprobs[: scored + len(new)]))
    if bad.size:
        last = length - len(item.forced_tokens) + bad[0]
        error = FloatingPointError(f"request {request.id!r}: logits after its token {last} are not finite")
        return scheduler.finish(request, "error", error)
    if scored:
        request.score(length - len(item.tokens) + 1, output.logprobs[:scored], output.top_logprobs)
    if item.samples:
        drawn = output[scored : scored + len(new)]
        if drawn.draft_tokens is not None:
            request.device_drafts = (row := drawn.draft_tokens[request.slot])[row >= 0]
        metrics.drafted_tokens += item.num_drafts
        metrics.accepted_tokens += len(new) - 1
        scheduler.pending_outputs.setdefault(request, known)
        metrics.generated_tokens += len(request.extend(new, drawn.logprobs, item.num_drafts, drawn.top_logprobs))
        # The last token is not in the cache yet. Rejected drafts are, and so are accepted ones behind the end.
        length = len(request.tokens) - 1
        if item.num_drafts:
            manager.rewind(request.slot, item.end - length)
    metrics.prompt_tokens += len(item.tokens) if item.is_prefill else 0
    block = manager.schema.block_tokens
    if scheduler.prefix is not None and length // block > item.start // block:
        tokens = request.tokens[:length]
        scheduler.prefix.observe(scheduler.cache, request.slot, tokens, length=length, snapshot=snapshot)
    if request.finish_reason is not None:
        scheduler.finish(request, request.finish_reason)


def update_steps(scheduler: Scheduler, request: Request, output: StepOutput) -> None:
    """Gives a request the tokens of several decode steps, one after another, until it is done.

    The manager counts the first step already.
    """
    for step in range(len(output.tokens)):
        if step:
            scheduler.manager.advance(request.slot, 1)
        start, is_prefill = len(request.tokens) - 1, not request.generated
        item = ScheduledRequest(request, request.tokens[-1:], start, is_prefill)
        update(scheduler, item, output[step : step + 1])
        if request.finish_reason is not None:
            break
