"""A request of an engine, and what a step returns about it."""

import copy
import dataclasses
import reprlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

import numpy as np

from dsv4_jax.arguments import check_whole
from dsv4_jax.decode.sampling import SamplingParams, TopLogprobs
from dsv4_jax.host import KVCacheManager, OffloadedRequest
from dsv4_jax.summary import Share, Summarised, Summary


FinishReason = Literal["length", "stop", "cancelled", "error"]


class Request(Summarised):
    """A request of an `Engine`, made by `Engine.add`. Callers only read it.

    Attributes:
      id: the caller's name for it.
      max_new_tokens: how many tokens it gets at most.
      sampling: how they are drawn.
      seed: of their random bits, which depend on positions too.
      stop_tokens: it ends after one of these.
      draft_tokens: how many drafts of it a step verifies at most.
      num_top_logprobs: how many of the likeliest tokens are kept for each of its tokens.
      predicted: [n] int32 drafts that the last step made of it on the device.
      drafted_tokens: drafts of it that were verified.
      accepted: how many drafts each step kept that gave it tokens: one token less than it gave.
      priority: requests of higher priority are served first.
      order: number of the request in its engine; among equal priorities the lowest is served first.
      finish_reason: None while it runs or waits; then "length", "stop", "cancelled" or "error".
      error: what went wrong, if `finish_reason` is "error".
      cached_tokens: how many tokens of the prompt the prefix cache held.
      slot: its slot in the cache while it runs, else -1.
      offloaded: its part of the cache while it is preempted.
    """

    def __init__(
        self,
        id: Hashable,
        prompt: np.ndarray,
        *,
        max_new_tokens: int,
        sampling: SamplingParams,
        seed: int,
        stop_tokens: Sequence[int],
        priority: int,
        draft_tokens: int = 0,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        order: int,
    ):
        """A request that has not run; `prompt` is [n] int32. Raises TypeError or ValueError for a bad argument."""
        self.id, self.max_new_tokens, self.sampling = id, max_new_tokens, check_sampling(sampling)
        self.seed, self.stop_tokens = check_seed(seed), check_stop_tokens(stop_tokens)
        self.priority, self.order = check_whole("priority", priority, 0), order
        self.draft_tokens, self.drafted_tokens = draft_tokens, 0
        self.predicted, self.accepted = np.zeros((0,), np.int32), []
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.cached_tokens = 0
        self.slot = -1
        # Room for all tokens it can ever hold, so that no step copies the history. `_length` of them are known.
        self._ids = np.concatenate([prompt, np.zeros((max_new_tokens,), np.int32)])
        self._prompt_length = self._length = len(prompt)
        # Of tokens from position `_scored_from` on.
        self.num_top_logprobs, self._scored_from = top_logprobs, 0 if prompt_logprobs else len(prompt)
        scored = len(self._ids) - self._scored_from
        self._logprobs = np.zeros((scored,))
        self._top = TopLogprobs(
            np.zeros((scored, top_logprobs), np.int32), np.zeros((scored, top_logprobs), np.float32)
        )
        self.offloaded: OffloadedRequest | None = None

    @property
    def progress(self) -> Share:
        """How many of its tokens it has got, and where it is, for people."""
        where = f"running in slot {self.slot}" if self.slot >= 0 else "waiting"
        end = f"ended: {self.finish_reason}" if self.finish_reason else where
        return Share(self._length - self._prompt_length, self.max_new_tokens, f"tokens generated, {end}")

    def _summary(self) -> Summary:
        words = f"id {reprlib.repr(self.id)}", f"{self._prompt_length:,} prompt tokens", str(self.progress)
        return Summary(words, {"progress": self.progress})

    def child(self, *, seed: int, order: int) -> "Request":
        """A request that continues from here with other random bits; its id is its order."""
        child = copy.copy(self)
        child.id, child.order, child.seed, child.slot, child.offloaded = order, order, check_seed(seed), -1, None
        child._ids, child._logprobs, child.accepted = self._ids.copy(), self._logprobs.copy(), self.accepted.copy()
        child._top = TopLogprobs(self._top.ids.copy(), self._top.logprobs.copy())
        return child

    @property
    def tokens(self) -> np.ndarray:
        """[n] int32 prompt and generated ids; a view that cannot be written."""
        tokens = self._ids[: self._length]
        tokens.flags.writeable = False
        return tokens

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self._ids[: self._prompt_length].tolist()

    @property
    def generated(self) -> list[int]:
        """Token ids generated so far."""
        return self._ids[self._prompt_length : self._length].tolist()

    @property
    def logprobs(self) -> list[float]:
        """Log-probability of each generated token under the model, temperature aside."""
        return self._logprobs[self._prompt_length - self._scored_from : self._length - self._scored_from].tolist()

    @property
    def top_logprobs(self) -> TopLogprobs:
        """The likeliest tokens in place of each generated one, as arrays [n, num_top_logprobs]."""
        return self._top[self._prompt_length - self._scored_from : self._length - self._scored_from]

    @property
    def prompt_logprobs(self) -> list[float]:
        """Log-probability of each token of the prompt but the first; empty if they are not wanted, or not known yet."""
        return self._logprobs[self._scored_prompt].tolist()

    @property
    def prompt_top_logprobs(self) -> TopLogprobs:
        """The likeliest tokens in place of these, as arrays [n, num_top_logprobs]."""
        return self._top[self._scored_prompt]

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be found: they are wanted, and it has no token yet."""
        return self._scored_from == 0 and self._length == self._prompt_length

    @property
    def _scored_prompt(self):
        return slice(1, self._prompt_length if self._scored_from == 0 and self.generated else 1)

    @property
    def acceptance(self) -> float:
        """Fraction of its verified drafts that were kept; 0 before the first draft."""
        return sum(self.accepted) / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def remaining(self) -> int:
        """How many more tokens it may get."""
        return len(self._ids) - self._length

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the lowest is served first and preempted last."""
        return -self.priority, self.order

    def score(self, start: int, logprobs: Sequence[float] | np.ndarray, top: TopLogprobs | None) -> None:
        """Keeps log-probabilities [n] of its tokens from position `start` on, and of the likeliest tokens, `top`."""
        count, first = len(logprobs), start - self._scored_from
        here = slice(first, first + count)
        self._logprobs[here] = logprobs
        if top is not None and (k := self.num_top_logprobs):
            self._top.ids[here], self._top.logprobs[here] = top.ids[:count, :k], top.logprobs[:count, :k]

    def extend(
        self,
        tokens: list[int],
        logprobs: Sequence[float] | np.ndarray,
        num_drafts: int = 0,
        top: TopLogprobs | None = None,
    ) -> list[int]:
        """Appends drawn tokens up to one that ends the request; returns those it appended.

        `num_drafts` were verified by the step: all of `tokens` but the last are drafts that were right. `logprobs` and
        `top` are theirs, at least.
        """
        new = tokens[: self.remaining]
        stop = next((i for i, token in enumerate(new) if token in self.stop_tokens), None)
        new = new if stop is None else new[: stop + 1]
        length, count = self._length + len(new), len(new)
        self._ids[self._length : length] = new
        self.score(self._length, logprobs[:count], top)
        reason = "stop" if stop is not None else "length" if length == len(self._ids) else None
        self._length, self.finish_reason = length, reason
        self.drafted_tokens += num_drafts
        self.accepted.append(len(new) - 1)
        return new


