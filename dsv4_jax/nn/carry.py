"""The state that the layers of one step pass to each other."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dsv4_jax.ops import all_reduce


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCarry:
    """Passes through the layers of one step beside the residual streams; the cache never holds it.

    Attributes:
      selections: {layer: [T, index_topk] int32 entries selected for each token, -1 padded}.
      activations: None, or {"attn_in_L", "attn_out_L": [T, hidden] input and output of layer L's attention}.
    """

    selections: dict[int, Any] = dataclasses.field(default_factory=dict)
    activations: dict[str, Any] | None = None

    def with_selection(self, layer: int, indices: Int[Array, "T k"]) -> "StepCarry":
        """Returns the carry with a layer's selection added."""
        return dataclasses.replace(self, selections=self.selections | {layer: indices})

    def with_attention(self, layer: int, x: Float[Array, "T D"], y: Float[Array, "T D"]) -> "StepCarry":
        """Returns the carry with a layer's attention input and output added, if activations are recorded.

        Args:
          layer: number of the layer.
          x: [T, hidden] input of the attention.
          y: [T, hidden] output of the attention; on a mesh this device's summand.
        """
        if self.activations is None:
            return self
        recorded = {f"attn_in_{layer}": x, f"attn_out_{layer}": all_reduce(y)}
        return dataclasses.replace(self, activations=self.activations | recorded)
