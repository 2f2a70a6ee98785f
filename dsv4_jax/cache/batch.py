"""The inputs of one step."""

import dataclasses
from typing import Any

import jax

from dsv4_jax.cache.schema import CacheSchema
from dsv4_jax.summary import Summarised, Summary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Batch(Summarised):
    """Ragged tokens of any requests, in arrays of fixed sizes; made by `KVCacheManager.prepare_forward`.

    Tokens of one request stand side by side, at consecutive ascending positions. -1 is padding everywhere. JAX takes an
    index of -1 for the last row, also with `mode="drop"` or "clip": before you index with one of these arrays, raise -1
    to 0 to read, or replace it by the length of the axis to write nothing. `dsv4_jax.decode.last_token_indices` does
    this to find each request's last token.

    Attributes:
      token_ids: [T] int32.
      positions: [T] int32, absolute.
      slots: [T] int32, the request's slot.
      new_blocks: [N, 3] int32: (slot, index in the slot's row of the block table, block id).
      reset_slots: [max_requests] int32: slots that begin a new request with this step.
      prefill: some request brings more tokens than the cache's `max_query_tokens`, so that its own rows can push each
        other out of the ring: attention then reads them from the call instead.
      schema: geometry of the cache that it was made for, which is checked while a step is traced; None = any.
    """

    token_ids: Any
    positions: Any
    slots: Any
    new_blocks: Any
    reset_slots: Any
    prefill: bool = dataclasses.field(metadata=dict(static=True))
    schema: CacheSchema | None = dataclasses.field(default=None, metadata=dict(static=True))

    def _summary(self) -> Summary:
        # Under jax.tree.map anything may stand in an array's place.
        arrays = {name: value for name, value in vars(self).items() if name not in ("prefill", "schema")}
        rows = {name: str(getattr(value, "aval", value)) for name, value in arrays.items()}
        tokens = getattr(self.token_ids, "size", "?")
        return Summary(("prefill" if self.prefill else "decode", f"{tokens} tokens with padding"), rows)
