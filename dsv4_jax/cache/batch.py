"""The inputs of one step, a forward pass over a ragged batch of tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.cache.decisions import Decisions, decode_ids, selection_rows
from dsv4_jax.cache.schema import CacheSchema
from dsv4_jax.common.arguments import adapter_index
from dsv4_jax.common.summary import Summarized
from dsv4_jax.config import DSV4Config
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class Batch(Summarized):
    """A ragged batch of tokens in arrays of fixed sizes, made by `KVCacheManager.prepare_forward`.

    The tokens of a request are adjacent and have consecutive ascending positions.

    In `positions`, `slots`, `new_blocks` and `reset_slots`, -1 marks padding. JAX reads an index of -1 as the last row,
    even with `mode="drop"` or "clip". Before you index with one of these arrays, replace -1 by 0 to read. To write
    nothing there, use `mode="drop", wrap_negative_indices=False`, as `dsv4_jax.decode.last_token_indices` does.

    A batch runs once, on a cache that has run the earlier batches of its requests. A step raises ValueError for any
    other batch, provided that a manager made the batch, and a manager or a step of this package returned the cache (see
    `dsv4_jax.host.step_order`).

    Attributes:
      token_ids: [T] int32, token ids; 0 for padding.
      positions: [T] int32, absolute positions of the tokens.
      slots: [T] int32, slots of the tokens' requests.
      new_blocks: [N, 3] int32, newly reserved blocks: (slot, index in the slot's row of the block table, block id);
        None = no blocks.
      reset_slots: [max_requests] int32, slots whose new request begins with this step; None = no slots.
      prefill: whether a request has more than `max_query_tokens` tokens in the batch. The request's window rows could
        then overwrite each other in the ring, so attention takes them from the step's own tokens instead (static).
      draft_block: number of tokens in a block of DSpark drafts, which all see each other and the window before the
        block; 0 = each token sees a window that ends with itself (static).
      adapters: [max_requests] int32, index of each slot's adapter, -1 = none (see `nn.lora`); None = no adapters.
      is_image: [T] bool, whether a token is a part of an image; None = all tokens are text. A model that knows images
        (`DSV4Config.image_token_id`) routes such a token by another bias, and leaves it out of n-grams. The embedding
        of every token is looked up by its id; override the model's `embed` to use another embedding for images.
      decisions: Decisions [T, ...] that the layers take instead of making their own, see `with_decisions`; None = the
        layers make all decisions.
      schema: geometry of the cache that the batch is for, which is checked at trace time; None = not checked (static).
    """

    token_ids: Any
    positions: Any
    slots: Any
    new_blocks: Any = None
    reset_slots: Any = None
    prefill: bool = static_field(default=False)
    adapters: Any = None
    is_image: Any = None
    decisions: Decisions | None = None
    draft_block: int = static_field(default=0)
    schema: CacheSchema | None = static_field(default=None)

    def with_adapter(self, model: Any, name: str) -> "Batch":
        """Returns a batch in which all requests use one adapter of a model.

        Args:
          model: the model that runs the batch, such as `DeepseekV4ForCausalLM`.
          name: one of the model's `adapter_names`.

        Raises:
          ValueError: the model has no such adapter, or the batch has no schema.
        """
        if self.schema is None:
            raise ValueError("the batch has no schema, which says how many slots there are")
        index = adapter_index(name, model.adapter_names)
        return dataclasses.replace(self, adapters=jnp.full((self.schema.max_requests,), index, jnp.int32))

    def with_decisions(self, sequences: Decisions) -> "Batch":
        """Returns the batch with the decisions of its tokens. The tokens may be any part of the sequences.

        The layers decide by themselves for a token whose row is all zeros, for a token at position N or above, and for
        a token in slot S or above.

        Args:
          sequences: Decisions [S, N, ...] by slot and position, as `Decisions.padded` returns them.
        """

        def of_tokens(codes: Any) -> Any:
            """Returns the codes [T, ...] of the batch's tokens; 0 for tokens without a row."""
            codes = jnp.asarray(codes)
            has_row = (self.slots < codes.shape[0]) & (self.positions < codes.shape[1])
            slots = jnp.where(has_row, self.slots, -1)
            rows = codes[jnp.maximum(slots, 0), jnp.maximum(self.positions, 0)]
            return jnp.where((slots >= 0)[:, None, None], rows, jnp.zeros((), codes.dtype))

        return dataclasses.replace(self, decisions=jax.tree.map(of_tokens, sequences))

    def layer_decisions(
        self, config: DSV4Config, layer: Int[Array, ""] | int
    ) -> tuple[Int[Array, "T k"] | None, Int[Array, "T K"] | None]:
        """Returns the decisions that a layer has to take: [T, k] experts and [T, K] entries, int32 ids, -1 for none.

        An item is None if the layer makes these decisions itself. The second item is undefined if the layer selects no
        entries.

        Args:
          config: the model's configuration.
          layer: index of the layer, which may be traced.
        """
        if self.decisions is None:
            return None, None

        def of_layer(codes: Any, row: Any) -> Any:
            """Returns the ids in one row of each token's codes."""
            return None if codes is None else decode_ids(jnp.asarray(codes)[:, row])

        selection_row = jnp.asarray(selection_rows(config))[layer]
        return of_layer(self.decisions.experts, layer), of_layer(self.decisions.selection, selection_row)

    def token_adapters(self) -> Int[Array, "T"] | None:
        """Returns the index of each token's adapter, [T] int32, -1 = none; None if `adapters` is None."""
        if self.adapters is None:
            return None
        return jnp.where(self.slots >= 0, self.adapters[jnp.maximum(self.slots, 0)], -1)

    def _summary(self) -> dict[str, Any]:
        return {name: value for name, value in super()._summary().items() if name != "schema"}
