"""What the layers of one step hand to each other."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from dsv4_jax.ops import all_reduce


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCarry:
    """Travels through the layers of one step, beside the residual streams; the cache never holds it.

    Attributes:
      selections: {layer: [T, index_topk] int32 entries that it selected for each token, -1 padded}.
      activations: None, or {"attn_in_L", "attn_out_L": [T, hidden] what enters and leaves the attention of layer L}.
    """

    selections: dict[int, Any] = dataclasses.field(default_factory=dict)
    activations: dict[str, Any] | None = None

    def with_selection(self, layer: int, indices: Int[Array, "T k"]) -> "StepCarry":
        """Also carries what a layer selected."""
        return dataclasses.replace(self, selections=self.selections | {layer: indices})

    def with_attention(self, layer: int, x: Float[Array, "T D"], y: Float[Array, "T D"]) -> "StepCarry":
        """Also carries a layer's attention input and output, if activations are recorded."""
        if self.activations is None:
            return self
        recorded = {f"attn_in_{layer}": x, f"attn_out_{layer}": all_reduce(y)}
        return dataclasses.replace(self, activations=self.activations | recorded)
