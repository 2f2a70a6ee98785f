"""A request of an engine, its parameters, and the output that a step returns for it."""

import copy
import dataclasses
import json
import reprlib
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dsv4_jax.cache import Decisions
from dsv4_jax.common.arguments import check_flag, check_type, check_whole
from dsv4_jax.common.summary import Share, Summarized
from dsv4_jax.decode.sampling import GREEDY, SamplingParams, TopLogprobs
from dsv4_jax.host import KVCacheManager, OffloadedRequest, TokenIds


if TYPE_CHECKING:  # llguidance comes with the extra "serve"
    from dsv4_jax.engine.grammar import Grammar

FinishReason = Literal["length", "stop", "cancelled", "error"]
NO_DRAFTS = np.zeros((0,), np.int32)


@dataclasses.dataclass(frozen=True)
class RequestParams:
    """The parameters of a request.

    Attributes:
      max_new_tokens: maximum number of tokens that the request gets.
      sampling: the sampling parameters.
      seed: seed of the random bits, taken modulo 2**32. Each token's bits depend on the seed and its position.
      stop_tokens: ids of the tokens that end the request.
      priority: priority, at least 0; requests with a higher priority are served first.
      draft_tokens: maximum number of the request's drafts that a step verifies; None = the engine's `draft_tokens`.
      top_logprobs: number of likeliest tokens to keep, with their log-probabilities, for each generated token.
      prompt_logprobs: whether to compute log-probabilities of the prompt's tokens too. The whole prompt runs then, even
        if the prefix cache holds a part. A step runs no more of the prompt's tokens than a decode step has room for.
      grammar: a `dsv4_jax.engine.grammar.Grammar` that the new tokens follow; None = any tokens. One of the grammar's
        end tokens must be among `stop_tokens`.
      logits_state: the request's state for the engine's `logits_processor` before its first new token; None = the
        processor's own state.
      cache_salt: secret text of a group of users. Requests share cached prefixes only with the same salt, so nobody
        outside the group can tell by the time to the first token which prompts ran earlier.
      adapter: name of the model's adapter to use (see `nn.lora`); None = no adapter.

    Raises:
      TypeError: a value has the wrong type.
      ValueError: a value is out of range.
    """

    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    stop_tokens: Sequence[int] = ()
    priority: int = 0
    draft_tokens: int | None = None
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    grammar: "Grammar | None" = None
    logits_state: Any = dataclasses.field(default=None, repr=False, compare=False)
    cache_salt: str = ""
    adapter: str | None = None

    def __post_init__(self):
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_sampling(self.sampling)
        check_whole("priority", self.priority, 0)
        check_whole("top_logprobs", self.top_logprobs, 0)
        check_flag("prompt_logprobs", self.prompt_logprobs, "; top_logprobs is a number")
        if self.draft_tokens is not None:
            check_whole("draft_tokens", self.draft_tokens, 0)
        check_type("cache_salt", self.cache_salt, str, "text")
        check_type("adapter", self.adapter, str | None, "the name of an adapter, or None")
        object.__setattr__(self, "seed", check_whole("seed", self.seed) % 2**32)
        object.__setattr__(self, "stop_tokens", check_stop_tokens(self.stop_tokens))
        if isinstance(self.grammar, str | dict):
            raise TypeError(f"grammar={self.grammar!r:.80} must be compiled, see dsv4_jax.engine.grammar.Grammar")
        if self.grammar is not None and not set(ends := self.grammar.vocabulary.end_tokens) & set(self.stop_tokens):
            raise ValueError(f"stop_tokens={self.stop_tokens} must have one of {ends}, which end the grammar's text")

    @property
    def prefix_salt(self) -> str:
        """The salt of the request's cached prefixes. It includes the adapter, on which the cached rows depend."""
        parts = [self.adapter, self.cache_salt]
        return json.dumps(parts) if any(parts) else ""  # JSON keeps adapter and salt apart


