"""The kinds of draft layers, which draft tokens for the model to verify: multi-token prediction and DSpark."""

import dataclasses

from dsv4_jax.common.arguments import check, check_whole
from dsv4_jax.config.layer_spec import check_layers


class MTPConfig:
    """The multi-token-prediction block, a layer that drafts one token after another.

    `DSparkConfig` has the same attributes and the method `spare_rows`, so that most code need not know the kind.

    Attributes:
      num_layers: number of draft layers. They attend to a sliding window only.
      block_size: number of tokens that a pass through the draft layers drafts.
      max_drafts: maximum number of tokens that can be drafted for a request in a step; None = no limit.
      keeps_streams: whether the cache stores the residual streams of each request's last tokens.
      estimates_confidence: whether the draft layers estimate the probability that a draft is accepted.
      target_layer_ids: layers of the model, ascending. For each of them, the draft layers read the mean of its output
        streams. () = the draft layers read the streams before the model's head.
    """

    num_layers = 1
    block_size = 1
    max_drafts = None
    keeps_streams = True
    estimates_confidence = False
    target_layer_ids = ()

    def spare_rows(self, drafts: int) -> int:
        """Returns the number of window rows after a request's last token that are written to draft `drafts` tokens."""
        return max(drafts - 1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """DSpark, the draft layers of V4-Flash-0731, V4-Pro-0813 and V4.1-Flash, which draft a block of tokens in one pass.

    Attributes:
      num_layers: number of draft layers. They attend to a sliding window only.
      block_size: number of tokens that a pass drafts, which is also the maximum number of drafts in a step.
      noise_token_id: token id that the draft layers read at every position of the block except the first.
      target_layer_ids: layers of the model, ascending, at least one. For each of them, the draft layers read the mean
        of the streams that leave it or, in V4.1, of those that enter it.
      markov_rank: rank of the matrix by which the token before a draft corrects the draft's logits.
      n_routed_experts: number of routed experts of a draft layer; None = as many as the model's layers have.
      num_experts_per_tok: number of these experts that a token is sent to; None = as many as in the model's layers.
      keeps_streams, estimates_confidence: see `MTPConfig`.
    """

    num_layers: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None

    keeps_streams = False
    estimates_confidence = True

    @property
    def max_drafts(self) -> int:
        """The maximum number of tokens that can be drafted for a request in a step."""
        return self.block_size

    def spare_rows(self, drafts: int) -> int:
        """Returns the number of window rows after a request's last token that drafting writes: always a block."""
        return self.block_size

    def check(self, num_hidden_layers: int, vocab_size: int) -> None:
        """Checks the values for a model with `num_hidden_layers` layers and a vocabulary of `vocab_size` tokens.

        Raises TypeError for a value that is no integer, and ValueError for one that is impossible.
        """
        for name in ("num_layers", "block_size", "markov_rank"):
            check_whole(f"dspark_{name}", getattr(self, name), 1, 2**31 - 1)
        for name in ("n_routed_experts", "num_experts_per_tok"):
            if (value := getattr(self, name)) is not None:
                check_whole(f"dspark_{name}", value, 1, 2**16)
        check_whole("dspark_noise_token_id", self.noise_token_id, 0, vocab_size - 1)
        check(bool(self.target_layer_ids), "dspark_target_layer_ids=[] must ascend, and name a layer at least")
        check_layers("dspark_target_layer_ids", self.target_layer_ids, num_hidden_layers)


def check_min_confidence(min_confidence: float, layers: MTPConfig | DSparkConfig | None) -> None:
    """Checks that a model's draft layers can take `min_confidence`, see `decode.drafts.DraftOptions`.

    Args:
      min_confidence: minimum estimated probability that a draft is accepted; 0 = no minimum.
      layers: description of the model's draft layers; None if it has none.

    Raises:
      ValueError: the value is not from 0 to 1, or it is above 0 and the draft layers estimate no probability.
    """
    name = f"min_confidence={min_confidence}"
    check(0 <= min_confidence <= 1, f"{name} must be from 0 to 1, a probability")
    is_known = layers is not None and layers.estimates_confidence
    check(not min_confidence or is_known, f"{name} needs draft layers that estimate their confidence, such as DSpark's")
