"""The configuration of an engine."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from dsv4_jax.cache import Decisions
from dsv4_jax.common.arguments import check, check_flag, check_type, check_whole
from dsv4_jax.decode import DraftOptions, LogitsProcessor
from dsv4_jax.decode.drafts import check_drafts
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.host import KVCacheManager


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes and options that an engine's compiled programs depend on.

    Attributes:
      token_budget: maximum number of tokens of a step, in each shard of a mesh's axis "data". A larger budget reads
        prompts faster and delays running requests longer. The budget must have room for a token and its drafts for each
        slot.
      draft_tokens: maximum number of drafts of a request that a step verifies, less than the manager's
        `max_query_tokens`. None = the largest number allowed with a drafter, and 0 without one.
      min_confidence: minimum estimated probability that a draft is accepted, as in `decode.drafts.DraftOptions`. Must
        be 0 if the drafts do not come from the model's own layers.
      batch_invariant: whether all steps run in one program of `token_budget` tokens, so that logits do not depend on
        the batch. Without it, matrix products with different numbers of rows may add in different orders. The last bit
        of a logit can then depend on whether its token ran in a prompt's chunk, alone or as a draft. The option makes
        decode steps slower.
      max_logprobs: maximum `top_logprobs` of a request; 0 = only the log-probabilities of generated tokens. With
        more than 20, the host waits for each step on a GPU.
      overlap: whether a call of `Engine.step` launches the next step before it reads the tokens of its own step, so
        that the device does not wait for the host. The option changes no token. `resolve` sets it to False with a
        drafter on the host, which needs the tokens, and with `min_confidence`, because the number of drafts then
        varies.
      structured_output: whether `warm_up` also compiles the programs of steps with grammars. If not, the first step
        that runs a request with a grammar compiles them. Steps without such requests run the same programs either way.
      logits_processor: changes the logits of all requests before grammars and sampling parameters apply; None = no
        changes. A request may bring an initial state of its own (`RequestParams.logits_state`).
      record_decisions: names of the fields of `cache.Decisions` to record for all requests (`Request.decisions`), such
        as ("experts", "selection"). The decisions are copied to the host with each step's tokens.
    """

    token_budget: int = 256
    draft_tokens: int | None = None
    min_confidence: float = 0.0
    batch_invariant: bool = False
    max_logprobs: int = 0
    overlap: bool = True
    structured_output: bool = False
    logits_processor: LogitsProcessor | None = dataclasses.field(default=None, repr=False, compare=False)
    record_decisions: Sequence[str] = ()

    def resolve(self, manager: KVCacheManager, drafter: Any) -> "EngineConfig":
        """Checks the values, and returns a configuration in which `draft_tokens` and `overlap` are filled in.

        Args:
          manager: the engine's manager.
          drafter: the engine's `Drafter`, "model" for the model's draft layers, or None.

        Raises:
          TypeError: a number, a bool, `logits_processor` or `record_decisions` has the wrong type.
          ValueError: a value is out of its range, the drafter is of none of these kinds, or the model has no draft
            layers for "model".
        """
        schema = manager.schema
        slots = manager.shards.slots
        draft_tokens = self.draft_tokens
        spare = schema.max_query_tokens - 1
        on_device = drafter == "model"
        is_drafter = drafter is None or on_device or isinstance(drafter, Drafter)
        check(is_drafter, f"{drafter=} must be 'model', an object with a method `draft`, or None")
        for name in ("batch_invariant", "overlap", "structured_output"):
            check_flag(name, getattr(self, name))
        check_whole("token_budget", self.token_budget)
        if draft_tokens is None:
            draft_tokens = spare if drafter is not None else 0
        check_whole("draft_tokens", draft_tokens)
        check(
            0 <= draft_tokens <= spare and (draft_tokens > 0) == (drafter is not None),
            f"{draft_tokens=} must be 0 without a drafter and at least 1 with one; the manager's "
            f"max_query_tokens={spare + 1} allows up to {spare}",
        )
        if on_device:
            check_drafts(schema, DraftOptions(draft_tokens, self.min_confidence))
        else:
            check(not self.min_confidence, f"min_confidence={self.min_confidence} needs drafter='model'")
        decode_size = slots * (1 + draft_tokens)
        check(
            self.token_budget >= decode_size,
            f"token_budget={self.token_budget} must be at least {decode_size}: {1 + draft_tokens} for each of "
            f"{slots} requests",
        )
        if (processor := self.logits_processor) is not None:
            check_type("logits_processor", processor, LogitsProcessor, "a LogitsProcessor")
            processor.check(schema.config.vocab_size)
        check_whole("max_logprobs", self.max_logprobs, 0, schema.config.vocab_size)
        record = self.record_decisions
        names = [field.name for field in dataclasses.fields(Decisions)]
        if isinstance(record, str) or not isinstance(record, Iterable):
            raise TypeError(f"record_decisions={record!r} must be a sequence of names, such as {names}")
        unknown = sorted({*record} - {*names})
        check(not unknown, f"record_decisions={unknown} are unknown; known: {', '.join(names)}")
        can_overlap = drafter is None or (on_device and not self.min_confidence)
        recorded = tuple(name for name in names if name in record)
        overlap = self.overlap and can_overlap
        return dataclasses.replace(self, draft_tokens=draft_tokens, overlap=overlap, record_decisions=recorded)

    def decode_size(self, slots: int) -> int:
        """Returns the maximum number of tokens in a decode step of `slots` requests, a token and its drafts each."""
        return slots * (1 + (self.draft_tokens or 0))