class Request(Summarized):
    """A request of an `Engine`, made by `Engine.add`. Callers only read it.

    Attributes:
      id: the caller's name for the request, or its order if the caller gave none.
      params: RequestParams.
      order: number of the request in its engine. Of requests with equal priority, the one with the lowest order is
        served first.
      device_drafts: [n] int32 drafts of its next tokens, which its most recent step made on the device.
      drafted_tokens: number of its drafts that were verified.
      prompt_length: number of tokens in its prompt.
      num_tokens: number of tokens that the host knows, prompt included.
      max_tokens: maximum number of tokens, prompt included.
      accepted: for each step that gave it tokens, the number of accepted drafts: one less than the number of tokens.
      finish_reason: None while it runs or waits; then "length", "stop", "cancelled" or "error".
      error: the exception that ended it if `finish_reason` is "error", else None.
      cached_tokens: number of prompt tokens that the prefix cache held.
      matcher: GrammarMatcher of its new tokens; None without a grammar.
      slot: its slot in the cache while it runs, else -1.
      offloaded: OffloadedRequest with its bytes, while it waits after a preemption or a fork; else None.
      recorded: {field of `Decisions`: array with room for the decisions of all tokens}; empty until decisions are kept.
    """

    drafted_tokens = 0
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens = 0
    slot = -1
    offloaded: OffloadedRequest | None = None

    def __init__(self, id: Hashable, prompt: np.ndarray, params: RequestParams, *, order: int):
        """Makes a request that has not run; `prompt` is [n] int32."""
        self.id = id
        self.params = params
        self.order = order
        self.device_drafts = NO_DRAFTS
        self.accepted = []
        self.matcher = None if params.grammar is None else params.grammar.start()
        # This array has room for all tokens that the request can ever have, so that no step has to copy it. The first
        # `num_tokens` entries are known.
        self._ids = np.concatenate([prompt, np.zeros((params.max_new_tokens,), np.int32)])
        self.prompt_length = self.num_tokens = len(prompt)
        self.max_tokens = len(self._ids)
        # Log-probabilities are indexed by position, as the ids are. Pages of zeros take no memory until they are
        # written.
        self._logprobs = np.zeros((self.max_tokens,))
        shape = self.max_tokens, params.top_logprobs
        self._top = TopLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        self.recorded: dict[str, np.ndarray] = {}

    @property
    def progress(self) -> Share:
        """The number of generated tokens out of `max_new_tokens`, with the request's state in words; for a repr."""
        where = f"running in slot {self.slot}" if self.slot >= 0 else "waiting"
        end = f"ended: {self.finish_reason}" if self.finish_reason else where
        return Share(self.num_generated, self.params.max_new_tokens, f"tokens generated, {end}")

    def _summary(self) -> dict[str, Any]:
        return {"id": reprlib.repr(self.id), "prompt tokens": self.prompt_length, "progress": self.progress}

    def child(self, *, seed: int, order: int) -> "Request":
        """Returns a copy of the request without a slot.

        The copy continues from the current tokens with another seed, and its id is `order`.
        """
        child = copy.copy(self)
        child.id = child.order = order
        child.slot = -1
        child.offloaded = None
        child.params = dataclasses.replace(self.params, seed=seed)
        child.matcher = None if self.matcher is None else self.matcher.copy()
        child._ids = self._ids.copy()
        child._logprobs = self._logprobs.copy()
        child.accepted = self.accepted.copy()
        child._top = copy.deepcopy(self._top)
        child.recorded = {}
        child.keep_decisions(0, Decisions(**self.recorded), slice(0, self.num_tokens))
        return child

    @property
    def tokens(self) -> np.ndarray:
        """The [num_tokens] int32 ids of the prompt and the generated tokens, as a read-only view."""
        tokens = self._ids[: self.num_tokens]
        tokens.flags.writeable = False
        return tokens

    def tokens_from(self, start: int) -> list[int]:
        """Returns the token ids from position `start` on."""
        return self._ids[start : self.num_tokens].tolist()

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt."""
        return self._ids[: self.prompt_length].tolist()

    @property
    def num_generated(self) -> int:
        """The number of generated tokens."""
        return self.num_tokens - self.prompt_length

    @property
    def generated(self) -> list[int]:
        """The token ids generated so far."""
        return self.tokens_from(self.prompt_length)

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each generated token under the model, before temperature."""
        return self.logprobs_from(self.prompt_length)

    def logprobs_from(self, start: int) -> list[float]:
        """Returns the log-probabilities of the tokens from position `start` on, as in `logprobs`."""
        return self._logprobs[start : self.num_tokens].tolist()

    @property
    def top_logprobs(self) -> TopLogprobs:
        """The likeliest tokens at the positions of the n generated tokens: TopLogprobs [n, params.top_logprobs]."""
        return self._top[self.prompt_length : self.num_tokens]

    @property
    def prompt_logprobs(self) -> list[float]:
        """The log-probability of each prompt token but the first.

        Empty if `params.prompt_logprobs` is not set, or before the first token is generated.
        """
        return self._logprobs[self._scored_prompt].tolist()

    @property
    def prompt_top_logprobs(self) -> TopLogprobs:
        """The likeliest tokens at the positions of the n `prompt_logprobs`: TopLogprobs [n, params.top_logprobs]."""
        return self._top[self._scored_prompt]

    @property
    def decisions(self) -> Decisions | None:
        """A copy of the recorded decisions, by position: Decisions [num_tokens, ...] of NumPy arrays.

        The codes are 0 for tokens that the request has not run itself: those that the prefix cache held, and the newest
        one. None if the engine records no decisions (`EngineConfig.record_decisions`) or no step has been read yet.
        """
        if not self.recorded:
            return None
        return Decisions(**{name: codes[: self.num_tokens].copy() for name, codes in self.recorded.items()})

    def keep_decisions(self, start: int, decisions: Decisions, rows: slice) -> None:
        """Keeps the decisions of consecutive tokens of the request, except those of its newest token.

        Args:
          start: position of the first of these tokens.
          decisions: Decisions [T, ...] of NumPy arrays.
          rows: slice of the arrays' first axis that belongs to these tokens.
        """
        count = max(0, self.num_tokens - 1 - start)
        for name, codes in vars(decisions).items():
            if codes is None:
                continue
            if name not in self.recorded:  # pages of zeros take no memory until they are written
                self.recorded[name] = np.zeros((self.max_tokens, *codes.shape[1:]), codes.dtype)
            kept = codes[rows][:count]
            self.recorded[name][start : start + len(kept)] = kept

    @property
    def scores_prompt(self) -> bool:
        """Whether the request asks for log-probabilities of its prompt and has generated no token yet."""
        return self.params.prompt_logprobs and not self.num_generated

    @property
    def _scored_prompt(self):
        return slice(1, self.prompt_length if self.params.prompt_logprobs and self.num_generated else 1)

    @property
    def acceptance(self) -> float:
        """The fraction of the request's verified drafts that were accepted; 0 before the first draft."""
        return sum(self.accepted) / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def remaining(self) -> int:
        """The number of tokens that the request may still get."""
        return self.max_tokens - self.num_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """The sort key of requests. The request with the lowest rank is served first and preempted last."""
        return -self.params.priority, self.order

    def score(self, start: int, logprobs: Sequence[float], top: TopLogprobs | None) -> None:
        """Keeps the log-probabilities of n consecutive tokens of the request.

        Args:
          start: position of the first of these tokens.
          logprobs: [n] log-probabilities of the tokens.
          top: TopLogprobs of at least n rows, the likeliest tokens at each position; None = there are none.
        """
        count = len(logprobs)
        places = slice(start, start + count)
        self._logprobs[places] = logprobs
        if top is not None and (k := self.params.top_logprobs):
            self._top.ids[places] = top.ids[:count, :k]
            self._top.logprobs[places] = top.logprobs[:count, :k]

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], num_drafts: int = 0, top: TopLogprobs | None = None
    ) -> int:
        """Appends the tokens of a step, up to the first token that ends the request, and sets `finish_reason`.

        Args:
          tokens: the accepted drafts and the token drawn after them.
          logprobs: log-probabilities of `tokens`.
          num_drafts: number of drafts that the step verified.
          top: TopLogprobs, the likeliest tokens at the position of each of `tokens`; None = there are none.

        Returns:
          The number of appended tokens.
        """
        start = end = self.num_tokens
        stop_tokens = self.params.stop_tokens
        reason = None
        for token in tokens:
            self._ids[end] = token
            end += 1
            if token in stop_tokens:
                reason = "stop"
            elif end == self.max_tokens:
                reason = "length"
            if reason is not None:
                break
        self.score(start, logprobs[: end - start], top)
        self.num_tokens = end
        self.finish_reason = reason
        self.drafted_tokens += num_drafts
        self.accepted.append(end - start - 1)
        return end - start


