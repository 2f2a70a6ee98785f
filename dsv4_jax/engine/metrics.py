"""Counters of an engine, and their table."""

import dataclasses

from rich.table import Table

from dsv4_jax.cache import CacheSchema
from dsv4_jax.expert_pages import ExpertMetrics
from dsv4_jax.host import KVCacheManager, PrefixMetrics


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """The use of one pool of the cache.

    Attributes:
      used: number of bytes that requests and the prefix cache hold now.
      high_water: the most bytes they held after any step.
      total: size of the pool in bytes.
    """

    used: int = 0
    high_water: int = 0
    total: int = 0


@dataclasses.dataclass
class EngineMetrics:
    """Counters of an engine since it was made, and its current state.

    Attributes:
      steps: number of steps that ran tokens.
      mixed_steps: number of steps that ran the program of `token_budget` tokens.
      prompt_tokens: number of prompt tokens that ran. Prefix hits do not run; requests that restart run again.
      generated_tokens: number of tokens that requests got.
      added, finished, failed, cancelled: number of requests so far; finished ones reached a limit or a stop token.
      running, waiting: number of requests now.
      waits: number of steps that requests waited for a slot or blocks, summed over requests.
      preemptions: number of times that a request was moved out of the cache because blocks ran out.
      restarts: number of times that all running requests were restarted because a step raised.
      drafted_tokens: number of draft tokens verified.
      accepted_tokens: number of draft tokens accepted.
      compilations: number of programs compiled for steps.
      blocks, slots: number of blocks and slots of the cache that requests and the prefix cache hold now.
      most_blocks, most_slots: the most they held after any step.
      schema: geometry of the cache; None before the first step.
      prefix: counters of the prefix cache; None without one.
      experts: counters of the experts of a model that lie partly in host memory, else None.
    """

    steps: int = 0
    mixed_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    added: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    running: int = 0
    waiting: int = 0
    waits: int = 0
    preemptions: int = 0
    restarts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    compilations: int = 0
    blocks: int = 0
    slots: int = 0
    most_blocks: int = 0
    most_slots: int = 0
    schema: CacheSchema | None = dataclasses.field(default=None, repr=False)
    prefix: PrefixMetrics | None = None
    experts: ExpertMetrics | None = None

    def count_use(self, manager: KVCacheManager) -> None:
        """Counts the slots and blocks of the cache that are in use."""
        self.schema = schema = manager.schema
        self.blocks = schema.num_blocks - manager.free_blocks
        self.slots = schema.max_requests - manager.free_slots
        self.most_blocks = max(self.most_blocks, self.blocks)
        self.most_slots = max(self.most_slots, self.slots)

    @property
    def pools(self) -> dict[str, PoolUse]:
        """The use of each pool of the cache by its name."""
        pools = {}
        schema = self.schema
        if schema is None:
            return pools
        for name, total in schema.pool_bytes().items():
            used = self.slots
            high_water = self.most_slots
            units = schema.max_requests
            if name in schema.block_bytes_by_pool():
                used = self.blocks
                high_water = self.most_blocks
                units = schema.num_blocks
            pools[name] = PoolUse(total * used // units, total * high_water // units, total)
        return pools

    @property
    def acceptance(self) -> float:
        """The fraction of drafted tokens that were accepted; 0 before the first draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def table(self) -> Table:
        """Returns a table for the terminal: `rich.print(metrics.table())`."""
        table = Table("", "", title="Engine", show_header=False, title_justify="left")
        table.add_row("steps", f"{self.steps:,} ({self.mixed_steps:,} with prompt tokens)")
        table.add_row("tokens", f"{self.prompt_tokens:,} of prompts, {self.generated_tokens:,} generated")
        table.add_row("requests", f"{self.added:,} added, {self.running:,} running, {self.waiting:,} waiting")
        table.add_row("ended", f"{self.finished:,} finished, {self.cancelled:,} cancelled, {self.failed:,} failed")
        table.add_row("held up", f"{self.waits:,} waits, {self.preemptions:,} preemptions, {self.restarts:,} restarts")
        table.add_row("drafts", f"{self.drafted_tokens:,} tokens, {self.acceptance:.1%} accepted")
        table.add_row("compilations", f"{self.compilations:,}")
        if self.prefix is not None:
            prefix = self.prefix
            hits = f"{prefix.hits:,} of {prefix.requests:,} requests, {prefix.hit_rate:.1%} of tokens"
            table.add_row("prefix hits", hits)
            snapshots = f"{prefix.snapshots:,} snapshots of {prefix.snapshot_bytes:,} bytes"
            table.add_row("prefix cache", f"{prefix.blocks:,} blocks, {snapshots}")
            table.add_row("evicted", f"{prefix.evicted_blocks:,} blocks, {prefix.evicted_snapshots:,} snapshots")
            if (files := prefix.files) is not None:
                read = f"{files.hit_tokens:,} tokens read, {files.dropped:,} writes dropped, {files.errors:,} errors"
                table.add_row("on disk", f"{files.blocks:,} blocks, {files.bytes:,} bytes; {read}")
        if (experts := self.experts) is not None:
            waiting = experts.bus_seconds / max(experts.seconds, 1e-9)
            table.add_row("expert hits", f"{experts.hit_rate:.1%} of selections; {experts.swaps:,} swaps")
            read = f"{experts.bus_bytes / 1e9:.1f} GB read from host memory, about {waiting:.0%} of the time"
            table.add_row("experts", f"{read}; {experts.moved_bytes / 1e9:.1f} GB moved")
        for name, use in self.pools.items():
            if use.total:
                share = f"{use.used / use.total:.0%} of {use.total:,} bytes, at most {use.high_water / use.total:.0%}"
                table.add_row(name, share)
        return table
