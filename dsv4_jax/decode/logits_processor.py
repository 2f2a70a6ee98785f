"""Logits processors: a user's own functions that change logits before tokens are drawn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.cache import Batch
from dsv4_jax.ops.views import DROP, int_range
from dsv4_jax.parallel.local_ids import to_local_ids
from dsv4_jax.parallel.sharded_step import sharded_update
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class LogitsProcessor:
    """Changes a request's logits before each of its tokens is drawn, as penalties and bans do.

    `process` changes the logits, and `update` keeps a state for it. Both functions are written for one request, must be
    pure, and are traced into the step under `jax.vmap`. A program is compiled for each pair of functions, so make a
    processor once, not with a new `lambda` for each call.

    Attributes:
      process: function (logits [vocab] float32, state) -> logits [vocab] float32. A token with -inf is never drawn.
      state: pytree of arrays, the state of a request before its first new token. Steps and loops take a processor whose
        arrays are [slots, ...], the states of all slots, see `stacked`.
      update: function (state, token [] int32) -> state, called with each new token; None = the state never changes.
    """

    process: Callable[[Any, Any], Any] = static_field()
    state: Any = ()
    update: Callable[[Any, Any], Any] | None = static_field(default=None)

    def stacked(self, states: Sequence[Any]) -> "LogitsProcessor":
        """Returns the processor with the states of all slots, [slots, ...], as steps and loops take it.

        Args:
          states: the state of the request in each slot.

        Raises:
          ValueError: a state does not have the structure, shapes and dtypes of `state`.
        """
        checked = [self.check_state(state, f"states[{i}]") for i, state in enumerate(states)]
        return dataclasses.replace(self, state=jax.tree.map(lambda *xs: np.stack(xs), *checked))

    def check_state(self, state: Any, name: str) -> Any:
        """Returns a copy of a request's state as NumPy arrays.

        Args:
          state: state of one request.
          name: name of the argument in errors.

        Raises:
          ValueError: the argument does not have the structure, shapes and dtypes of the attribute `state`.
        """
        have, want = map(_types, (state, self.state))
        if have != want:
            raise ValueError(f"{name} has {have[1]} in {have[0]}, the processor's state has {want[1]} in {want[0]}")
        return jax.tree.map(np.array, state)

    def updated(self, tokens: Int[Array, "slots r"], is_new: Bool[Array, "slots r"]) -> "LogitsProcessor":
        """Returns the processor after calls of `update` with each slot's new tokens.

        Args:
          tokens: [slots, r] int32 tokens of each slot, in order.
          is_new: [slots, r] bool, whether the slot's state is updated with the token.
        """
        if self.update is None:
            return self
        state = self.state
        for column, mask in zip(tokens.T, is_new.T, strict=True):
            new = jax.vmap(self.update)(state, column)
            state = jax.tree.map(lambda x, y, m=mask: jnp.where(m.reshape(-1, *[1] * (x.ndim - 1)), y, x), state, new)
        return dataclasses.replace(self, state=state)

    def check(self, vocab_size: int) -> None:
        """Traces both functions on abstract arrays, and checks the types of their results.

        Errors that the functions raise are passed on.

        Raises:
          ValueError: `process` does not return [vocab_size] float32, or `update` changes the state's type.
        """
        logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
        token = jax.ShapeDtypeStruct((), jnp.int32)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), self.state)
        result = jax.eval_shape(self.process, logits, state)
        if _types(result) != _types(logits):
            raise ValueError(f"process must return float32[{vocab_size}], the logits, not {_types(result)[1]}")
        if self.update is not None and (new := _types(jax.eval_shape(self.update, state, token))) != _types(state):
            raise ValueError(f"update returned {new[1]} in {new[0]} for a state of {_types(state)[1]}")


@dataclasses.dataclass(frozen=True)
class SlotRows:
    """The rows of a step's logits [n, vocab], grouped by slot as the states of a processor are.

    The first row of a slot follows its request's newest token, and the further rows follow the request's drafts.

    Attributes:
      processor: the LogitsProcessor with the states of all slots.
      rows: [slots, r] int32, indices in [0, n) of each slot's rows in order; -1 = no row. A slot has at most r rows.
      tokens: [slots, r] int32, the token of the batch that each row follows.
    """

    processor: LogitsProcessor
    rows: Any
    tokens: Any

    @classmethod
    def of(cls, processor: LogitsProcessor, batch: Batch, indices: Int[Array, "n"], num_slots: int) -> "SlotRows":
        """Finds the rows of each slot in a batch.

        Args:
          processor: the LogitsProcessor with the states of all slots.
          batch: the batch of the step.
          indices: [n] index of the batch's token that each row follows, as in `logits_indices` of `sample_step`;
            -1 = no token is drawn for the row.
          num_slots: number of slots.

        Raises:
          ValueError: the processor does not have a state for each slot.
        """
        for path, x in jax.tree.leaves_with_path(processor.state):
            if jnp.shape(x)[:1] != (num_slots,):
                raise ValueError(
                    f"processor.state{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}, it must be [{num_slots}, "
                    "...] with a state for each slot: use processor.stacked([state] * slots)"
                )
        num_rows = indices.shape[0]
        token_indices = jnp.maximum(indices, 0)
        max_rows = num_rows // num_slots if batch.schema is None else min(num_rows, batch.schema.max_query_tokens)
        slots = jnp.where(indices >= 0, batch.slots[token_indices], -1)
        index = int_range(num_rows)
        # The rows of a slot are adjacent. `first_rows` has the index of the slot's first row, for each row.
        first_rows = jax.lax.cummax(jnp.where((slots != jnp.roll(slots, 1)) | (index == 0), index, 0))
        rows = jnp.full((num_slots, max_rows), -1, jnp.int32).at[slots, index - first_rows].set(index, **DROP)
        return cls(processor, rows, batch.token_ids[token_indices[jnp.maximum(rows, 0)]])

    def process(self, logits: Float[Array, "n vocab"]) -> Float[Array, "n vocab"]:
        """Returns the logits after the processor's changes.

        The state for a row that follows a draft is the slot's state, updated with the slot's drafts up to this one.
        """
        new = logits
        processor = self.processor
        for i in range(self.rows.shape[1]):
            rows = self.rows[:, i]
            if i:
                processor = processor.updated(self.tokens[:, i : i + 1], rows[:, None] >= 0)
            processed = jax.vmap(processor.process)(logits[jnp.maximum(rows, 0)], processor.state)
            new = new.at[rows].set(processed, **DROP)
        return new

    def update(self, tokens: Int[Array, "n"], last: Int[Array, "slots"]) -> LogitsProcessor:
        """Returns the processor with the states after the tokens that each request has accepted.

        Args:
          tokens: [n] the token drawn in each row.
          last: [slots] index in [0, n) of the last row whose drawn token becomes part of the request; -1 = no such row.
        """
        is_new = (self.rows >= 0) & (self.rows <= last[:, None])
        return self.processor.updated(tokens[jnp.maximum(self.rows, 0)], is_new)


@sharded_update
def begin_slot(
    processor: LogitsProcessor, slot: Int[Array, ""], state: Any, tokens: Int[Array, "n"], count: Int[Array, ""]
) -> LogitsProcessor:
    """Sets the state of a slot for a request that begins or continues there.

    Args:
      processor: the LogitsProcessor with the states of all slots; donated.
      slot: scalar, the slot.
      state: the request's state before its first new token.
      tokens: [n] int32, the tokens that the request already got, with padding at the end. The processor's `update` is
        called with each of these tokens.
      count: scalar, number of these tokens without padding.

    Returns:
      The processor with the new state of the slot.
    """
    if processor.update is not None:
        state = jax.lax.fori_loop(0, count, lambda i, state: processor.update(state, tokens[i]), state)

    def write(states, new):
        """Writes a request's array to its slot, on the device that holds the slot."""
        local = to_local_ids(slot, "slots", len(states))
        return states.at[local].set(new, **DROP)

    return dataclasses.replace(processor, state=jax.tree.map(write, processor.state, state))


def _types(tree):
    """Returns (structure of a pytree as text, [dtype and shape of each array as text])."""
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves]