class Output(NamedTuple):
    """The output of one request in a step.

    Attributes:
      request: the request.
      tokens: its new token ids: several if drafts were accepted, possibly none if the request failed.
    """

    request: Request
    tokens: list[int]


def check_sampling(sampling: SamplingParams) -> SamplingParams:
    """Returns the argument; raises TypeError if it is not a `SamplingParams`."""
    check_type("sampling", sampling, SamplingParams, "a SamplingParams, such as SamplingParams(temperature=0.8)")
    return sampling


def check_stop_tokens(stop_tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns token ids as a tuple of ints.

    Raises:
      TypeError: the argument is not a sequence of integers.
      ValueError: an id is negative or 2**31 or above.
    """
    # An iterator would be empty for the next request.
    check_type("stop_tokens", stop_tokens, Collection, "a sequence of token ids")
    return tuple(check_whole(f"stop_tokens[{i}]", token, 0, 2**31 - 1) for i, token in enumerate(stop_tokens))


def check_no_requests(manager: KVCacheManager) -> None:
    """Raises ValueError if the manager holds requests."""
    if manager.slots:
        raise ValueError(f"the manager must hold no requests, but slots {list(manager.slots)} are admitted")


def check_request(manager: KVCacheManager, prompt: TokenIds, max_new_tokens: int) -> np.ndarray:
    """Checks the arguments of a request, and returns the prompt's ids [n] int32.

    Raises:
      TypeError, ValueError: the ids or `max_new_tokens` are invalid, or the request does not fit an empty cache.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    ids = manager.check_ids(prompt, "prompt")
    subject = f"a prompt of {len(ids)} tokens and {max_new_tokens=} need room for"
    manager.check_size(len(ids) + max_new_tokens - 1, subject=subject)  # the last token never runs
    return ids
