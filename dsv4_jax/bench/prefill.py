"""`dsv4-jax bench prefill`: the time of attention layers over chunks of a prompt, and of their kernels."""

import collections
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_jax.bench import timing
from dsv4_jax.bench.attention_stack import AttentionStack, begin_step, random_cache, stack_step
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.bench.kernel_kinds import kernel_report
from dsv4_jax.bench.model_stack import random_stack
from dsv4_jax.bench.tables import LiveTable, attention_kinds, number
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS, packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager
from dsv4_jax.quant import KVFormat


CALLS = 4  # calls whose mean time is reported
# Default tokens of a chunk and tokens before it, with a GPU and without.
DEFAULTS = dict(gpu=((512, 2048, 8192), (0, 65536, 524288)), cpu=((64,), (0, 256)))
STACK = "stack"  # the "layer_type" of all layers together


def cases(
    config: DSV4Config, device: str, chunks: tuple[int, ...] | None, contexts: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the chunks and contexts, those of `DEFAULTS` for None; raises ValueError if one is out of range."""
    chunks = DEFAULTS[device][0] if chunks is None else chunks
    contexts = DEFAULTS[device][1] if contexts is None else contexts
    if not chunks or not contexts:
        raise ValueError("--chunks and --contexts need at least one number each")
    if min(chunks) < 2:
        raise ValueError(f"--chunks {min(chunks)} must be at least 2 tokens")
    most = config.max_position_embeddings - max(chunks)
    for context in contexts:
        if not 0 <= context <= most:
            raise ValueError(f"--contexts {context} must be from 0 to {most} tokens before the longest chunk")
    return chunks, contexts


def run(
    config: DSV4Config,
    kv_format: KVFormat,
    chunks: tuple[int, ...] | None,
    contexts: tuple[int, ...] | None,
    report: dict[str, Any],
    *,
    trace: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Measures an attention layer of each kind, with weights as released; prints and yields the results.

    The last results are for all layers: the time of each kind times the number of its layers. One program is compiled
    for a kind and chunk size, so every context is measured in the cache of the longest. Without a GPU, the packaged
    model replaces `config`. The clock, the rates of a copy and a matrix product, and the cache's size in tokens are
    added to the report; a profile is written to the folder `trace`, if given. Raises ValueError if an option is out of
    range.
    """
    small = jax.default_backend() != "gpu"
    if small:
        config, report["shapes"] = read_config(packaged_checkpoint()), "tiny"
    chunks, contexts = cases(config, "cpu" if small else "gpu", chunks, contexts)
    report["clock"] = "wall clock" if small else "kernel time from CUPTI"
    copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    matmul = report["matmul_operations_per_second"] = timing.matmul_rate()
    report["max_context"] = -(-(max(contexts) + max(chunks)) // BLOCK_TOKENS) * BLOCK_TOKENS
    print(
        f"{report['device']}, jax {report['jax']}. Attention layers, chunks of one request in a cache for "
        f"{report['max_context']} tokens. Milliseconds; floor: products at {matmul / 1e12:,.0f} TFLOP/s, or bytes at "
        f"{copy / 1e9:,.0f} GB/s.\n",
        flush=True,
    )
    lines = LiveTable(layer=28, chunk=6)
    layers = collections.Counter(spec.kind for spec in config.specs)
    totals: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for spec, count in layers.items():
        alone = config.with_layers([spec]).with_drafts(False)
        layer = _Layer(alone, kv_format, max(contexts), report["max_context"])
        for context in contexts:
            for chunk in chunks:
                row = dict(layer_type=spec.layer_type, layers=count) | layer.measure(context, chunk, report, trace)
                totals.setdefault((context, chunk), []).append(row)
                lines.add(_cells(row))
                yield row
    for rows in totals.values():
        lines.add(_cells(row := _together(rows)))
        yield row


def _stack(config):
    """Returns attention layers with random weights, stored as in the release."""
    stack = AttentionStack(config, nnx.Rngs(0))
    # The experts are not used: few of them save memory.
    whole = random_stack(dataclasses.replace(config, n_routed_experts=config.num_experts_per_tok))
    for own, layer in zip(stack.layers, whole.layers, strict=True):
        own.self_attn = layer.self_attn
    return stack


class _Layer:
    """One layer and a cache of one request, large enough for every context and chunk."""

    def __init__(self, config, kv_format, longest, max_context):
        self.config, self.longest = config, longest
        self.stack = CompiledModel(_stack(config))
        sizes = dict(num_blocks=max_context // BLOCK_TOKENS, max_requests=1, max_context=max_context)
        self.manager = KVCacheManager(config, kv_format=kv_format, max_query_tokens=1, **sizes)
        self.cache = random_cache(self.manager.schema)
        self.steps: dict[int, Any] = {}

    def measure(self, context, chunk, report, trace):
        """Returns the result of a chunk after `context` tokens."""
        batch = self._batch(context, chunk)
        x = jax.random.normal(jax.random.key(1), (chunk, self.config.hidden_size), jnp.bfloat16)
        if chunk not in self.steps:
            self.steps[chunk] = stack_step.lower(self.stack, self.cache, batch, x, tokens=chunk, drafts=0).compile()
        step = self.steps[chunk]

        def run():
            y, self.cache = jax.block_until_ready(step(self.stack, self.cache, batch, x))

        def seconds():
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin

        def calls():
            return [seconds() for _ in range(CALLS)]

        run()  # warms up
        flops, nbytes = _work(self.config, self.manager.schema, self.stack, chunk, context)
        result = dict(context=context, chunk=chunk, flops=flops, bytes=nbytes, kernel_milliseconds={})
        if jax.default_backend() == "gpu":
            result |= kernel_report(timing.kernels(calls), step.as_text() or "", CALLS)
            milliseconds = sum(result["kernel_milliseconds"].values())
            if trace:
                with jax.profiler.trace(str(trace)):
                    run()
        else:
            milliseconds = 1e3 * statistics.median(calls())
        floor = 1e3 * max(flops / report["matmul_operations_per_second"], nbytes / report["copy_bytes_per_second"])
        return result | _rates(milliseconds, floor, flops, chunk)

    def _batch(self, context, chunk):
        """Returns the batch of a new request's chunk after `context` tokens. Every run of it writes the same rows."""
        manager = self.manager
        manager.release_all()
        slot = manager.admit()
        if context:
            # Blocks for the longest context, so that all contexts share a program.
            self.cache = begin_step(self.cache, manager.prepare_forward({slot: [0]}, reserve=self.longest))
            manager.advance(slot, context - 1)
        ids = np.arange(chunk, dtype=np.int32) % self.config.vocab_size
        return manager.prepare_forward({slot: ids}, prefill_size=chunk, decode_size=0)


def _rates(milliseconds, floor, flops, chunk):
    """Returns a result's times and rates."""
    return dict(
        milliseconds=round(milliseconds, 4),
        floor_milliseconds=round(floor, 4),
        percent_of_floor=round(100 * floor / milliseconds, 1),
        tokens_per_second=round(1e3 * chunk / milliseconds, 1),
        tflops=round(flops / milliseconds / 1e9, 1),
    )


def _work(config, schema, stack, chunk, context):
    """Returns the operations of the matrix products, and the bytes to read and write, of a chunk in one layer."""
    (spec,) = schema.layers[:1]
    positions = context + np.arange(chunk)
    attended = np.minimum(positions + 1, config.window(0)).sum()
    scored, row = 0, tree_bytes(schema.window_codec.struct)
    nbytes = chunk * (4 * config.hidden_size + 2 * row)
    if spec.group is not None:
        group, visible = schema.groups[spec.group], (positions + 1) // spec.compress_rate
        attended += visible.sum() if spec.selection is None else np.minimum(visible, config.topk(0)).sum()
        scored = visible.sum() if spec.selects else 0
        nbytes += int(visible[-1]) * tree_bytes(group.entry.struct)
        if spec.selects and group.key is not None:
            nbytes += int(visible[-1]) * tree_bytes(group.key.struct)
    weights = [x for x in jax.tree.leaves(stack.arrays) if x.ndim > 1]
    flops = 2 * chunk * sum(x.size for x in weights)
    flops += 4 * config.num_attention_heads * config.head_dim * int(attended)
    flops += 2 * config.index_n_heads * config.index_head_dim * int(scored)
    return flops, nbytes + tree_bytes(stack.arrays)


def _together(rows):
    """Returns the result of all layers, from the result of each kind."""

    def total(value):
        return sum(row["layers"] * value(row) for row in rows)

    (first, *_), kinds = rows, dict.fromkeys(kind for row in rows for kind in row["kernel_milliseconds"])
    times = {k: round(total(lambda row, k=k: row["kernel_milliseconds"].get(k, 0.0)), 4) for k in kinds}
    flops, floor = total(lambda row: row["flops"]), total(lambda row: row["floor_milliseconds"])
    result = dict(layer_type=STACK, layers=sum(row["layers"] for row in rows), context=first["context"])
    result |= dict(chunk=first["chunk"], flops=flops, bytes=total(lambda row: row["bytes"]), kernel_milliseconds=times)
    return result | _rates(total(lambda row: row["milliseconds"]), floor, flops, first["chunk"])


def _cells(row):
    """Returns the cells of a result's line."""
    label = row["layer_type"].removesuffix("_attention").replace("_", " ")
    cells = dict(layer=label, context=row["context"], chunk=row["chunk"], ms=number(row["milliseconds"], 3))
    cells |= {"floor": number(row["floor_milliseconds"], 3), "% of it": number(row["percent_of_floor"], 0)}
    cells |= {"tokens/s": number(row["tokens_per_second"], 0), "TFLOP/s": number(row["tflops"], 0)}
    return cells | attention_kinds(row["kernel_milliseconds"])