@dataclasses.dataclass(frozen=True)
class Output:
    """What one request got in a step.

    Attributes:
      request: the request.
      tokens: its new token ids: several if drafts were accepted, none if it only failed.
    """

    request: Request
    tokens: list[int]


def check_positive(**values: int) -> None:
    """Raises TypeError or ValueError if one of the named values is no whole number of at least 1."""
    for name, value in values.items():
        check_whole(name, value, 1)


def check_sampling(sampling: SamplingParams) -> SamplingParams:
    """The argument; TypeError if it is no `SamplingParams`."""
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"{sampling=} must be a SamplingParams, such as SamplingParams(temperature=0.8)")
    return sampling


def check_seed(seed: int) -> int:
    """The seed modulo 2**32; TypeError if it is no whole number."""
    return check_whole("seed", seed) % 2**32


def check_stop_tokens(stop_tokens: Sequence[int]) -> tuple[int, ...]:
    """The token ids as ints. Raises TypeError if they are no sequence of whole numbers, ValueError if one is no id."""
    if not isinstance(stop_tokens, Iterable):
        raise TypeError(f"{stop_tokens=} must be a sequence of token ids")
    return tuple(check_whole(f"stop_tokens[{i}]", token, 0, 2**31 - 1) for i, token in enumerate(stop_tokens))


def check_no_requests(manager: KVCacheManager) -> None:
    """Raises ValueError if the manager holds requests."""
    if manager.slots:
        raise ValueError(f"the manager must hold no requests, but slots {list(manager.slots)} are admitted")


def check_request(manager: KVCacheManager, prompt: Sequence[int] | np.ndarray, max_new_tokens: int) -> np.ndarray:
    """The prompt's ids [n] int32. Raises TypeError or ValueError if they are bad or the request could never run."""
    check_positive(max_new_tokens=max_new_tokens)
    ids, schema = manager.check_ids(prompt, "prompt"), manager.schema
    # The last token is drawn, never stored.
    need, table = len(ids) + max_new_tokens - 1, manager.requests
    blocks = "the whole cache's" if table.num_shards == 1 else f"each of the cache's {table.num_shards} shards'"
    for name, limit in {"max_context": schema.max_context, blocks: table.capacity}.items():
        if need > limit:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and {max_new_tokens=} need room for {need}, more than {name} {limit}"
            )
    return ids
