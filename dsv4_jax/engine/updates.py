"""Applies a step's output to the requests that it ran."""

from collections.abc import Mapping
from typing import Any

import numpy as np

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
    follower: Schedule | None = None,
) -> None:
    """Gives requests the accepted tokens of a step, forgets rejected drafts, and finishes requests that are done.

    Args:
      scheduler: the scheduler of the requests.
      schedule: the requests and the tokens that they brought to the step; those that have ended are left out.
      first_rows: [n] the first row of the output that belongs to each request.
      output: the step's output, on the host.
      snapshots: requests' rows at their last block boundary, for the prefix cache, if a later step was launched.
      follower: the schedule of that step.
    """
    _fail_not_finite(scheduler, schedule, first_rows, output)
    kept = np.array([request.finish_reason is None for request in schedule.requests], bool)
    if not kept.all():
        schedule = schedule.select(kept)
        first_rows = first_rows[kept]
    requests = schedule.requests
    numbers = schedule.numbers
    metrics = scheduler.metrics
    tops = output.top_logprobs
    num_drafts = numbers["num_drafts"]
    num_scored = numbers["num_scored"]
    lengths = schedule.ends
    for i in np.flatnonzero(num_scored).tolist():
        rows = slice(first_rows[i], first_rows[i] + num_scored[i])
        requests[i].score(int(numbers["start"][i]) + 1, output.logprobs[rows], tops and tops[rows])
    if output.draft_tokens is not None:
        for i in np.flatnonzero(numbers["samples"]).tolist():
            requests[i].device_drafts = (drafts := output.draft_tokens[numbers["slot"][i]])[drafts >= 0]
    pending = scheduler.pending_outputs
    logprobs = output.logprobs.tolist()
    new = _accepted(schedule, first_rows, output)
    first = (first_rows + num_scored).tolist()
    for request, tokens, begin, drafts in zip(requests, new, first, num_drafts.tolist(), strict=True):
        if tokens:
            end = begin + len(tokens)
            pending.setdefault(request, request.num_tokens)
            metrics.generated_tokens += request.extend(tokens, logprobs[begin:end], drafts, tops and tops[begin:end])
    followed: set[Request] = set()
    if follower is not None and num_drafts.any():
        followed = {follower.requests[i] for i in np.flatnonzero(follower.numbers["source"] >= 0).tolist()}
    for i in np.flatnonzero(num_drafts).tolist():
        metrics.drafted_tokens += int(num_drafts[i])
        metrics.accepted_tokens += requests[i].accepted[-1]
        # Rejected drafts are in the cache, and so are accepted ones behind the end; the last token is not.
        end = int(lengths[i])
        lengths[i] = requests[i].num_tokens - 1
        scheduler.manager.rewind(requests[i].slot, end - int(lengths[i]), is_followed=requests[i] in followed)
    metrics.prompt_tokens += int((numbers["num_tokens"] - num_drafts)[numbers["is_prefill"]].sum())
    if (prefix := scheduler.prefix) is not None:
        block_tokens = scheduler.manager.schema.block_tokens
        for i in np.flatnonzero(lengths // block_tokens > numbers["start"] // block_tokens).tolist():
            request = requests[i]
            length = int(lengths[i])
            snapshot = None if snapshots is None else snapshots.get(request)
            tokens = request.tokens[:length]
            salt = request.params.cache_salt
            prefix.observe(scheduler.cache, request.slot, tokens, length=length, snapshot=snapshot, salt=salt)
    for request in requests:
        if request.matcher is not None and (error := request.matcher.error):
            scheduler.finish(request, "error", ValueError(f"request {request.id!r}: its grammar cannot go on: {error}"))
        elif request.finish_reason is not None:
            scheduler.finish(request, request.finish_reason)


def _accepted(schedule, first_rows, output):
    """Returns for each request the list of tokens that it draws: accepted drafts and the token drawn after them."""
    numbers = schedule.numbers
    tokens = output.tokens.tolist()
    ends = first_rows + schedule.num_rows
    new = [tokens[i:end] for i, end in zip((first_rows + numbers["num_scored"]).tolist(), ends.tolist(), strict=True)]
    for i in np.flatnonzero(numbers["num_drafts"]).tolist():
        new[i] = accept(schedule.tokens[i][-numbers["num_drafts"][i] :].tolist(), new[i])
    return new


def _fail_not_finite(scheduler, schedule, first_rows, output):
    """Ends the requests whose tokens were drawn from logits that are not finite."""
    if (is_finite := np.isfinite(output.logprobs)).all():
        return
    first = first_rows + schedule.numbers["num_scored"]
    accepted = _accepted(schedule, first_rows, output)
    for i, request in enumerate(schedule.requests):
        rows = slice(first_rows[i], first[i] + len(accepted[i]))
        if request.finish_reason is None and not is_finite[rows].all():
            last = schedule.ends[i] - schedule.num_rows[i] + is_finite[rows].argmin()
            error = FloatingPointError(f"request {request.id!r}: logits after its token {last} are not finite")
            scheduler.finish(request, "error", error)
