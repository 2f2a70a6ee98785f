"""`dsv4-jax plan`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from dsv4_jax.cli.options import (
    CacheFormat,
    ContextParallel,
    Dtype,
    JsonFlag,
    MeshOption,
    check_at_least,
    mesh_sizes,
    optional,
)
from dsv4_jax.data import block_tokens
from dsv4_jax.parallel.mesh import check_context_parallel
from dsv4_jax.sizes import parse_bytes, readable_bytes


if TYPE_CHECKING:
    from dsv4_jax.cache import CacheSchema
    from dsv4_jax.config import DSV4Config

_CONTEXTS = tuple(4096 * 4**i for i in range(5))  # 4k to 1M


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Computes how many requests of a context fit into a memory, exact to the byte.

    A request takes a fixed number of bytes (sliding windows, compressor states, a row of the block table) and, for each
    --block-tokens tokens, a block in each compressed pool. The sums are those of the arrays that the cache allocates.

    For example:
      dsv4-jax plan --config v4_flash --memory 80GiB --context 1048576
      dsv4-jax plan --config path/to/folder --memory 141GB --weights 96GB --context 65536 --max-requests 64

    Attributes:
      config: v4_flash, v4_pro, or a folder with a config.json.
      memory: memory of a device, such as 80GiB (2**30 bytes each) or 80GB (10**9 bytes each). With --mesh, each device
        has that much.
      context: maximum number of tokens in a request.
      max_requests: maximum number of requests; also report the longest context that so many requests can have.
      dtype: dtype of the model, which is that of plain rows.
      block_tokens: number of tokens in a block. Default: 128, or the next multiple of the model's compression rates.
      max_query_tokens: maximum number of tokens of a request in a decode step (speculative decoding: more than 1).
      drafts: plan for K drafts of the model's multi-token-prediction block: its window, the residual streams that it
        starts from, and steps of 1 + K tokens.
      weights: bytes of the memory that are already taken, for instance by the model's weights.
      as_json: print one JSON object instead.
    """

    config: Annotated[str, tyro.conf.arg(metavar="DIR|v4_flash|v4_pro")]
    memory: Annotated[str, tyro.conf.arg(metavar="SIZE")]
    context: Annotated[int, tyro.conf.arg(metavar="TOKENS")]
    max_requests: Annotated[int | None, optional("N")] = None
    cache_format: CacheFormat = "v4"
    dtype: Dtype = "bfloat16"
    block_tokens: Annotated[int | None, optional("N")] = None
    max_query_tokens: int = 1
    drafts: Annotated[int, tyro.conf.arg(metavar="K")] = 0
    weights: Annotated[str | None, optional("SIZE")] = None
    mesh: MeshOption = None
    context_parallel: ContextParallel = False
    as_json: JsonFlag = False

    def run(self) -> None:
        """Runs the command; raises ValueError where the user has to change something."""
        check_at_least(1, context=self.context)
        check_at_least(0, drafts=self.drafts)
        if self.max_requests is not None:
            check_at_least(1, max_requests=self.max_requests)
        memory = _parse_size("memory", self.memory)
        weights = 0 if self.weights is None else _parse_size("weights", self.weights)
        if weights > memory:
            raise ValueError(f"--weights {weights} bytes are more than --memory {memory} bytes")
        config = _read_config(self.config, mtp=self.drafts > 0)
        sizes = mesh_sizes(self.mesh, config, context_parallel=self.context_parallel)
        one = self.schema(config, self.context)
        num_shards, holders = sizes.get("data", 1), check_context_parallel(sizes, self.context_parallel)
        report = self._report(config, one, memory, weights, _Device(memory - weights, num_shards, holders))
        if self.as_json:
            print(json.dumps(report))
        else:
            _print_report(report, one)

    def schema(self, config: "DSV4Config", context: int, requests: int = 1) -> "CacheSchema":
        """Returns the schema of a cache that holds `requests` requests of `context` tokens each."""
        import jax.numpy as jnp

        from dsv4_jax.cache import CacheSchema

        empty = CacheSchema(
            config,
            num_blocks=0,
            max_requests=requests,
            max_context=context,
            kv_format=self.cache_format,
            dtype=jnp.dtype(self.dtype),
            block_tokens=block_tokens(config) if self.block_tokens is None else self.block_tokens,
            max_query_tokens=max(self.max_query_tokens, 1 + self.drafts) if self.drafts else self.max_query_tokens,
        )
        return dataclasses.replace(empty, num_blocks=requests * empty.max_blocks)

    def _report(
        self, config: "DSV4Config", one: "CacheSchema", memory: int, weights: int, device: "_Device"
    ) -> dict[str, Any]:
        counts = []
        for context in sorted({c for c in _CONTEXTS if c <= config.max_position_embeddings} | {self.context}):
            schema = self.schema(config, context)
            fit = device.num_shards * device.requests(schema)
            fit = fit if self.max_requests is None else min(fit, self.max_requests)
            left = device.memory - device.used(schema, -(-fit // device.num_shards))
            counts.append(
                dict(context=context, bytes_per_request=device.used(schema, 1), requests=fit, bytes_left=left)
            )
        report: dict[str, Any] = dict(
            config=self.config,
            mesh=self.mesh,
            context_parallel=self.context_parallel,
            cache_format=self.cache_format,
            memory_bytes=memory,
            weights_bytes=weights,
            context=self.context,
            block_tokens=one.block_tokens,
            drafts=self.drafts,
            bytes_per_token=one.bytes_per_token,
            bytes_per_request=one.bytes_per_request,
            dense_bf16_bytes_per_token=one.dense_bytes_per_token,
            pools=_pools(one),
            fits=counts,
        )
        if self.max_requests is not None:
            longest = min(device.longest_context(one, self.max_requests), config.max_position_embeddings)
            report |= dict(max_requests=self.max_requests, longest_context=longest)
        return report


def _parse_size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"--{name}: {str(error).removeprefix('memory=')}") from None


def _read_config(name: str, *, mtp: bool) -> "DSV4Config":
    from dsv4_jax.config import DSV4Config

    presets = dict(v4_flash=DSV4Config.v4_flash, v4_pro=DSV4Config.v4_pro)
    if name in presets:
        return dataclasses.replace(presets[name](), num_nextn_predict_layers=int(mtp))
    if not Path(name).exists():
        raise ValueError(f"--config {name} is neither {' nor '.join(presets)} nor an existing folder")
    return DSV4Config.from_hf(Path(name), mtp=mtp)


def _pools(one: "CacheSchema") -> dict[str, dict[str, int]]:
    """Returns the bytes of each pool: of a block, of a request without its blocks, and of a full request."""
    per_block, per_request = dataclasses.replace(one, num_blocks=1).block_bytes_by_pool(), one.slot_bytes_by_pool()
    return {
        name: dict(per_block=per_block.get(name, 0), per_request=per_request.get(name, 0), full=count)
        for name, count in one.pool_bytes().items()
    }


@dataclasses.dataclass(frozen=True)
class _Device:
    """The capacity of one device.

    Attributes:
      memory: bytes for the cache.
      num_shards: number of shards of the requests along the mesh's data axis.
      holders: number of devices that share the blocks of a request.
    """

    memory: int
    num_shards: int
    holders: int

    def used(self, one: "CacheSchema", requests: int) -> int:
        """Returns the bytes that `requests` full requests of its shard take on the device."""
        # Every array has a slot axis or a block axis, so n requests take n times the bytes of one.
        slot = one.memory_bytes() - one.max_blocks * one.block_bytes
        return requests * slot + -(-requests * one.max_blocks // self.holders) * one.block_bytes

    def requests(self, one: "CacheSchema") -> int:
        """Returns the maximum number of full requests in a shard."""
        slots = one.memory_bytes() + (self.holders - 1) * (one.memory_bytes() - one.max_blocks * one.block_bytes)
        count = self.holders * self.memory // slots
        # A device may hold one block more than its share, because blocks are not divided.
        while self.used(one, count) > self.memory:
            count -= 1
        return count

    def longest_context(self, one: "CacheSchema", requests: int) -> int:
        """Returns the maximum number of tokens of each of `requests` requests; 0 if not even a block fits."""
        entry, requests = 4, -(-requests // self.num_shards)  # bytes of an entry of the block table
        fixed = one.memory_bytes() - one.max_blocks * (one.block_bytes + entry)
        room = max(0, self.memory - requests * fixed)
        blocks = room * self.holders // (requests * (one.block_bytes + entry * self.holders))
        while blocks and requests * blocks * entry + -(-requests * blocks // self.holders) * one.block_bytes > room:
            blocks -= 1
        return blocks * one.block_tokens


def _print_report(report: dict[str, Any], one: "CacheSchema") -> None:
    console = Console()
    context, tokens = report["context"], report["block_tokens"]
    dense, paged = report["dense_bf16_bytes_per_token"], report["bytes_per_token"]
    console.print(_rows(one), highlight=False)

    columns = ("pool", f"a block ({tokens} tokens)", "a token", "a request, fixed", f"a request of {context:,}")
    pools = Table(*columns[:1], title="Bytes, over all layers", title_justify="left")
    for column in columns[1:]:
        pools.add_column(column, justify="right")
    for name, pool in report["pools"].items():
        pools.add_row(name, *_pool_cells(pool, tokens))
    pools.add_section()
    sums = {key: sum(pool[key] for pool in report["pools"].values()) for key in _POOL_KEYS}
    pools.add_row("sum", *_pool_cells(sums, tokens))
    console.print(pools)

    if paged:
        console.print(
            f"A token takes {paged:.2f} bytes; dense BF16 would take {dense}, {dense / paged:.1f} times as many."
        )
    free = report["memory_bytes"] - report["weights_bytes"]
    title = f"Requests that fit {free:,} bytes ({readable_bytes(free)})"
    if report["mesh"]:
        title += f" on each device of {report['mesh']}" + ", context parallel" * report["context_parallel"]
    fits = Table(title=title, title_justify="left")
    for column in ("context", "bytes a request", "requests", "bytes left"):
        fits.add_column(column, justify="right")
    for row in report["fits"]:
        each, count, left = row["bytes_per_request"], row["requests"], row["bytes_left"]
        style = "bold" if row["context"] == context else None
        fits.add_row(f"{row['context']:,}", f"{each:,}", f"{count:,}", f"{left:,}", style=style)
    console.print(fits)
    if "max_requests" in report:
        requests, longest = report["max_requests"], report["longest_context"]
        console.print(f"{requests} requests can have a context of {longest:,} tokens each.", highlight=False)


_POOL_KEYS = ("per_block", "per_request", "full")


def _pool_cells(pool: dict[str, int], block_tokens: int) -> list[str]:
    per_block, per_request, full = (pool[key] for key in _POOL_KEYS)
    return [f"{per_block:,}", f"{per_block / block_tokens:,.2f}", f"{per_request:,}", f"{full:,}"]


def _rows(one: "CacheSchema") -> str:
    """Describes the bytes of one row and one indexer key, field by field."""
    keys = [group.key.struct for group in one.groups.values() if group.key is not None]
    texts = [_fields("A KV row", one.window_codec.struct), *(_fields("an indexer key", key) for key in keys[:1])]
    return "; ".join(texts) + "."


def _fields(name: str, struct: Any) -> str:
    values = {field.name: getattr(struct, field.name) for field in dataclasses.fields(struct)}
    sizes = {field: value.size * value.dtype.itemsize for field, value in values.items() if value is not None}
    return f"{name}: {' + '.join(f'{size} ({field})' for field, size in sizes.items())} = {sum(sizes.values())} bytes"
