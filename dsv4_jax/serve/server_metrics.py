"""The server's metrics, in the text format of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dsv4_jax.serve.async_engine import AsyncEngine


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# `_FIELDS` maps the prefix of a metric's name to {field: description}. The fields are those of `EngineMetrics`,
# `PrefixMetrics`, `PrefixFileMetrics` and `ExpertMetrics`, one class for each prefix. Fields in `_GAUGES` become
# gauges, all others counters.
_FIELDS = {
    "": {
        "steps": "steps that ran tokens",
        "prompt_tokens": "prompt tokens computed, without those from the prefix cache",
        "generated_tokens": "generated tokens",
        "added": "requests added",
        "finished": "requests that reached a limit or a stop token",
        "failed": "requests that failed",
        "cancelled": "requests that were cancelled",
        "preemptions": "requests preempted because blocks ran out",
        "restarts": "steps that raised an error",
        "drafted_tokens": "draft tokens verified",
        "accepted_tokens": "draft tokens accepted",
        "compilations": "programs compiled for steps",
    },
    "prefix_": {
        "hit_tokens": "prompt tokens that the prefix cache held",
        "prompt_tokens": "prompt tokens of admitted requests",
        "blocks": "blocks the prefix cache holds",
    },
    "prefix_disk_": {
        "hit_tokens": "prompt tokens whose blocks were read from disk",
        "read_bytes": "bytes of blocks and snapshots read",
        "written_bytes": "bytes of blocks and snapshots written",
        "dropped": "blocks and snapshots that were not written because the disk was too slow or failed",
        "errors": "files that could not be read or written, or were damaged",
        "blocks": "blocks in the folder of the prefix cache",
        "bytes": "bytes of this folder's files",
    },
    "expert_": {
        "hits": "selections of experts by tokens that found the expert on the GPU",
        "misses": "selections of experts by tokens that found the expert in host memory",
        "bus_bytes": "bytes of experts that steps read from host memory",
        "bus_seconds": "estimated time that steps waited for these bytes, at 45 GB/s",
        "moved_bytes": "bytes of experts copied between GPU and host to move them",
        "swaps": "pairs of experts that changed places",
        "remap_seconds": "time for which moves of experts kept the GPU idle",
    },
}
_GAUGES = ("blocks", "bytes")


class ServerMetrics:
    """The metrics of the server, its engine and its process.

    Attributes:
      responses: counter of responses by path and status.
      first_token_seconds: histogram of the seconds from a request's arrival to its first token.
      token_seconds: histogram of the seconds per token after the first token. The time between two updates of a request
        is divided by the number of tokens in the later update.
    """

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._registry.register(self)
        name = "dsv4_jax_http_responses"
        self.responses = Counter(name, "responses by path and status", ["path", "status"], registry=self._registry)
        self.first_token_seconds = Histogram(
            "dsv4_jax_first_token_seconds", "time to the first token", buckets=_SECONDS, registry=self._registry
        )
        self.token_seconds = Histogram(
            "dsv4_jax_token_seconds", "time between tokens", buckets=_SECONDS, registry=self._registry
        )

    def text(self) -> bytes:
        """Returns the current metrics as text."""
        return generate_latest(self._registry)

    def collect(self):
        """Yields the metrics of the engine. Prometheus's registry calls it for `text`."""
        metrics = self._engine.metrics
        schema = self._engine.engine.manager.schema
        yield GaugeMetricFamily("dsv4_jax_running_requests", "requests that hold a slot", value=metrics.running)
        yield GaugeMetricFamily("dsv4_jax_waiting_requests", "requests without a slot", value=metrics.waiting)
        yield GaugeMetricFamily("dsv4_jax_slots", "slots", value=schema.max_requests)
        used = GaugeMetricFamily("dsv4_jax_cache_used_bytes", "bytes of the cache that are held", labels=["pool"])
        total = GaugeMetricFamily("dsv4_jax_cache_bytes", "bytes of the cache", labels=["pool"])
        for name, pool in metrics.pools.items():
            used.add_metric([name], pool.used)
            total.add_metric([name], pool.total)
        yield from (used, total)
        files = getattr(metrics.prefix, "files", None)
        sources = {"": metrics, "prefix_": metrics.prefix, "prefix_disk_": files, "expert_": metrics.experts}
        for prefix, source in sources.items():
            if source is None:
                continue
            for field, text in _FIELDS[prefix].items():
                family = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
                yield family(f"dsv4_jax_{prefix}{field}", text, value=getattr(source, field))
