"""`dsv4-jax bench ops`: times of single ops, beside XLA's."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

from dsv4_jax.bench import timing
from dsv4_jax.bench.attention_cases import attention_cases
from dsv4_jax.bench.cache_cases import append_cases, flush_cases, gather_cases
from dsv4_jax.bench.cases import Case
from dsv4_jax.bench.indexer_cases import indexer_cases
from dsv4_jax.bench.tables import LiveTable
from dsv4_jax.bench.weight_cases import experts_cases, hyper_connections_cases, linear_cases, router_cases
from dsv4_jax.cache import CacheSchema
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import KVFormat
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


# Names of `dsv4-jax bench ops` -> (schema, small) -> cases. The schema gives model and format, its sizes do not matter;
# if `small`, the shapes are small enough for a CPU.
CASES: dict[str, Callable[[CacheSchema, bool], Iterator[Case]]] = dict(
    append=append_cases,
    flush=flush_cases,
    gather=gather_cases,
    indexer=indexer_cases,
    attention=attention_cases,
    linear=linear_cases,
    experts=experts_cases,
    hyper_connections=hyper_connections_cases,
    router=router_cases,
)

# Patterns of the cases that `dsv4-jax bench layer` times: weights as released, calls of a decode step, products of a
# prefill. An op without a pattern belongs to a layer with all its cases.
LAYER_CASES = dict(
    append=r"norm_rope.*heads",
    flush="all close",
    indexer=r"query|scores \+ top-k",
    attention=r"\d$",
    linear="FP8",
    gather="$^",  # none
)

COLUMNS = {
    "op": "{op}",
    "shape": "{shape}",
    "by": "{implementation}",
    "us": "{microseconds:.2f}",
    "floor us": "{floor_microseconds:.2f}",
    "% of roof": "{percent_of_roofline:.0f}",
    "bytes": "{bytes}",
    "GB/s": "{gigabytes_per_second:.0f}",
    "TFLOP/s": "{teraflops:.1f}",
    "% of copy": "{percent_of_copy:.0f}",
    "XLA us": "{xla_microseconds:.2f}",
    "x XLA": "{times_xla:.2f}",
}


def run(
    config: DSV4Config,
    kv_format: KVFormat,
    names: Sequence[str],
    report: dict[str, Any],
    *,
    only: Sequence[str],
    calls: int,
    patterns: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Times every case of the named ops, prints a line for each as it comes, and yields its result.

    Only cases whose op or shape contains one of the texts `only`, and matches the regular expression of the op's name
    in `patterns`, are timed, with `calls` calls each, without a GPU at most 4. The clock and the rates of a copy, a
    read and a matrix product are added to the report.
    """
    gpu = jax.default_backend() == "gpu"
    report["clock"] = "kernel time, CUPTI, median" if gpu else "wall clock, median"
    copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    read = report["read_bytes_per_second"] = timing.read_bandwidth()
    matmul = report["matmul_operations_per_second"] = timing.matmul_rate()
    print(
        f"{report['device']}, jax {report['jax']}; {report['clock']}. Copying reaches "
        f"{copy / 1e9:,.0f} GB/s, reads and writes counted; reading alone {read / 1e9:,.0f}; a bfloat16 matrix "
        f"product {matmul / 1e12:,.1f} TFLOP/s.\n"
        f"V4-{report['shapes'].capitalize()} shapes, format {report['cache_format']}\n"
    )
    lines = LiveTable(COLUMNS, op=-24, shape=-22, by=-10)
    schema = CacheSchema(config, num_blocks=0, max_requests=1, max_context=1, kv_format=kv_format)
    for name in dict.fromkeys(names):
        for case in CASES[name](schema, not gpu):
            label = f"{case.op} {case.shape}"
            if (only and not any(text in label for text in only)) or not re.search(patterns.get(name, ""), label):
                continue
            row = _measure(case, calls if gpu else min(calls, 4), copy, read, matmul)
            lines.add(row)
            yield row


def _measure(case: Case, calls: int, copy: float, read: float, matmul: float) -> dict[str, Any]:
    state, inputs = timing.build(case, calls)
    kernel = why_no_mosaic_gpu() is None and timing.kernel_is_right(case, state, inputs[0])
    state, xla = timing.median_seconds(case, "xla", state, inputs[: case.xla_calls])
    seconds = timing.median_seconds(case, "mosaic_gpu", state, inputs)[1] if kernel else xla
    rate = case.nbytes / seconds
    floor = max(case.nbytes / (read if case.reads else copy), case.flops / matmul)
    return dict(
        op=case.op,
        shape=case.shape,
        implementation="mosaic_gpu" if kernel else "xla",
        microseconds=seconds * 1e6,
        bytes=case.nbytes,
        gigabytes_per_second=rate / 1e9,
        percent_of_copy=100 * rate / copy,
        operations=case.flops,
        teraflops=case.flops / seconds / 1e12,
        floor_microseconds=floor * 1e6,
        percent_of_roofline=100 * floor / seconds,
        xla_microseconds=xla * 1e6,
        times_xla=xla / seconds,
    )
