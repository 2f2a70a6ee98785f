"""Counters of an engine, and their table."""

import dataclasses

from rich.table import Table

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
      pools: {name of a pool of the cache: its use}.
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
    pools: dict[str, PoolUse] = dataclasses.field(default_factory=dict)
    prefix: PrefixMetrics | None = None
    experts: ExpertMetrics | None = None

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
            found = self.prefix
            table.add_row(
                "prefix hits", f"{found.hits:,} of {found.requests:,} requests, {found.hit_rate:.1%} of tokens"
            )
            held = f"{found.blocks:,} blocks, {found.snapshots:,} snapshots of {found.snapshot_bytes:,} bytes"
            table.add_row("prefix cache", held)
            table.add_row("evicted", f"{found.evicted_blocks:,} blocks, {found.evicted_snapshots:,} snapshots")
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


def pool_use(manager: KVCacheManager, before: dict[str, PoolUse]) -> dict[str, PoolUse]:
    """Returns the current use of each pool; high-water marks continue from `before`."""
    schema = manager.schema
    blocks, slots = schema.num_blocks - manager.free_blocks, schema.max_requests - manager.free_slots
    pools, paged = {}, schema.block_bytes_by_pool()
    for name, total in schema.pool_bytes().items():
        held, of = (blocks, schema.num_blocks) if name in paged else (slots, schema.max_requests)
        used = total * held // of
        pools[name] = PoolUse(used, max(used, before.get(name, PoolUse()).high_water), total)
    return pools
