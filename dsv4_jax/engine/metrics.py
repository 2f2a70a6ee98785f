"""`EngineMetrics`: the counters of an engine, and a table of them for the terminal."""

import dataclasses

from rich.table import Table

from dsv4_jax.cache import CacheSchema
from dsv4_jax.common.summary import Share
from dsv4_jax.expert_pages import ExpertMetrics
from dsv4_jax.host import PrefixMetrics


@dataclasses.dataclass
class EngineMetrics:
    """Counters of an engine since it was made, and its current state.

    Attributes:
      steps: number of steps that ran tokens.
      mixed_steps: number of steps that ran the program of `token_budget` tokens.
      prompt_tokens: number of prompt tokens that ran. Tokens of a cached prefix do not run and do not count. Tokens
        that run again after a restart count again.
      generated_tokens: number of tokens that requests got.
      added, finished, failed, cancelled: number of requests with this event so far. A finished request reached its
        maximum length or a stop token.
      running, waiting: current number of requests with and without a slot.
      waits: number of steps for which a request waited for a slot or blocks, summed over requests.
      preemptions: number of times that a request was moved out of the cache because blocks ran out.
      restarts: number of times that all running requests were restarted because a step raised.
      drafted_tokens: number of draft tokens verified.
      accepted_tokens: number of draft tokens accepted.
      compilations: number of programs of steps that were compiled or loaded.
      blocks, slots: current number of blocks and slots of the cache that requests and the prefix cache hold.
      schema: geometry of the cache; None = unknown.
      prefix: counters of the prefix cache; None without a prefix cache.
      experts: counters of expert migration, if the model's experts lie partly in host memory; else None.
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
    schema: CacheSchema | None = dataclasses.field(default=None, repr=False)
    prefix: PrefixMetrics | None = None
    experts: ExpertMetrics | None = None

    @property
    def pools(self) -> dict[str, Share]:
        """The bytes that requests and the prefix cache hold in each pool of the cache, by the pool's name."""
        pools = {}
        schema = self.schema
        if schema is None:
            return pools
        for name, total in schema.pool_bytes().items():
            used = total * self.slots // schema.max_requests
            if name in schema.block_bytes_by_pool():
                used = total * self.blocks // schema.num_blocks
            pools[name] = Share(used, total, "bytes")
        return pools

    @property
    def acceptance(self) -> float:
        """The fraction of drafted tokens that were accepted; 0 before the first draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def table(self) -> Table:
        """Returns a table of all counters, rates and pools for the terminal: `rich.print(metrics.table())`."""
        table = Table("", "", title="Engine", show_header=False, title_justify="left")
        files = getattr(self.prefix, "files", None)
        groups = {"": self, "prefix ": self.prefix, "prefix file ": files, "expert ": self.experts}
        for group, counters in groups.items():
            if counters is None:
                continue
            rates = {name: getattr(counters, name, None) for name in ("acceptance", "hit_rate", "bus_seconds")}
            for name, value in (vars(counters) | rates).items():
                if isinstance(value, int | float):
                    table.add_row(group + name.replace("_", " "), f"{round(value, 3):,}")
        for name, use in self.pools.items():
            table.add_row(name, str(use))
        return table
