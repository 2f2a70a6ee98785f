"""Prefix cache: full blocks and boundary snapshots of earlier requests, found by the tokens they stand for."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.requests import RequestRows, read_request, write_request
from dsv4_jax.host.book import Request
from dsv4_jax.host.identity import fingerprint
from dsv4_jax.host.manager import KVCacheManager, TokenIds


@dataclasses.dataclass(frozen=True)
class PrefixMetrics:
    """What a `PrefixCache` has done and holds.

    Attributes:
      requests: admitted.
      hits: of them, with at least one block found.
      prompt_tokens: that the admitted requests came with.
      hit_tokens: of them, found.
      blocks: held now.
      snapshots: held now.
      snapshot_bytes: of them.
      evicted_blocks: so far.
      evicted_snapshots: so far.
    """

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(eq=False)
class SealedBlock:
    """A full block in the cache: a node of the tree of all token sequences seen.

    Attributes:
      digest: of the tokens up to its end and of what they mean (seed, model, format).
      parent: the block before it; None = it is the first.
      tokens: [block_tokens] int32 as bytes.
      length: tokens up to its end.
      block: its id; the cache holds one reference.
      children: how many nodes follow it.
      used: when it was last sealed or hit.
      hits: requests that went on from its snapshot.
      snapshot: what a request's slot held at its end; None = not kept.
      alive: still in the cache.
    """

    digest: bytes
    parent: "SealedBlock | None"
    tokens: bytes
    length: int
    block: int
    children: int = 0
    used: int = 0
    hits: int = 0
    snapshot: RequestRows | None = None
    alive: bool = True


class PrefixCache:
    """Shares the blocks of equal prefixes, bit for bit.

    A request's full blocks are found by a chain of hashes over its token ids. To go on behind them a request also needs
    what its slot would hold there: the rows of the last window and CSA's previous-window rows. These boundary snapshots
    are arrays on the device beside the cache, kept by policy under a byte budget, the least recently used are dropped
    first. A request that hits has the same live bytes as one that ran cold.

    The cache puts itself behind the manager: blocks that only it holds are given up when a request needs them.

    Attributes:
      manager: whose blocks are shared.
      every: keep the snapshot of every n-th boundary; None keeps those of a request's last boundary and of boundaries
        that were hit.
      max_bytes: that the snapshots may take.
    """

    def __init__(
        self, manager: KVCacheManager, *, key: str, every: int | None = 1, max_bytes: int = 2**30, seed: int = 0
    ):
        """An empty cache.

        Args:
          manager: whose blocks are shared.
          key: names the model's weights.
          every: see the class.
          max_bytes: see the class.
          seed: of the hashes: whoever does not know it cannot make two prompts collide.

        Raises:
          ValueError: `every` or `max_bytes` is not positive, or the manager has a prefix cache already.
        """
        if every is not None and every < 1:
            raise ValueError(f"{every=} must be at least 1, or None for last boundaries only")
        if max_bytes < 1:
            raise ValueError(f"{max_bytes=} must be at least 1")
        if manager.reclaim is not None:
            raise ValueError("the manager has a prefix cache already")
        self.manager, self.every, self.max_bytes = manager, every, max_bytes
        self._root = hashlib.blake2b(fingerprint(manager.schema, key) + repr(seed).encode(), digest_size=16).digest()
        self._nodes: dict[bytes, SealedBlock] = {}
        self._clock = 0
        self._metrics = PrefixMetrics()
        manager.reclaim = self._reclaim

    @property
    def metrics(self) -> PrefixMetrics:
        """What it has done and holds so far."""
        return self._metrics

    def admit(self, cache: KVCache, prompt_ids: TokenIds, *, num_tokens: int | None = None) -> tuple[int, int, KVCache]:
        """Admits a request that begins with the longest known prefix of its prompt; at least one token is left to run.

        Args:
          cache: the cache; donated.
          prompt_ids: [n] the prompt.
          num_tokens: as in `KVCacheManager.admit`.

        Returns:
          (the slot, hit_tokens, the cache): run prompt_ids[hit_tokens:] next.

        Raises:
          TypeError, ValueError: as in `KVCacheManager.admit`.
          CacheFullError: every slot is taken.
        """
        raise NotImplementedError

    def observe(self, cache: KVCache, slot: int, tokens: TokenIds) -> None:
        """Learns a request's full blocks, and takes the snapshot of its last boundary if the policy wants it.

        Call it after steps that end at a block's border, or so little behind it that the request could be rewound to
        it, and after refused drafts were rewound. Otherwise it learns the blocks and takes no snapshot.

        Args:
          cache: after the step; only read.
          slot: the request.
          tokens: [n] its token ids from the first one on, at least up to its last full block.

        Raises:
          ValueError: the slot is not admitted, or it holds more full blocks than `tokens`.
        """
        raise NotImplementedError

    def evict(self, n_blocks: int) -> int:
        """Gives up to `n_blocks` blocks that no request holds back, the least recently used first.

        Returns:
          How many are free now that were not.

        Raises:
          ValueError: a negative number.
        """
        raise NotImplementedError
