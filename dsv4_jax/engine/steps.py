"""Data of an engine's step: `Schedule`, the tokens that it runs, and `LaunchedStep`, its output on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4_jax.cache import Batch
from dsv4_jax.engine.requests import Request


SCHEDULED = np.dtype(
    [(name, np.int64) for name in ("slot", "start", "num_tokens", "num_drafts", "num_scored", "source")]
    + [("samples", np.bool_), ("is_prefill", np.bool_)]
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The requests of a step and the tokens that the step runs for each of them.

    Attributes:
      requests: n requests.
      tokens: for each request [num_tokens] int32, ids of the tokens that follow the request's tokens in the cache. The
        id of a token that only the device knows is 0.
      numbers: [n] array of dtype SCHEDULED, which has these fields for each request:
        slot: slot of the request.
        start: position of the first of these tokens.
        num_tokens: number of these tokens.
        num_drafts: number of drafts among these tokens, at their end.
        num_scored: number of known tokens, such as a prompt's, whose log-probabilities the step computes. Their output
          rows come before the rows of drawn tokens.
        source: index in `LaunchedStep.tokens` of the previous step at which these tokens begin, if the host does not
          know them yet; else -1. If not -1, `start` is the largest possible position, as if all drafts were accepted.
        samples: whether a token is drawn after the last of these tokens.
        is_prefill: whether these tokens are prompt tokens, or run again after a restart.
    """

    requests: tuple[Request, ...]
    tokens: Sequence[np.ndarray]
    numbers: np.ndarray

    @classmethod
    def of(cls, requests: Sequence[Request], tokens: Sequence[np.ndarray], **fields: Any) -> "Schedule":
        """Makes a schedule.

        Args:
          requests: n requests.
          tokens: for each request the ids of the tokens to run.
          fields: values [n] of fields of `numbers` other than `slot` and `num_tokens`. The default is -1 for `source`,
            True for `samples`, and 0 for other fields.
        """
        numbers = np.zeros((len(requests),), SCHEDULED)
        numbers["slot"] = [request.slot for request in requests]
        numbers["num_tokens"] = [*map(len, tokens)]
        for name, values in {"source": -1, "samples": True, **fields}.items():
            numbers[name] = values
        return cls(tuple(requests), tokens, numbers)

    def select(self, mask: np.ndarray) -> "Schedule":
        """Returns the schedule of the requests for which `mask`, [n] bool, is True."""
        if mask.all():
            return self
        places = np.flatnonzero(mask).tolist()
        return Schedule(tuple(self.requests[i] for i in places), [self.tokens[i] for i in places], self.numbers[mask])

    def __add__(self, other: "Schedule") -> "Schedule":
        """Returns a schedule of this schedule's requests, followed by those of `other`."""
        numbers = np.concatenate([self.numbers, other.numbers])
        return Schedule(self.requests + other.requests, [*self.tokens, *other.tokens], numbers)

    @property
    def num_rows(self) -> np.ndarray:
        """The number of output rows of each request, [n]: one for each scored token, draft and drawn token."""
        return self.numbers["num_scored"] + self.numbers["samples"] * (1 + self.numbers["num_drafts"])


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched and whose output the host has not read.

    Attributes:
      schedule: the requests that it runs, with their tokens.
      batch: the batch on the devices.
      first_rows: [n] index of each request's first row in the output.
      begins: [n] index of each request's first token in the batch.
      drawing: arguments of `draw_step` that follow the batch: (logits_indices, sampling, seeds, logprobs).
      wants_top: whether a request wants the likeliest tokens of the output.
      undrawn: (logits [rows, vocab], Decisions or None) on the device if `draw_step` has to draw the tokens and was not
        launched yet; else None.
      output: StepOutput whose copy to the host was started; None until the drawing is launched.
      tokens: the drawn tokens on the device for the next step, as in `EarlierTokens.tokens`; None while `output`
        is None.
      snapshots: {request: rows of its slot at a block boundary, for the prefix cache}, read before a later step was
        launched.
    """

    schedule: Schedule
    batch: Batch
    first_rows: np.ndarray
    begins: np.ndarray
    drawing: tuple[Any, ...]
    wants_top: bool
    undrawn: Any = None
    output: Any = None
    tokens: Any = None
    snapshots: dict[Request, Any] = dataclasses.field(default_factory=dict)

    def with_known_tokens(self) -> "LaunchedStep":
        """Fills in the tokens, and the values of `start`, that the host did not know when the step was launched.

        Call it after the previous step was read and this step's drawing was launched. Returns the completed step, or
        this step unchanged if its output has no drafts. Requests that have ended keep the values of the launch.
        """
        if self.output.draft_tokens is None:
            return self
        schedule = self.schedule
        tokens = list(schedule.tokens)
        numbers = schedule.numbers.copy()
        for i in np.flatnonzero(numbers["source"] >= 0).tolist():
            if (request := schedule.requests[i]).finish_reason is None:
                numbers["start"][i] = request.num_tokens - 1
                drafts = request.device_drafts[: numbers["num_drafts"][i]]
                tokens[i] = np.concatenate([request.tokens[-1:], drafts])
        return dataclasses.replace(self, schedule=Schedule(schedule.requests, tokens, numbers))

    @property
    def is_in_vain(self) -> bool:
        """Whether all requests of the step have ended since its launch, so that its output is not needed."""
        return all(request.finish_reason is not None for request in self.schedule.requests)

    def newest_tokens(self, num_slots: int, device_drafts: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the newest token that each slot's request gets from this step, and counts the request's new tokens.

        Requests that have ended since the launch get no tokens.

        Args:
          num_slots: number of slots.
          device_drafts: number of drafts that the step makes for each slot on the device.

        Returns:
          (newest, counts), two arrays [num_slots]. `newest` is the index of the slot's newest token in `tokens`, as in
          `EarlierTokens.indices`; -1 if the slot gets no token. `counts` is the number of tokens that the slot's
          request gets if all its drafts are accepted; 0 if it gets no token.
        """
        schedule = self.schedule
        newest = np.full((num_slots,), -1)
        counts = np.zeros((num_slots,), int)
        drawn = np.array([request.finish_reason is None for request in schedule.requests]) & schedule.numbers["samples"]
        slots = schedule.numbers["slot"][drawn]
        rows = (self.first_rows + schedule.num_rows - 1)[drawn]
        # With drafts on the device, each slot has 1 + `device_drafts` tokens, of which the drafts come last.
        newest[slots] = slots * (1 + device_drafts) if device_drafts else rows
        counts[slots] = 1 + schedule.numbers["num_drafts"][drawn]
        return newest, counts
