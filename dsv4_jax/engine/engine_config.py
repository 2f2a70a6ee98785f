"""The configuration of an engine."""

import dataclasses
from typing import Any

from dsv4_jax.common.arguments import check_whole
from dsv4_jax.decode.drafts import DraftOptions, check_drafts
from dsv4_jax.decode.logits_processor import LogitsProcessor
from dsv4_jax.engine.drafters import Drafter
from dsv4_jax.host import KVCacheManager


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The sizes and options that an engine's compiled programs depend on.

    Attributes:
      token_budget: the most tokens that a step runs, in each shard of a mesh's axis "data". A larger budget reads
        prompts faster and delays running requests longer. It must hold a token and its drafts for every slot.
      draft_tokens: the most drafts of a request that a step verifies, less than the manager's `max_query_tokens`.
        None = 0 without a drafter, else as many as possible.
      min_confidence: with drafts of the model's own layers, as in `decode.drafts.DraftOptions`.
      batch_invariant: whether all steps run in one program of `token_budget` tokens. Matrix products with another
        number of rows may add in another order. So the last bit of a logit can depend on whether a token came in a
        chunk, alone or as a draft. This option prevents it and makes decode steps slower.
      max_logprobs: the largest `top_logprobs` of a request; 0 = no log-probabilities of other tokens or of prompts.
        With more than 20, the host waits for each step on a GPU.
      overlap: whether a call of `step` launches the next step before it reads the tokens of its own, so that the device
        does not wait for the host. No token depends on it. `resolve` sets it to False with a drafter on the host, which
        needs the tokens, and with `min_confidence`, by which the number of drafts varies.
      structured_output: whether `warm_up` also compiles the programs of steps with grammars. If not, the first step
        that runs a request with a grammar compiles them. Steps without such requests run the same programs either way.
      logits_processor: changes the logits of all requests before their tokens are drawn, and before grammars and
        sampling apply; None = none. A request may bring a state of its own (`RequestParams.logits_state`).
    """

    token_budget: int = 256
    draft_tokens: int | None = None
    min_confidence: float = 0.0
    batch_invariant: bool = False
    max_logprobs: int = 0
    overlap: bool = True
    structured_output: bool = False
    logits_processor: LogitsProcessor | None = dataclasses.field(default=None, repr=False, compare=False)

    def resolve(self, manager: KVCacheManager, drafter: Any) -> "EngineConfig":
        """Checks the values and fills in `draft_tokens` and `overlap`; raises as `Engine` says.

        Args:
          manager: the engine's manager.
          drafter: the engine's drafter, "model" or None.
        """
        schema = manager.schema
        slots = manager.shards.slots
        draft_tokens = self.draft_tokens
        spare = schema.max_query_tokens - 1
        on_device = drafter == "model"
        if not (drafter is None or on_device or isinstance(drafter, Drafter)):
            raise ValueError(f"{drafter=} must be 'model', an object with a method `draft`, or None")
        if draft_tokens is None:
            draft_tokens = spare if drafter is not None else 0
        if not (0 <= draft_tokens <= spare) or (draft_tokens > 0) != (drafter is not None):
            raise ValueError(
                f"{draft_tokens=} must be from 1 to {spare} with a drafter and 0 without one: the manager has "
                f"max_query_tokens={spare + 1}"
            )
        if on_device:
            check_drafts(schema, DraftOptions(draft_tokens, self.min_confidence))
        elif self.min_confidence:
            raise ValueError(f"min_confidence={self.min_confidence} needs drafter='model'")
        config = dataclasses.replace(self, draft_tokens=draft_tokens)
        if self.token_budget < (decode_size := config.decode_size(slots)):
            raise ValueError(
                f"token_budget={self.token_budget} must be at least {decode_size}: {1 + draft_tokens} for each of "
                f"{slots} requests"
            )
        if (processor := self.logits_processor) is not None:
            if not isinstance(processor, LogitsProcessor):
                raise TypeError(f"logits_processor must be a LogitsProcessor, not a {type(processor).__name__}")
            processor.check(schema.config.vocab_size)
        check_whole("max_logprobs", self.max_logprobs, 0, schema.config.vocab_size)
        is_ready = drafter is None or (on_device and not self.min_confidence)
        return dataclasses.replace(config, overlap=self.overlap and is_ready)

    def decode_size(self, slots: int) -> int:
        """Returns the number of tokens of a decode step of `slots` requests: their last tokens and drafts."""
        return slots * (1 + (self.draft_tokens or 0))
