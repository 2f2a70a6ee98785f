"""A step of an engine: the requests that it runs, and its output while the device computes it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4_jax.cache import Batch
from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.requests import Request


# In place of the id of a token that only the device knows.
UNKNOWN = np.zeros((1,), np.int32)
NO_DRAFTS = np.zeros((0,), np.int32)
SCHEDULED = np.dtype(
    [(name, np.int64) for name in ("slot", "start", "num_tokens", "num_drafts", "num_scored", "source")]
    + [("samples", np.bool_), ("is_prefill", np.bool_)]
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The requests of a step and the tokens that they bring to it.

    Attributes:
      requests: n requests.
      tokens: for each request [num_tokens] int32 ids that follow those in the cache.
      numbers: [n] with these fields:
        slot: the request's slot.
        start: position of the first of these tokens.
        num_tokens: number of these tokens.
        num_drafts: number of drafts at their end.
        num_scored: number of known tokens to be scored; they follow the last of these tokens but one.
        source: the index among `LaunchedStep.tokens` of the step before of the first of these tokens, if the host does
          not know them yet; else -1. Their start is then the greatest possible one.
        samples: whether a token is drawn after the last one.
        is_prefill: whether they are prompt tokens or read again after a restart, rather than the last drawn token.
    """

    requests: tuple[Request, ...]
    tokens: Sequence[np.ndarray]
    numbers: np.ndarray

    @classmethod
    def of(cls, requests: Sequence[Request], tokens: Sequence[np.ndarray], **fields: Any) -> "Schedule":
        """Returns a schedule in which each request draws a token; `fields` are those of `numbers` that are known."""
        if "slot" not in fields:
            fields["slot"] = [request.slot for request in requests]
            fields["num_tokens"] = [len(ids) for ids in tokens]
        numbers = np.zeros((len(requests),), SCHEDULED)
        for name, values in {"source": -1, "samples": True, **fields}.items():
            numbers[name] = values
        return cls(tuple(requests), tokens, numbers)

    def select(self, mask: np.ndarray) -> "Schedule":
        """Returns the schedule of some requests, by a mask [n]."""
        if mask.all():
            return self
        places = np.flatnonzero(mask).tolist()
        requests = tuple(self.requests[i] for i in places)
        tokens = [self.tokens[i] for i in places]
        return Schedule(requests, tokens, self.numbers[mask])

    def __add__(self, other: "Schedule") -> "Schedule":
        """Returns the schedule of both."""
        numbers = np.concatenate([self.numbers, other.numbers])
        return Schedule(self.requests + other.requests, [*self.tokens, *other.tokens], numbers)

    @property
    def num_rows(self) -> np.ndarray:
        """The [n] rows of output: scored tokens, verified drafts, and the token that is drawn."""
        return self.numbers["num_scored"] + self.numbers["samples"] * (1 + self.numbers["num_drafts"])

    @property
    def ends(self) -> np.ndarray:
        """The [n] tokens that each request holds after the step, drafts included."""
        return self.numbers["start"] + self.numbers["num_tokens"]


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched and whose output the host has not read.

    Attributes:
      schedule: the requests that it runs, with their tokens.
      batch: its batch.
      first_rows: [n] the first row of the output that belongs to each request.
      drawing: arguments of `draw_step` between the batch and the masks.
      wants_top: whether the likeliest tokens of its output are wanted.
      logits: the logits of all rows, if the tokens are drawn by a program of their own and that has not run.
      output: StepOutput on its way to the host; None until the tokens are drawn.
      tokens: the tokens that it draws, for the step behind it, as in `EarlierTokens`.
      snapshots: {request: its rows at a block boundary, for the prefix cache}, taken before a later step was launched.
    """

    schedule: Schedule
    batch: Batch
    first_rows: np.ndarray
    drawing: tuple[Any, ...]
    wants_top: bool
    logits: Any = None
    output: StepOutput | None = None
    tokens: Any = None
    snapshots: dict[Request, Any] = dataclasses.field(default_factory=dict)

    def with_known_tokens(self) -> "LaunchedStep":
        """Returns the step with the drafts that it runs, if any, and their places, once the one before was read."""
        if self.output is None or self.output.draft_tokens is None:
            return self
        schedule = self.schedule
        tokens = list(self.schedule.tokens)
        numbers = self.schedule.numbers.copy()
        for i in np.flatnonzero(numbers["source"] >= 0).tolist():
            if (request := schedule.requests[i]).finish_reason is None:
                numbers["start"][i] = request.num_tokens - 1
                drafts = request.device_drafts[: numbers["num_drafts"][i]]
                tokens[i] = np.concatenate([request.tokens[-1:], drafts])
        return dataclasses.replace(self, schedule=Schedule(schedule.requests, tokens, numbers))

    @property
    def is_in_vain(self) -> bool:
        """Whether all of its requests have ended since."""
        return all(request.finish_reason is not None for request in self.schedule.requests)

    def newest_tokens(self, num_slots: int, device_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """Says which tokens unfinished requests get, by slot.

        Args:
          num_slots: number of slots.
          device_drafts: number of drafts that the step makes for each.

        Returns:
          [num_slots] the index of the newest token among `tokens`, -1 = none, and [num_slots] the most tokens drawn.
        """
        schedule = self.schedule
        newest = np.full((num_slots,), -1)
        counts = np.zeros((num_slots,), int)
        draws = np.array([request.finish_reason is None for request in schedule.requests]) & schedule.numbers["samples"]
        slots = schedule.numbers["slot"][draws]
        rows = (self.first_rows + schedule.num_rows - 1)[draws]
        newest[slots] = slots * (1 + device_drafts) if device_drafts else rows
        counts[slots] = 1 + schedule.numbers["num_drafts"][draws]
        return newest, counts
