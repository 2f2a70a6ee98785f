"""Applies a step's output to the requests that it ran."""

import numpy as np

from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.drafters import accept
from dsv4_jax.engine.requests import Request
from dsv4_jax.engine.scheduler import ScheduledRequest, Scheduler


def update(scheduler: Scheduler, item: ScheduledRequest, output: StepOutput) -> None:
    """Gives a request the accepted tokens of `output`, which has the request's rows of the step, on the host.

    Forgets rejected drafts, and finishes the request if it is done.
    """
    request, manager, metrics = item.request, scheduler.manager, scheduler.metrics
    known, length, scored = len(request.tokens), manager.length(request.slot), item.num_scored
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
        manager.rewind(request.slot, length - (len(request.tokens) - 1))
    metrics.prompt_tokens += len(item.tokens) if item.is_prefill else 0
    before, block = length - len(item.tokens), manager.schema.block_tokens
    if scheduler.prefix is not None and manager.length(request.slot) // block > before // block:
        scheduler.prefix.observe(scheduler.cache, request.slot, request.tokens)
    if request.finish_reason is not None:
        scheduler.finish(request, request.finish_reason)


def update_steps(scheduler: Scheduler, request: Request, output: StepOutput) -> None:
    """Gives a request the tokens of several decode steps, one after another, until it is done.

    The manager counts the first step already.
    """
    for step in range(len(output.tokens)):
        if step:
            scheduler.manager.advance(request.slot, 1)
        item = ScheduledRequest(request, request.tokens[-1:], is_prefill=not request.generated)
        update(scheduler, item, output[step : step + 1])
        if request.finish_reason is not None:
            break
