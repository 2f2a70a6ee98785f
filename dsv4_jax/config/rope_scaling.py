"""YaRN, which changes RoPE's angles for a longer context."""

import dataclasses
import math
from typing import TYPE_CHECKING

from dsv4_jax.common.arguments import check, check_positive, check_whole


if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN's parameters (Peng et al. 2023). There is no attention factor, because DeepSeek-V4 uses none.

    Attributes:
      factor: factor by which the context was extended.
      original_max_position_embeddings: context length before the extension, in tokens.
      beta_fast: number of turns. Pairs of channels that turn more often over the original context keep their angle.
      beta_slow: number of turns. Pairs that turn less often have their angle divided by `factor`. Between the two
        numbers, angles are interpolated.

    Raises:
      TypeError: a number has another type.
      ValueError: a number is out of range; the message names it.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    def __post_init__(self) -> None:
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        check(self.beta_fast > self.beta_slow, f"beta_fast={self.beta_fast} must exceed beta_slow={self.beta_slow}")
        context = check_whole("original_max_position_embeddings", self.original_max_position_embeddings, 1, 2**31 - 1)
        least = 2 * math.pi * self.beta_slow
        check(
            context >= least,
            f"original_max_position_embeddings={context} must be at least 2 pi beta_slow = {least:.1f}: below that no "
            "pair turns beta_slow times",
        )

    def interpolate(self, freqs: "np.ndarray", theta: float) -> "np.ndarray":
        """Returns the angles per position for the longer context, [pairs] float32.

        Args:
          freqs: [pairs] float32, angles per position of RoPE without YaRN.
          theta: base of RoPE.
        """
        import numpy as np

        pairs = len(freqs)

        def pair_turning(turns: float) -> float:
            """Returns the index, not rounded, of the pair that makes `turns` turns within the original context."""
            return pairs * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(pair_turning(self.beta_fast)), 0)
        high = min(math.ceil(pair_turning(self.beta_slow)), 2 * pairs - 1)
        width = np.float32(high - low if high != low else 0.001)
        ramp = np.clip((np.arange(pairs, dtype=np.float32) - np.float32(low)) / width, 0, 1)
        unscaled_weight = np.float32(1) - ramp
        return freqs / np.float32(self.factor) * (np.float32(1) - unscaled_weight) + freqs * unscaled_weight
