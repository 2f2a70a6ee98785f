"""The host's book of requests: slots, lengths and blocks; turns tokens into a step's `Batch`."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import Batch, CacheSchema, KVCache, LayerCacheHandle, compute_block_budget
from dsv4_jax.config import DSV4Config
from dsv4_jax.host.allocator import BlockAllocator
from dsv4_jax.host.errors import CacheFullError
from dsv4_jax.host.sizes import parse_bytes
from dsv4_jax.quant import KVFormat


TokenIds = Sequence[int] | np.ndarray | jax.Array


@dataclasses.dataclass
class _Request:
    length: int = 0  # tokens held
    high_water: int = 0  # the longest length so far: how far the rings have been written
    blocks: list[int] = dataclasses.field(default_factory=list)  # reserved, in order
    announced: int = 0  # how many of them the device's block table knows
    fresh: bool = True  # no batch yet: its slot still shows the previous owner


class KVCacheManager:
    """Admits requests, reserves their blocks and builds the inputs of each step.

    It knows every length without asking the device, and keeps no arrays: the cache is a pytree that the caller passes
    from step to step. Every method either does all it was asked or raises and changes nothing. Not thread-safe.

    Attributes:
      schema: geometry of the cache.
      allocator: owner of the blocks.
    """

    def __init__(
        self,
        config: DSV4Config,
        *,
        memory: int | str | None = None,
        num_blocks: int | None = None,
        max_requests: int = 8,
        max_context: int,
        block_tokens: int = 128,
        kv_format: str | KVFormat = "v4",
        dtype=jnp.bfloat16,
        max_query_tokens: int = 1,
    ):
        """A manager without requests. Give either `memory` or `num_blocks`.

        Args:
          config: the model.
          memory: for the whole cache, in bytes or as text ("20GiB"); no more is used than full slots need.
          num_blocks: blocks of each compressed pool.
          max_requests: slots, and the smallest number of tokens a step is padded to.
          max_context: tokens a request may hold.
          block_tokens: tokens a block stands for; a multiple of the model's compression rates.
          kv_format: what the cache's bytes mean: "v4", "per_entry", "plain" or a `KVFormat`.
          dtype: the model's dtype.
          max_query_tokens: tokens a request may bring to a decode step, and one more than it may rewind.

        Raises:
          TypeError, ValueError: both or none of `memory` and `num_blocks`, or sizes that make no cache.
        """
        sizes = dict(
            max_requests=max_requests,
            max_context=max_context,
            block_tokens=block_tokens,
            kv_format=kv_format,
            dtype=dtype,
            max_query_tokens=max_query_tokens,
        )
        if num_blocks is None and memory is not None:
            budget = compute_block_budget(config, parse_bytes(memory), **sizes)
            num_blocks = min(budget, max_requests * -(-max_context // block_tokens))
        elif num_blocks is None or memory is not None:
            raise ValueError(f"give exactly one of memory and num_blocks; got {memory=} and {num_blocks=}")
        self.schema = CacheSchema.from_config(config, num_blocks=num_blocks, **sizes)
        self.allocator = BlockAllocator(num_blocks)
        self._requests: dict[int, _Request] = {}

    def init_cache(self) -> KVCache:
        """An empty cache of this geometry, for a manager none of whose requests has run a step."""
        return KVCache.zeros(self.schema)

    @property
    def free_slots(self) -> int:
        """How many requests can still be admitted."""
        return self.schema.max_requests - len(self._requests)

    @property
    def free_blocks(self) -> int:
        """Blocks that no request has reserved."""
        return self.allocator.num_free

    @property
    def block_table(self) -> np.ndarray:
        """[max_requests, max_blocks] int32 copy of the rows that the device holds for admitted slots; -1 = none."""
        table = np.full((self.schema.max_requests, self.schema.max_blocks), -1, np.int32)
        for slot, request in self._requests.items():
            table[slot, : request.announced] = request.blocks[: request.announced]
        return table

    def length(self, slot: int) -> int:
        """Tokens a request holds.

        Raises:
          ValueError: the slot is not admitted.
        """
        return self._request(slot).length

    def check_ids(self, ids: object, name: str = "prompt_ids") -> np.ndarray:
        """Token ids as an int32 array.

        Args:
          ids: [n] the ids of one request, if they are that.
          name: how errors call them.

        Raises:
          TypeError: they are not whole numbers.
          ValueError: none, not one-dimensional, or outside the vocabulary.
        """
        array = np.asarray(ids)
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
          prompt_ids: [n] the prompt, to check that it can run at all.
          num_tokens: instead of the prompt, or beside it: how long the request will become.

        Returns:
          The slot: the lowest free one.

        Raises:
          TypeError, ValueError: bad ids, or more tokens than `max_context` or all the blocks hold.
          CacheFullError: every slot is taken.
        """
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"{num_tokens=} must be at least 1")
        needed = max(0 if prompt_ids is None else len(self.check_ids(prompt_ids)), num_tokens or 0)
        schema = self.schema
        if needed > schema.max_context:
            raise ValueError(f"the request needs {needed} tokens, max_context={schema.max_context}")
        if self._blocks_for(needed) > schema.num_blocks:
            raise ValueError(
                f"the request needs {needed} tokens, the whole cache holds "
                f"{schema.num_blocks * schema.block_tokens}: make it larger (memory or num_blocks)"
            )
        slot = next((s for s in range(schema.max_requests) if s not in self._requests), None)
        if slot is None:
            raise CacheFullError(
                f"1 slot is needed, 0 of {schema.max_requests} are free: release a request, or raise max_requests"
            )
        self._requests[slot] = _Request()
        return slot

    def allocate(self, slot: int, num_tokens: int) -> None:
        """Reserves blocks so that a request can take `num_tokens` more tokens whatever others do meanwhile.

        Raises:
          ValueError: the slot is not admitted, a negative number, or more than `max_context` in all.
          CacheFullError: not enough blocks are free.
        """
        if num_tokens < 0:
            raise ValueError(f"{num_tokens=} must not be negative")
        self._reserve({slot: num_tokens})

    def prepare_forward(
        self, tokens: Mapping[int, TokenIds], *, reserve: int = 0, prefill_size: int | None = None
    ) -> Batch:
        """Builds a step's inputs, reserves the blocks it needs and books its tokens.

        Sizes are padded so that few programs get compiled: T to `max_requests`, or beyond it to `prefill_size` or else
        the next power of two; the number of new blocks follows from T and `reserve`. The arrays reach the device in
        one explicit transfer.

        Args:
          tokens: for each slot of the step, the ids [n] that follow what it holds.
          reserve: further tokens for each of these slots that will be decoded on the device without coming back here:
            their blocks are in the batch too. Book what was decoded with `advance`.
          prefill_size: the one T of all steps that are no decode steps (no request brings more than `max_query_tokens`,
            all together at most `max_requests`). A caller who bounds them needs only two programs.

        Returns:
          The batch; the caller runs it. Requests stand in the order of `tokens`.

        Raises:
          TypeError, ValueError: no tokens, bad ids, a slot that is not admitted, or more tokens than `max_context` in
            all or `prefill_size` in the step.
          CacheFullError: not enough blocks are free.
        """
        if reserve < 0:
            raise ValueError(f"{reserve=} must not be negative")
        if not tokens:
            raise ValueError("tokens is empty: a step needs at least one slot with tokens")
        ids = {slot: self.check_ids(new, f"tokens[{slot}]") for slot, new in tokens.items()}
        schema = self.schema
        counts = [len(new) for new in ids.values()]
        padded, prefill = schema.max_requests, max(counts) > schema.max_query_tokens
        if prefill_size is None:
            padded = padded if sum(counts) <= padded else 1 << (sum(counts) - 1).bit_length()
        elif prefill or sum(counts) > padded:
            padded, prefill = prefill_size, True
            if sum(counts) > prefill_size:
                raise ValueError(f"{prefill_size=} is less than the step's {sum(counts)} tokens")
        self._reserve({slot: len(new) + reserve for slot, new in ids.items()})
        # Each request may open ceil(tokens / block_tokens) blocks: together at most one more each than their sum.
        most_blocks = schema.max_requests * (1 + self._blocks_for(reserve)) + self._blocks_for(padded)
        arrays = dict(
            token_ids=np.zeros((padded,), np.int32),
            positions=np.full((padded,), -1, np.int32),
            slots=np.full((padded,), -1, np.int32),
            new_blocks=np.full((most_blocks, 3), -1, np.int32),
            reset_slots=np.full((schema.max_requests,), -1, np.int32),
        )
        at, blocks_at, resets = 0, 0, 0
        for slot, new in ids.items():
            request = self._requests[slot]
            here = slice(at, at := at + len(new))
            arrays["token_ids"][here] = new
            arrays["positions"][here] = np.arange(request.length, request.length + len(new))
            arrays["slots"][here] = slot
            request.length += len(new)
            request.high_water = max(request.high_water, request.length)
            # Of a larger reservation only what this step can reach: that bounds the size of new_blocks.
            reachable = max(request.announced, self._blocks_for(request.length + reserve))
            for index in range(request.announced, reachable):
                arrays["new_blocks"][blocks_at] = slot, index, request.blocks[index]
                blocks_at += 1
            request.announced = reachable
            if request.fresh:
                arrays["reset_slots"][resets] = slot
                resets += 1
                request.fresh = False
        return Batch(**jax.device_put(arrays), prefill=prefill)

    def acquire(self, cache: KVCache, layer: int, batch: Batch) -> LayerCacheHandle:
        """One layer's view of the cache for a batch; allocates nothing and may be called inside a traced function."""
        return cache.handle(layer, batch)

    def advance(self, slot: int, num_tokens: int) -> None:
        """Books tokens that were decoded on the device within the last batch's `reserve`.

        Raises:
          ValueError: the slot is not admitted, a negative number, or more tokens than were reserved for.
        """
        request = self._request(slot)
        if num_tokens < 0:
            raise ValueError(f"{num_tokens=} must not be negative")
        room = min(request.announced * self.schema.block_tokens, self.schema.max_context) - request.length
        if num_tokens > room:
            raise ValueError(
                f"slot {slot} cannot have decoded {num_tokens=} on the device: its blocks had room for {room}; "
                "prepare the loop's first batch with a larger reserve"
            )
        request.length += num_tokens
        request.high_water = max(request.high_water, request.length)

    def rewind(self, slot: int, num_tokens: int) -> None:
        """Forgets a request's last `num_tokens` tokens; its blocks stay reserved.

        The rings keep `max_query_tokens` - 1 rows more than a step reads, so this is as far back as a request can go
        from the longest it has been.

        Raises:
          ValueError: the slot is not admitted, a negative number, or further back than the rings reach.
        """
        request = self._request(slot)
        if num_tokens < 0:
            raise ValueError(f"{num_tokens=} must not be negative")
        spare = self.schema.max_query_tokens - 1
        most = request.length - max(0, request.high_water - spare)
        if num_tokens > most:
            raise ValueError(
                f"slot {slot} cannot rewind {num_tokens=}: it holds {request.length}, held up to {request.high_water}, "
                f"and max_query_tokens={spare + 1} keeps {spare} spare rows, so at most {most} can be forgotten"
            )
        request.length -= num_tokens

    def release(self, slot: int) -> None:
        """Ends a request: its blocks and slot are free. What the device holds of it is never read again.

        Raises:
          ValueError: the slot is not admitted.
        """
        self.allocator.release(self._request(slot).blocks)
        del self._requests[slot]

    def _request(self, slot):
        if slot not in self._requests:
            raise ValueError(f"{slot=} is not admitted; admitted slots: {sorted(self._requests)}")
        return self._requests[slot]

    def _blocks_for(self, num_tokens):
        return -(-num_tokens // self.schema.block_tokens)

    def _reserve(self, more):
        """Reserves blocks for {slot: further tokens}, all or none."""
        missing = {}
        for slot, num_tokens in more.items():
            request = self._request(slot)
            if request.length + num_tokens > self.schema.max_context:
                raise ValueError(
                    f"slot {slot} holds {request.length} tokens and cannot take {num_tokens} more: "
                    f"max_context={self.schema.max_context}"
                )
            missing[slot] = max(0, self._blocks_for(request.length + num_tokens) - len(request.blocks))
        blocks = self.allocator.acquire(sum(missing.values()))
        for slot, count in missing.items():
            self._requests[slot].blocks += blocks[:count]
            del blocks[:count]
