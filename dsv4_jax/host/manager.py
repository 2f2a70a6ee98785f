"""The host side of the cache: admits requests, reserves their blocks and builds each step's `Batch`."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import Batch, CacheSchema, KVCache, LayerCacheHandle, compute_block_budget, copy_request
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.common.mesh_axes import DATA_AXIS
from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.common.summary import Share, Summarized
from dsv4_jax.config import DSV4Config
from dsv4_jax.host import step_order
from dsv4_jax.host.batches import find_layout, find_new_rows
from dsv4_jax.host.cache_devices import CacheDevices, consecutive, padded
from dsv4_jax.host.canary import check_snapshot
from dsv4_jax.host.request_table import RequestState, RequestTable
from dsv4_jax.parallel.mesh import check_context_parallel, check_divisible, check_mesh, check_shardable


TokenIds = Sequence[int] | np.ndarray | jax.Array


class KVCacheManager(Summarized):
    """Admits requests, reserves their blocks and builds the inputs of each step.

    A request owns a slot, which has fixed rows on the device, and a list of blocks from a paged pool. The
    manager knows every length without asking the device. It does not keep the cache itself: the caller passes this
    pytree from step to step.

    A method that raises has changed nothing. Methods that take a slot raise ValueError if no request is admitted to it,
    and TypeError if it is not an integer. The manager is not thread-safe.

    Attributes:
      schema: geometry of the cache.
      devices: transfers to and from the devices that hold the cache.
      shards: the shards of the cache's slots and blocks.
      requests: table of slots, lengths and blocks of all requests; only modules of `dsv4_jax.host` use it.

    Examples:
      The life of a request, with the small model that comes with the package, whose tokens are bytes:

      >>> from dsv4_jax import DSV4Config, KVCacheManager, decode_step, load_checkpoint
      >>> from dsv4_jax.data import packaged_checkpoint
      >>> config = DSV4Config.from_hf(packaged_checkpoint())
      >>> model = load_checkpoint(packaged_checkpoint(), config)
      >>> manager = KVCacheManager(config, memory="8MiB", max_requests=2, max_context=256)
      >>> cache = manager.init_cache()
      >>> prompt = list(b"And God said, Let there be ")
      >>> slot = manager.admit(prompt)
      >>> batch = manager.prepare_forward({slot: prompt})
      >>> logits, cache = decode_step(model, cache, batch)
      >>> chr(int(logits[slot].argmax()))
      'a'
      >>> manager.length(slot)
      27
      >>> manager.release(slot)
      >>> manager.free_slots
      2
    """

    def __init__(
        self,
        config: DSV4Config,
        *,
        memory: int | str | None = None,
        num_blocks: int | None = None,
        max_requests: int = 8,
        mesh: Mesh | None = None,
        context_parallel: bool = False,
        **sizes: Any,
    ):
        """Makes a manager without requests. Give either `memory` or `num_blocks`, and always `max_context`.

        Args:
          config: configuration of the model.
          memory: memory for the cache on each device, in bytes or as text ("20GiB"). The cache takes less if requests
            of `max_context` tokens in all slots need less.
          num_blocks: number of blocks in each compressed pool, in all shards together.
          max_requests: number of slots, and by default the smallest number of tokens that a step is padded to.
          mesh: devices that hold the cache, for instance `jax.make_mesh((2, 4), ("data", "model"))`. Slots and blocks
            are sharded over "data", each shard with its own requests. Each device along "model" holds a whole shard.
            `load_checkpoint` takes the same mesh. None = the default device.
          context_parallel: whether to shard the compressed entries over "model" too, so that each device holds only a
            part of them. Windows and compressor states are replicated along "model".
          **sizes: `max_context`, and optionally `block_tokens`, `kv_format`, `dtype` and `max_query_tokens`; see
            `CacheSchema`.

        Raises:
          TypeError, ValueError: both or neither of `memory` and `num_blocks` are given, a size is invalid, or an axis
            of the mesh does not divide the model's sizes, `max_requests` or `num_blocks`.
        """
        check_whole("max_requests", max_requests, 1)
        if num_blocks is not None:
            check_whole("num_blocks", num_blocks, 1)
        mesh_shape = {} if mesh is None else mesh.shape
        if mesh is not None:
            check_mesh(mesh)
            check_shardable(config, mesh_shape)
            check_divisible(mesh_shape, max_requests=max_requests, num_blocks=num_blocks or 0)
        devices_per_shard = check_context_parallel(mesh_shape, context_parallel, num_blocks or 0)
        if num_blocks is None and memory is not None:
            num_shards = mesh_shape.get(DATA_AXIS, 1)
            fields = {"max_requests": max_requests // num_shards, "context_parallel": context_parallel, **sizes}
            budget = compute_block_budget(config, parse_bytes(memory), devices_per_shard, **fields)
            num_blocks = num_shards * devices_per_shard * budget
        elif num_blocks is None or memory is not None:
            raise ValueError(f"give exactly one of memory and num_blocks; got {memory=} and {num_blocks=}")
        self.schema = CacheSchema(
            config, num_blocks, max_requests=max_requests, context_parallel=context_parallel, **sizes
        )
        self.devices = CacheDevices(self.schema, mesh)
        self.shards = self.devices.shards
        self.requests = RequestTable(self.schema, self.shards, devices_per_shard)

    def _summary(self) -> dict[str, Any]:
        rooms = {}
        for slot, state in sorted(self.requests.states.items()):
            blocks = f"tokens in {state.num_blocks:,} blocks"
            rooms[f"slot {slot}"] = Share(state.length, self.schema.max_context, blocks)
        return self.use() | self.schema.summary() | rooms

    def use(self) -> dict[str, Share]:
        """Returns how many slots and blocks are in use, for a repr, as {"slots": Share, "blocks": Share}."""
        schema = self.schema
        return {
            "slots": Share(len(self.slots), schema.max_requests),
            "blocks": Share(schema.num_blocks - self.free_blocks, schema.num_blocks),
        }

    @property
    def mesh(self) -> Mesh | None:
        """The devices that hold the cache; None = the default device."""
        return self.devices.mesh

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the admitted requests in ascending order."""
        return tuple(sorted(self.requests.states))

    @property
    def free_slots(self) -> int:
        """The number of requests that can still be admitted."""
        return self.schema.max_requests - len(self.requests.states)

    @property
    def free_blocks(self) -> int:
        """The number of blocks that neither a request nor the prefix cache owns."""
        return self.requests.allocator.num_free

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens that the request in each slot holds, [max_requests] int64; 0 in free slots."""
        return self.requests.states.numbers["length"].copy()

    @property
    def admission_times(self) -> np.ndarray:
        """The time at which the request in each slot was admitted, [max_requests] int64; 0 in free slots.

        The times tell successive requests in a slot apart. They come from the request table's clock, which counts
        events from 1 on.
        """
        return self.requests.states.numbers["admitted"].copy()

    @property
    def block_table(self) -> np.ndarray:
        """A copy of the device's block table for admitted slots, [max_requests, max_blocks] int32; -1 = no block.

        On a mesh with an axis "data" the block ids are local: they begin at 0 in each shard.
        """
        table = np.full((self.schema.max_requests, self.schema.max_blocks), -1, np.int32)
        for slot, state in self.requests.states.items():
            table[slot] = self.devices.block_table_row(state.blocks[: state.published_blocks])
        return table

    def length(self, slot: int) -> int:
        """Returns the number of tokens that a request holds."""
        return self.requests.state(slot).length

    def min_length(self, slot: int) -> int:
        """Returns the shortest length that `rewind` can reach with a request.

        After a longer rewind the next token would need rows that are overwritten in the rings, the circular buffers of
        the newest window and compressor rows. Batches that have certainly not run do not count, see `rewind`.
        """
        return step_order.device_state(self.requests, slot).min_length

    def init_cache(self) -> KVCache:
        """Makes an empty cache on the devices, which becomes the manager's newest cache (see `rewind`).

        A step on this cache raises ValueError for a batch of a request whose earlier tokens ran on another cache. The
        prefix cache is emptied, since its blocks lie in an earlier cache.
        """
        cache = KVCache.zeros(self.schema, self.mesh)
        if self.requests.evictor is not None:
            self.requests.evictor.clear()
        step_order.record_empty(cache, self.requests)
        return cache

    def abstract_cache(self) -> KVCache:
        """Returns `init_cache`'s cache with `jax.ShapeDtypeStruct` in place of arrays, to compile programs with."""
        return KVCache.abstract(self.schema, self.mesh).with_mailboxes(self.mesh)

    def check_cache(self, cache: KVCache, slot: int | None = None) -> None:
        """Raises an error if this manager cannot use the cache, or if the cache is known to lack tokens of a request.

        Args:
          cache: the cache.
          slot: slot of the request whose tokens the cache must hold; None = no request.

        Raises:
          RuntimeError: the cache was donated.
          ValueError: the cache has another geometry or belongs to another manager, the slot is not admitted, or a batch
            of its request has not run on the cache.
        """
        if differences := cache.schema.differences(self.schema, "manager"):
            raise ValueError(f"the cache is of another manager: {differences}")
        step_order.check_manager(self.requests, cache, slot)

    def check_ids(self, ids: object, name: str = "prompt_ids") -> np.ndarray:
        """Returns token ids as an int32 array.

        Args:
          ids: [n] token ids of one request.
          name: name of the argument in errors.

        Raises:
          TypeError: the ids are not whole numbers.
          ValueError: there are no ids, they are not one-dimensional, or one is outside the vocabulary.
        """
        if isinstance(ids, str):
            raise TypeError(f"{name}={ids[:20]!r} is text: encode it first, such as tokenizer.encode(text).ids")
        try:
            array = np.asarray(ids)
        except ValueError:
            raise ValueError(f"{name} holds lists of several lengths: give the ids of one request, [n]") from None
        if array.size == 0:
            raise ValueError(f"{name} is empty: give at least one token id")
        if not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"{name} must hold whole numbers, not {array.dtype} ({array.reshape(-1)[0]!r})")
        if array.ndim != 1:
            raise ValueError(f"{name} has shape {array.shape}: give the ids of one request, [n]")
        vocabulary = self.schema.config.vocab_size
        bad = np.flatnonzero((array < 0) | (array >= vocabulary))
        if bad.size:
            raise ValueError(
                f"{name}[{bad[0]}]={array[bad[0]]} is outside the vocabulary: ids go from 0 to {vocabulary - 1}"
            )
        return array.astype(np.int32)

    def admit(self, prompt_ids: TokenIds | None = None, *, num_tokens: int | None = None) -> int:
        """Gives a new request a slot. Reserves no blocks: `allocate` or `prepare_forward` does.

        Args:
          prompt_ids: [n] token ids of the prompt, to check that it can run in an empty cache; None = no check.
          num_tokens: number of tokens that the request will hold in the end, prompt included; None = the length of the
            prompt.

        Returns:
          The lowest free slot of a shard. If a mesh has an axis "data", a shard with enough free or evictable blocks is
          preferred, and among equal shards the one with the most free slots.

        Raises:
          TypeError, ValueError: the ids are bad, or the request needs more tokens than `max_context` or than all blocks
            of a shard hold.
          CacheFullError: every slot is taken.
        """
        num_tokens = self.check_size(0 if prompt_ids is None else len(self.check_ids(prompt_ids)), num_tokens)
        slot = self.requests.find_slot(num_tokens)
        self.requests.admit(slot)
        return slot

    def count_fitting(self, sizes: Sequence[int]) -> int:
        """Returns how many new requests can be admitted at once, in addition to the admitted ones.

        Args:
          sizes: number of tokens that each new request needs room for, in the order of admission. Counting stops at the
            first request that does not fit.
        """
        table = self.requests
        # `room` lists, for each shard, the number of free slots and the number of blocks that are free or evictable.
        room = [[len(table.free_slots(shard)), table.room(shard)] for shard in range(self.shards.count)]
        for count, size in enumerate(sizes):
            blocks = table.blocks_for(size)
            fitting = [shard for shard in room if shard[0] > 0 and shard[1] >= blocks]
            if not fitting:
                return count
            emptiest = max(fitting)
            emptiest[0] -= 1
            emptiest[1] -= blocks
        return len(sizes)

    def check_size(self, prompt_length: int, num_tokens: int | None = None, subject: str = "the request needs") -> int:
        """Checks that a request fits an empty cache, and returns the number of tokens that it needs room for.

        Args:
          prompt_length: number of tokens in the request's prompt.
          num_tokens: number of tokens that the request will hold in the end, prompt included; None = `prompt_length`.
          subject: words of the error's message before the number of tokens.

        Returns:
          The larger of `prompt_length` and `num_tokens`.

        Raises:
          ValueError: the request needs more tokens than `max_context` or than the blocks of a shard hold, or
            `num_tokens` is below 1.
        """
        if num_tokens is not None:
            check_whole("num_tokens", num_tokens, 1)
        needed = max(prompt_length, num_tokens or 0)
        max_context = self.schema.max_context
        if needed > max_context:
            raise ValueError(f"{subject} {needed} tokens, {max_context=}")
        if needed > self.capacity:
            blocks = "the whole cache" if self.shards.count == 1 else f"each of the cache's {self.shards.count} shards"
            raise ValueError(
                f"{subject} {needed} tokens, {blocks} holds {self.capacity}: make it larger (memory or num_blocks)"
            )
        return needed

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks of one shard hold."""
        return self.shards.blocks * self.schema.block_tokens

    def fits(self, num_tokens: int) -> bool:
        """Returns whether a shard has a free slot and enough free or evictable blocks for a request of this length."""
        return self.count_fitting([num_tokens]) == 1

    def free_slots_beside(self, slot: int) -> int:
        """Returns the number of free slots in the shard of a slot, which limits the copies that `fork` can make."""
        return len(self.requests.free_slots(self.shards.of(slot)))

    def missing_blocks(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns how many blocks each request has to reserve for more tokens, [n] int64.

        Args:
          slots: [n] slots of the requests.
          counts: [n] number of further tokens of each request.

        Raises:
          ValueError: a request would hold more than `max_context` tokens.
        """
        now = self.requests.states.numbers[slots]
        max_context = self.schema.max_context
        lengths = now["length"] + counts
        for i in np.flatnonzero(lengths > max_context):
            raise ValueError(
                f"slot {slots[i]} holds {now['length'][i]} tokens and cannot take {counts[i]} more: {max_context=}"
            )
        return np.maximum(0, self.requests.blocks_for(lengths) - now["num_blocks"])

    def allocate(self, slot: int, num_tokens: int) -> None:
        """Reserves blocks for `num_tokens` more tokens of a request, so that no other request can take these blocks.

        Raises:
          ValueError: the slot is not admitted, the number is negative, or the total exceeds `max_context`.
          CacheFullError: too few blocks are free.
        """
        check_whole("num_tokens", num_tokens, 0)
        table = self.requests
        state = table.state(slot)
        (missing,) = self.missing_blocks(np.array([slot]), np.array([num_tokens])).tolist()
        if missing:
            with table.transaction({slot: missing}) as acquired:
                table.commit({slot: dataclasses.replace(state, blocks=state.blocks + acquired[slot])})

    def prepare_forward(
        self,
        tokens: Mapping[int, TokenIds],
        *,
        reserve: int = 0,
        prefill_size: int | None = None,
        decode_size: int | None = None,
    ) -> Batch:
        """Builds a step's inputs, reserves blocks for the step's tokens, and adds the tokens to the requests' lengths.

        The number T of tokens in the batch's arrays is padded so that few programs are compiled. The size of
        `Batch.new_blocks` follows from T and `reserve`. On a mesh with an axis "data" every size here is for one
        shard, and the arrays hold the shards one after another.

        * A step of at most `decode_size` tokens, with at most `max_query_tokens` of each request: T is `decode_size`.
        * A step of at most `decode_size` tokens, with more than `max_query_tokens` of one request: T is `prefill_size`.
          Without `prefill_size`, T is `decode_size`.
        * A step of more tokens: T is `prefill_size`, or without it the next power of two.

        Batches run in the order in which they were prepared. If you do not run a batch, steps refuse the later batches
        of its requests. Then call `rewind` to take back the tokens of that batch and of these later ones.

        Args:
          tokens: {slot: [n] token ids that follow the request's tokens}.
          reserve: number of further tokens per slot that the device will decode without the host. The batch contains
            the blocks for these tokens too. Report the decoded tokens with `advance`.
          prefill_size: T of every step but decode steps (the first case above). If it is given, two compiled programs
            are enough.
          decode_size: T of decode steps; None = the number of slots in a shard. A larger size makes room for draft
            tokens. 0 gives every step the size `prefill_size`.

        Returns:
          The batch for the caller's step. Within a shard, requests stand in the order of `tokens`.

        Raises:
          TypeError, ValueError: no tokens, bad ids, a slot that is not admitted, or more tokens than `max_context` or
            `prefill_size` allow.
          CacheFullError: too few blocks are free.
        """
        check_whole("reserve", reserve, 0)
        if not isinstance(tokens, Mapping):
            raise TypeError(f"tokens must map slots to token ids, {{slot: ids}}, got a {type(tokens).__name__}")
        if not tokens:
            raise ValueError("tokens is empty: a step needs at least one slot with tokens")
        ids = [self.check_ids(new, f"tokens[{check_whole('slot', slot)}]") for slot, new in tokens.items()]
        for slot in tokens:
            self.requests.state(slot)
        slots = np.array(list(tokens), int)
        counts = np.array([len(new) for new in ids], int)
        batch, _ = self.prepare_arrays(
            slots,
            counts,
            np.concatenate(ids),
            reserve=reserve,
            prefill_size=prefill_size,
            decode_size=decode_size,
        )
        return batch

    def prepare_arrays(
        self,
        slots: np.ndarray,
        counts: np.ndarray,
        ids: np.ndarray,
        *,
        reserve: int = 0,
        prefill_size: int | None = None,
        decode_size: int | None = None,
    ) -> tuple[Batch, np.ndarray]:
        """Builds a step's inputs as `prepare_forward` does, from arrays that the caller has checked.

        Args:
          slots: [n] int64, distinct slots of admitted requests.
          counts: [n] int64, number of tokens of each request in the batch, at least 1.
          ids: [sum of counts] int32 token ids, request by request.
          reserve, prefill_size, decode_size: as for `prepare_forward`.

        Returns:
          (the batch, [n] index of each request's first token in the batch's token arrays).

        Raises:
          ValueError, CacheFullError: as for `prepare_forward`.
        """
        table = self.requests
        layout = find_layout(
            self.shards, slots.tobytes(), counts.tobytes(), self.schema.max_query_tokens, prefill_size, decode_size
        )
        states = table.states
        time = table.tick()
        missing = self.missing_blocks(slots, counts + reserve)
        before = states.numbers[slots]
        after = self._extended(before, counts)
        after["num_blocks"] += missing
        after["changed"] = time
        # A block is published when the device's block table gets it. Only blocks that this step can reach are
        # published, which bounds the size of `new_blocks`.
        reached = table.blocks_for(after["length"] + reserve)
        after["published_blocks"] = np.maximum(before["published_blocks"], reached)
        # `max_blocks` bounds the number of new blocks in a shard. Each slot may need the blocks of `reserve`, and one
        # more because its number of blocks is rounded up. The step's tokens need at most as many blocks as if they
        # belonged to one request.
        max_blocks = self.shards.slots * (1 + table.blocks_for(reserve))
        max_blocks += table.blocks_for(len(layout.slots) // self.shards.count)
        positions = layout.place(consecutive(before["length"], counts), -1)
        growing = missing > 0
        needed = dict(zip(slots[growing].tolist(), missing[growing].tolist(), strict=True))
        with table.transaction(needed) as acquired:
            states = states.replaced(slots, after, acquired)
            arrays = {"token_ids": layout.place(ids, 0), "slots": layout.slots}
            arrays |= find_new_rows(self.shards, slots, before, states, max_blocks)
            batch = Batch(
                positions=self.devices.put(positions, "tokens"),  # always a new array: it carries the batch's record
                **self.devices.put_changed(arrays, "tokens"),
                prefill=layout.prefill,
                schema=self.schema,
            )
            prepared = step_order.PreparedBatch(table, time, slots, table.states.numbers, states.numbers)
            step_order.record(batch.positions, prepared)
            table.states = states
        return batch, layout.begins

    def _extended(self, numbers, counts):
        """Returns a copy of `numbers` [n], of dtype `NUMBERS`, with the lengths after `counts` [n] more tokens."""
        numbers = numbers.copy()
        numbers["length"] += counts
        longest_rewind = self.schema.max_query_tokens - 1
        numbers["min_length"] = np.maximum(numbers["min_length"], numbers["length"] - longest_rewind)
        return numbers

    def acquire(self, cache: KVCache, layer: int, batch: Batch) -> LayerCacheHandle:
        """Returns one layer's view of the cache for a batch. Allocates nothing; may be called in a traced function.

        Args:
          cache: the cache, after `begin_step`.
          layer: index of the layer in the model.
          batch: inputs of the step.
        """
        return cache.handle(layer, batch)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Increases a request's length by the tokens that the device decoded without the host.

        The blocks for these tokens were reserved with the request's newest batch, see `reserve` of `prepare_forward`.
        If the model has draft layers, it may have written refused drafts too; `min_length` allows for them.

        Args:
          slot: slot of the request.
          num_tokens: number of decoded tokens.

        Raises:
          ValueError: the slot is not admitted, or `num_tokens` is negative or exceeds the room in the reserved blocks.
        """
        state = self.requests.state(slot)
        check_whole("num_tokens", num_tokens, 0)
        room = min(state.published_blocks * self.schema.block_tokens, self.schema.max_context) - state.length
        if num_tokens > room:
            raise ValueError(
                f"slot {slot} cannot have decoded {num_tokens=} on the device: its blocks had room for {room}; "
                "prepare the loop's first batch with a larger reserve"
            )
        # The maximum number of rejected drafts that the device may have written after the decoded tokens.
        overrun = 0 if self.schema.config.drafts is None else min(room - num_tokens, self.schema.max_query_tokens - 1)
        (numbers,) = self._extended(self.requests.states.numbers[[slot]], np.array([num_tokens + overrun]))
        numbers["length"] -= overrun
        step_order.commit_length(self.requests, slot, state.with_numbers(numbers))

    def rewind(self, slot: int, num_tokens: int, *, is_followed: bool = False) -> None:
        """Forgets a request's newest `num_tokens` tokens without touching the device; the blocks stay reserved.

        The rings keep `max_query_tokens - 1` spare rows, so a request can go back by at most this number of tokens from
        its greatest length (see `min_length`). `truncate` goes to any length. The device's array `lengths` in the cache
        is set with the request's next batch.

        A prepared batch may never run, for instance after an exception. Any number of tokens of such batches can be
        taken back, as long as the cache on which they should have run still exists and is the manager's newest cache.

        Args:
          slot: slot of the request.
          num_tokens: number of tokens to forget.
          is_followed: whether these tokens are rejected drafts of the batch before the newest one, and the newest batch
            was launched before the host knew of the rejection. The device has then written the newest batch's tokens at
            the positions of the rejected drafts (see `EarlierTokens.fill`).

        Raises:
          ValueError: the slot is not admitted, `num_tokens` is negative, the rings do not reach back to the new length,
            or a block from the new length on is shared.
        """
        state = self.requests.state(slot)
        check_whole("num_tokens", num_tokens, 0)
        length = state.length - num_tokens
        device_state = step_order.device_state(self.requests, slot)
        # Batches that never ran have overwritten no rows. If all their tokens are taken back, the rings reach as far
        # back as they did before these batches.
        base = device_state if length <= device_state.length else state
        if is_followed:  # the newest batch began `num_tokens` earlier than the host counted, and overwrote rows there
            base = dataclasses.replace(state, min_length=state.min_length - num_tokens)
        if length < base.min_length:
            not_run = state.length - device_state.length
            max_query_tokens = self.schema.max_query_tokens
            raise ValueError(
                f"slot {slot} cannot rewind {num_tokens=}: it holds {state.length}, its rings reach back to "
                f"{base.min_length} (the spare rows of {max_query_tokens=}), so at most "
                f"{state.length - base.min_length} can be taken back; truncate goes further. The tokens of batches "
                f"that did not run, here {not_run}, can all be taken back"
            )
        num_full = length // self.schema.block_tokens
        if self.requests.is_shared(state.blocks[num_full:]):
            raise ValueError(
                f"slot {slot} cannot rewind {num_tokens=}: the block of position {length} is shared; use truncate"
            )
        state = dataclasses.replace(base, length=length, cached_blocks=state.cached_blocks[:num_full])
        step_order.commit_length(self.requests, slot, state)

    def fork(self, cache: KVCache, slot: int, n: int, *, length: int | None = None) -> tuple[list[int], KVCache]:
        """Makes `n` copies of a request, each with a slot of its own. The request itself goes on too.

        Full blocks are shared. The rings, the compressor states, and the last block if it is not full are copied,
        because each copy writes its next token to them.

        Args:
          cache: the cache; donated.
          slot: slot of the request to copy, after a step.
          n: number of copies. All are in the request's shard.
          length: number of tokens in each copy: all (None), or one less. Copies with one less run the request's
            newest token again. This needs a newest token that a step has run in the slot, not a restored or copied one.

        Returns:
          (the new slots, the cache).

        Raises:
          ValueError: the slot is not admitted, it holds no tokens, `n` is not positive, `length` is neither of the two
            numbers or the rows for it were not restored, or the cache lacks tokens of the request.
          CacheFullError: too few slots or blocks are free.
        """
        self.check_cache(cache, slot)
        table = self.requests
        parent = table.state(slot).shortened(length, slot)
        check_whole("n", n, 1)
        if not parent.length:
            raise ValueError(f"slot {slot} holds no tokens yet: admit another request instead of a fork")
        slots = table.find_slots(n, self.shards.of(slot))
        num_full, num_partial = divmod(parent.length, self.schema.block_tokens)
        shared = parent.blocks[:num_full]
        with table.transaction(dict.fromkeys(slots, int(num_partial > 0))) as copies:
            table.allocator.share(shared * n)
            cached_blocks = parent.cached_blocks[:num_full]
            states = {
                child: dataclasses.replace(
                    parent, blocks=shared + copies[child], cached_blocks=cached_blocks, admitted=0
                )
                for child in slots
            }
            partial_block = parent.blocks[num_full] if num_partial else -1
            new_cache = self._copy_request(cache, slot, states, partial_block, copies)
            step_order.record_write(table, cache, new_cache, states)
        return slots, new_cache

    def truncate(self, cache: KVCache, slot: int, length: int) -> tuple[int, KVCache]:
        """Truncates a request to any length.

        If `length` is at least `min_length`, no token has to run again. If it is less, the rows that the next token
        reads are overwritten. The request then goes back to the largest block boundary up to `length` for which a
        `PrefixCache` has a snapshot, or to no tokens if there is no such boundary. The caller runs the tokens from
        there up to `length` again.

        Blocks beyond the kept tokens are released. If the last kept block is not full and is shared, it is replaced by
        a copy, since later tokens are written to it.

        Args:
          cache: the cache; donated.
          slot: slot of the request.
          length: number of tokens to keep.

        Returns:
          (start, the cache): the request holds `start` tokens, at most `length`. Run tokens[start:length] to reach
          `length`.

        Raises:
          ValueError: the slot is not admitted, or `length` is negative or exceeds the request's length.
          CacheFullError: no block is free for a copy.
          CacheCorruptionError: a `PrefixCache` with `debug` found a changed snapshot.
        """
        self.check_cache(cache, slot)
        table = self.requests
        state = table.state(slot)
        if not 0 <= length <= state.length:
            raise ValueError(f"{length=} must be between 0 and the {state.length} tokens that slot {slot} holds")
        start = length
        snapshot = None
        if length < state.min_length:
            start = 0
            nodes = [node for node in state.cached_blocks if node.length <= length and node.snapshot is not None]
            if nodes:
                check_snapshot(self.schema, nodes[-1], f"slot {slot}")
                start = nodes[-1].length
                snapshot = nodes[-1].snapshot
        num_full, num_partial = divmod(start, self.schema.block_tokens)
        num_kept = num_full + bool(num_partial)
        written = state.blocks[num_full:num_kept]  # the last kept block if it is not full, else nothing
        with table.transaction({slot: len(written)} if table.is_shared(written) else None) as copies:
            blocks = state.blocks[:num_full] + (copies[slot] if copies else written)
            table.allocator.release((written if copies else []) + state.blocks[num_kept:])
            cached_blocks = state.cached_blocks[:num_full]
            state = dataclasses.replace(state.cut(start), blocks=blocks, cached_blocks=cached_blocks)
            if copies:
                new_cache = self._copy_request(cache, slot, {slot: state}, written[0], copies)
            else:
                new_cache = self.devices.write_request(cache, slot, start, blocks, snapshot)
            step_order.record_write(table, cache, new_cache, {slot: state})
        return start, new_cache

    def _copy_request(self, cache, source: int, states: Mapping[int, RequestState], block: int, copies):
        """Copies the rows of slot `source` to other slots, and its partly filled last block to new blocks.

        Donates the cache and returns the updated one.

        Args:
          cache: the cache.
          source: slot whose rows are copied.
          states: {slot: state} of the requests that get the rows. All hold the same number of tokens.
          block: the source's last block if it is filled in part; -1 = none.
          copies: {slot: ids of the blocks acquired for the slot}; `block` is copied to all of them.
        """
        max_requests = self.schema.max_requests
        slots = padded(list(states), max_requests)
        blocks = padded(list(itertools.chain.from_iterable(copies.values())), max_requests)
        table_rows = np.full((max_requests, self.schema.max_blocks), -1, np.int32)
        for i, state in enumerate(states.values()):
            table_rows[i] = self.devices.block_table_row(state.blocks)
        (length,) = {state.length for state in states.values()}
        arguments = (np.int32(source), np.int32(block), np.int32(length), slots, blocks, table_rows)
        return copy_request(cache, *self.devices.put(arguments))

    def release(self, slot: int) -> None:
        """Ends a request, frees its slot and drops its references to blocks.

        The slot's rows and the freed blocks are overwritten or reset before they are read again.
        """
        state = self.requests.state(slot)
        with self.requests.transaction():
            self.requests.allocator.release(state.blocks)
            self.requests.commit({slot: None})

    def release_all(self) -> None:
        """Ends all requests. The prefix cache keeps its blocks."""
        with self.requests.transaction():
            self.requests.commit(dict.fromkeys(self.slots))
            self.requests.recount()
