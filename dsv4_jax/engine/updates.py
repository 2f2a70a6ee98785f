"""What a step's results do to the requests that it ran."""

import numpy as np

from dsv4_jax.engine.drafters import accept
from dsv4_jax.engine.requests import Request
from dsv4_jax.engine.runner import StepResults
from dsv4_jax.engine.scheduler import ScheduledRequest, Scheduler


def update(scheduler: Scheduler, item: ScheduledRequest, found: StepResults) -> None:
    """Gives a request the accepted tokens, forgets rejected drafts, and finishes it if it is done.

    Args:
      scheduler: of all requests.
      item: what the request brought to the step.
      found: the step's results in its rows, on the host.
    """
    request, manager, metrics = item.request, scheduler.manager, scheduler.metrics
    known, length, scored = len(request.tokens), manager.length(request.slot), item.num_scored
    drafts = item.tokens[len(item.tokens) - item.num_drafts :].tolist()
    new = accept(drafts, found.tokens[scored:].tolist()) if item.samples else []
    bad = np.flatnonzero(~np.isfinite(found.logprobs[: scored + len(new)]))
    if bad.size:
        last = length - len(item.given) + bad[0]
        error = FloatingPointError(f"request {request.id!r}: logits after its token {last} are not finite")
        return scheduler.finish(request, "error", error)
    if scored:
        request.score(length - len(item.tokens) + 1, found.logprobs[:scored], found.top)
    if item.samples:
        drawn = found.rows(slice(scored, scored + len(new)))
        if drawn.drafts is not None:
            request.predicted = drawn.drafts[request.slot]
        metrics.drafted_tokens += item.num_drafts
        metrics.accepted_tokens += len(new) - 1
        scheduler.pending_outputs.setdefault(request, known)
        metrics.generated_tokens += len(request.extend(new, drawn.logprobs, item.num_drafts, drawn.top))
        # The newest token is not in the cache yet; rejected drafts, and accepted ones after the end, are.
        manager.rewind(request.slot, length - (len(request.tokens) - 1))
    metrics.prompt_tokens += len(item.tokens) if item.is_prefill else 0
    before, block = length - len(item.tokens), manager.schema.block_tokens
    if scheduler.prefix is not None and manager.length(request.slot) // block > before // block:
        scheduler.prefix.observe(scheduler.cache, request.slot, request.tokens)
    if request.finish_reason is not None:
        scheduler.finish(request, request.finish_reason)


def update_steps(scheduler: Scheduler, request: Request, found: StepResults) -> None:
    """Gives a request what several decode steps drew for it, one after the other, until it is done.

    The first of them counts as run already.
    """
    for step in range(len(found.tokens)):
        if step:
            scheduler.manager.advance(request.slot, 1)
        item = ScheduledRequest(request, request.tokens[-1:], is_prefill=not request.generated)
        update(scheduler, item, found.rows(slice(step, step + 1)))
        if request.finish_reason is not None:
            break
