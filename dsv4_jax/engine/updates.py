"""Applies a step's output to the requests that it ran."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv4_jax.decode.loop import LoopOutput
from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.drafters import accept
from dsv4_jax.engine.requests import Request
from dsv4_jax.engine.scheduler import Scheduler
from dsv4_jax.engine.steps import Schedule


def update(
    scheduler: Scheduler,
    schedule: Schedule,
    first_rows: np.ndarray,
    output: StepOutput,
    snapshots: Mapping[Request, Any] | None = None,
) -> None:
    """Gives requests the accepted tokens of a step, forgets rejected drafts, and finishes requests that are done.

    Args:
      scheduler: the scheduler of the requests.
      schedule: the requests and the tokens that they brought to the step; those that have ended are left out.
      first_rows: [n] the first row of the output that belongs to each request.
      output: the step's output, on the host.
      snapshots: requests' rows at their last block boundary, for the prefix cache, if a later step was launched.
    """
    metrics, prefix, pending = scheduler.metrics, scheduler.prefix, scheduler.pending_outputs
    block_tokens, tops, is_finite = scheduler.manager.schema.block_tokens, output.top_logprobs, None
    if not np.isfinite(output.logprobs).all():
        is_finite = np.isfinite(output.logprobs)
    tokens, logprobs = output.tokens.tolist(), output.logprobs.tolist()
    numbers, first_rows = schedule.numbers.tolist(), first_rows.tolist()
    for request, ids, row, begin in zip(schedule.requests, schedule.tokens, numbers, first_rows, strict=True):
        if request.finish_reason is not None:
            continue
        slot, start, num_tokens, num_drafts, num_scored, _, samples, is_prefill = row
        first, length = begin + num_scored, start + num_tokens
        new = tokens[first : first + 1 + num_drafts] if samples else []
        if num_drafts:
            new = accept(ids[-num_drafts:].tolist(), new)
        end = first + len(new)
        if is_finite is not None and (bad := np.flatnonzero(~is_finite[begin:end])).size:
            last = length - num_scored - samples * (1 + num_drafts) + bad[0]
            error = FloatingPointError(f"request {request.id!r}: logits after its token {last} are not finite")
            scheduler.finish(request, "error", error)
            continue
        if num_scored:
            request.score(start + 1, logprobs[begin:first], tops and tops[begin:first])
        if samples:
            if output.draft_tokens is not None:
                request.device_drafts = (drafts := output.draft_tokens[slot])[drafts >= 0]
            pending.setdefault(request, request.num_tokens)
            metrics.generated_tokens += request.extend(new, logprobs[first:end], num_drafts, tops and tops[first:end])
            # The last token is not in the cache yet. Rejected drafts are, and so are accepted ones behind the end.
            length = request.num_tokens - 1
            if num_drafts:
                metrics.drafted_tokens += num_drafts
                metrics.accepted_tokens += len(new) - 1
                scheduler.manager.rewind(slot, start + num_tokens - length)
        if is_prefill:
            metrics.prompt_tokens += num_tokens
        if prefix is not None and length // block_tokens > start // block_tokens:
            snapshot = None if snapshots is None else snapshots.get(request)
            prefix.observe(scheduler.cache, slot, request.tokens[:length], length=length, snapshot=snapshot)
        if request.finish_reason is not None:
            scheduler.finish(request, request.finish_reason)


def update_steps(scheduler: Scheduler, counts: Mapping[Request, int], output: LoopOutput) -> None:
    """Gives requests the tokens of several decode steps, one step after another, until they are done.

    Args:
      scheduler: the scheduler of the requests. Its manager counts the first step already.
      counts: number of steps of each request.
      output: the tokens [slots, steps], on the host.
    """
    for step in range(max(counts.values())):
        requests = [request for request, count in counts.items() if count > step and request.finish_reason is None]
        for request in requests if step else ():
            scheduler.manager.advance(request.slot, 1)
        fields = dict(start=[r.num_tokens - 1 for r in requests], is_prefill=[not r.num_generated for r in requests])
        schedule = Schedule.of(requests, [request.tokens[-1:] for request in requests], **fields)
        here = StepOutput(output.tokens[:, step], output.logprobs[:, step])
        update(scheduler, schedule, schedule.numbers["slot"], here)
