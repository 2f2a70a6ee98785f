"""The kinds of draft layers, which predict tokens that the model then verifies."""

import dataclasses

from dsv4_jax.common.arguments import check, check_whole


class MTPConfig:
    """The multi-token-prediction block, a layer that drafts one token after another.

    Every kind of draft layers has these attributes and the method `spare_rows`; nothing else asks for the kind.

    Attributes:
      num_layers: number of draft layers, which have a window only.
      block_size: number of tokens that a pass over the layers drafts.
      max_drafts: the most tokens that can be drafted for a request in a step; None = no limit.
      keeps_streams: whether the cache stores the residual streams of each request's last tokens.
      estimates_confidence: whether a draft has a probability of being accepted.
      target_layer_ids: layers of the model, ascending, whose streams drafts are made from, each as a mean; () = the
        streams before the model's head.
    """

    num_layers = 1
    block_size = 1
    max_drafts = None
    keeps_streams = True
    estimates_confidence = False
    target_layer_ids = ()

    def spare_rows(self, drafts: int) -> int:
        """Returns the number of window rows behind a request's last token that drafting so many tokens writes."""
        return max(drafts - 1, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """The draft layers of V4-Flash-0731 and V4-Pro-0813, which draft a block of tokens in one pass (DSpark).

    Attributes:
      num_layers: number of draft layers, which have a window only.
      block_size: number of tokens that a pass drafts, and that a step can draft.
      noise_token_id: token id that stands in the block for every token but the first.
      target_layer_ids: layers of the model, ascending; the draft layers read the streams that leave them.
      markov_rank: width of the correction of a draft's logits by the token before it.
    """

    num_layers: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int

    keeps_streams = False
    estimates_confidence = True

    @property
    def max_drafts(self) -> int:
        """The most tokens that can be drafted for a request in a step."""
        return self.block_size

    def spare_rows(self, drafts: int) -> int:
        """Returns the number of rows of a block, which has the same size for any number of drafts."""
        return self.block_size

    def check(self, num_hidden_layers: int, vocab_size: int) -> None:
        """Raises TypeError or ValueError if a value is impossible in a model of so many layers and tokens."""
        for name in ("num_layers", "block_size", "markov_rank"):
            check_whole(f"dspark_{name}", getattr(self, name), 1, 2**31 - 1)
        check_whole("dspark_noise_token_id", self.noise_token_id, 0, vocab_size - 1)
        layers = list(self.target_layer_ids)
        for i, layer in enumerate(layers):
            check_whole(f"dspark_target_layer_ids[{i}]", layer, 0, num_hidden_layers - 1)
        ascends = bool(layers) and sorted({*layers}) == layers
        check(ascends, f"dspark_target_layer_ids={layers} must ascend, and name a layer at least")


def check_min_confidence(min_confidence: float, layers: MTPConfig | DSparkConfig | None) -> None:
    """Raises ValueError unless this is a probability, and the model's draft layers estimate one if it is not 0."""
    name = f"min_confidence={min_confidence}"
    check(0 <= min_confidence <= 1, f"{name} must be from 0 to 1, a probability")
    is_known = layers is not None and layers.estimates_confidence
    check(not min_confidence or is_known, f"{name} needs draft layers that estimate their confidence, such as DSpark's")
