"""The inputs of one step."""

import dataclasses
from typing import Any

import jax

from dsv4_jax.cache.schema import CacheSchema
from dsv4_jax.common.summary import Summarized, Summary
from pallas_kernels.runtime.pytrees import static_field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Batch(Summarized):
    """A ragged batch of tokens in arrays of fixed sizes, made by `KVCacheManager.prepare_forward`.

    Tokens of one request are adjacent and have consecutive ascending positions. -1 is padding everywhere. As an index,
    -1 means the last row to JAX, even with `mode="drop"` or "clip". Before you index with one of these arrays, raise -1
    to 0 to read, or replace it by the length of the axis to write nothing. For an example, see
    `dsv4_jax.decode.last_token_indices`.

    A batch runs once, on the cache that has run the earlier batches of its requests. Steps refuse another one, as long
    as they know the arrays `positions` of the batch and `lengths` of the cache (see `KVCacheManager.rewind`).

    Attributes:
      token_ids: [T] int32, token ids.
      positions: [T] int32, absolute positions.
      slots: [T] int32, slots of the tokens' requests.
      new_blocks: [N, 3] int32, rows (slot, index in the slot's row of the block table, block id).
      reset_slots: [max_requests] int32, slots whose new request begins with this step.
      prefill: whether a request brings more than `max_query_tokens` tokens. Its rows could then overwrite each other in
        the ring, so attention reads them from the call instead (static).
      draft_block: number of adjacent tokens that see each other and the whole window before them, as DSpark's blocks
        do; 0 = each token sees a window that ends with itself (static).
      schema: geometry of the cache that the batch is for, which is checked at trace time; None = any (static).
    """

    token_ids: Any
    positions: Any
    slots: Any
    new_blocks: Any
    reset_slots: Any
    prefill: bool = static_field()
    draft_block: int = static_field(default=0)
    schema: CacheSchema | None = static_field(default=None)

    def _summary(self) -> Summary:
        # Under jax.tree.map a leaf can be any object.
        fields = vars(self).items()
        rows = {name: str(getattr(x, "aval", x)) for name, x in fields if name not in ("prefill", "schema")}
        tokens = getattr(self.token_ids, "size", "?")
        return Summary(("prefill" if self.prefill else "decode", f"{tokens} tokens with padding"), rows)
