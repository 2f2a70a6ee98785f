"""`dsv4-jax bench ops`: times of single ops, compared with their XLA versions."""

import re
from collections.abc import Iterable, Iterator, Sequence

import jax

from dsv4_jax.bench import timing
from dsv4_jax.bench.cache_cases import append_cases, attention_cases, flush_cases, gather_cases
from dsv4_jax.bench.cases import Case
from dsv4_jax.bench.indexer_cases import indexer_cases
from dsv4_jax.bench.tables import Row, model_title, print_rows
from dsv4_jax.bench.weight_cases import experts_cases, hyper_connections_cases, linear_cases, router_cases
from dsv4_jax.cache import CacheSchema
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import packaged_checkpoint, read_config
from pallas_kernels.runtime.hardware import why_no_mosaic_gpu


# `CASES` maps the name of an op in `dsv4-jax bench ops` to the function that yields the op's cases. The function takes
# a schema with the model's configuration and the cache's format, and ignores the schema's sizes.
CASES = {
    "append": append_cases,
    "flush": flush_cases,
    "gather": gather_cases,
    "indexer": indexer_cases,
    "attention": attention_cases,
    "linear": linear_cases,
    "experts": experts_cases,
    "hyper_connections": hyper_connections_cases,
    "router": router_cases,
}
# Without a GPU, cases of these ops use the packaged model's configuration in place of the given one, if both have the
# same KV format and the given one has the larger hidden size.
_READ_WEIGHTS = "linear", "experts", "hyper_connections", "router"
_MAX_CPU_BYTES = 1 << 25  # maximum bytes of a call, and of a layer, in cases that are measured without a GPU

# `COLUMNS` maps the title of each printed column to the format of its cells, with names of a result's fields in braces.
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


def chosen_cases(config: DSV4Config, kv_format: str, names: Sequence[str], only: Sequence[str] = ()) -> Iterator[Case]:
    """Yields the cases to measure.

    Without a GPU, large cases are left out, and of several cases whose labels differ only in numbers only the first is
    measured.

    Args:
      config: configuration of the model.
      kv_format: name of the storage format of the cache's rows.
      names: names of ops, keys of `CASES`.
      only: texts. Only cases whose label, "OP SHAPE", contains one of them are measured. Empty for all cases.
    """
    on_gpu = jax.default_backend() == "gpu"
    seen_kinds = set()
    packaged = read_config(packaged_checkpoint())
    is_large = not on_gpu and config.kv_format == packaged.kv_format and config.hidden_size > packaged.hidden_size
    for name in dict.fromkeys(names):
        case_config = packaged if is_large and name in _READ_WEIGHTS else config
        schema = CacheSchema(case_config, num_blocks=0, max_requests=1, max_context=1, kv_format=kv_format)
        for case in CASES[name](schema):
            label = f"{case.op} {case.shape}"
            if only and not any(text in label for text in only):
                continue
            kind = re.sub(r"\d+", "", label)
            if on_gpu or (kind not in seen_kinds and max(case.nbytes, case.layer_bytes) <= _MAX_CPU_BYTES):
                seen_kinds.add(kind)
                yield case


def run(cases: Iterable[Case], report: Row, calls: int) -> Iterator[Row]:
    """Times cases one after the other; prints and yields the result of each.

    Args:
      cases: the cases.
      report: the report that the results belong to. The clock, and the rates of a copy, a read and a matrix product are
        added to it.
      calls: number of timed calls of a case; at most 4 without a GPU.
    """
    on_gpu = jax.default_backend() == "gpu"
    report["clock"] = "kernel time, CUPTI, median" if on_gpu else "wall clock, median"
    copy_rate = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    read_rate = report["read_bytes_per_second"] = timing.read_bandwidth()
    matmul_rate = report["matmul_operations_per_second"] = timing.matmul_rate()
    print(
        f"{report['device']}, jax {report['jax']}; {report['clock']}. Copying reaches "
        f"{copy_rate / 1e9:,.0f} GB/s, reads and writes counted; reading alone {read_rate / 1e9:,.0f}; a bfloat16 "
        f"matrix product {matmul_rate / 1e12:,.1f} TFLOP/s.\n"
        f"{model_title(report['shapes'])} shapes, format {report['cache_format']}\n"
    )
    rows = (_measure(case, calls if on_gpu else min(calls, 4), copy_rate, read_rate, matmul_rate) for case in cases)
    yield from print_rows(rows, COLUMNS, op=-24, shape=-22, by=-10)


def _measure(case, calls, copy, read, matmul):
    """Returns a case's result. `copy` and `read` are bytes a second, `matmul` is operations a second."""
    layers, inputs = case.make(calls)
    has_kernel = why_no_mosaic_gpu() is None and timing.check_kernel(case, layers[0], inputs[0])
    xla_seconds = timing.median_seconds(case, "xla", layers, inputs[: case.xla_calls])
    seconds = timing.median_seconds(case, "mosaic_gpu", layers, inputs) if has_kernel else xla_seconds
    rate = case.nbytes / seconds
    floor = max(case.nbytes / (read if case.reads else copy), case.flops / matmul)
    return {
        "op": case.op,
        "shape": case.shape,
        "implementation": "mosaic_gpu" if has_kernel else "xla",
        "microseconds": seconds * 1e6,
        "bytes": case.nbytes,
        "gigabytes_per_second": rate / 1e9,
        "percent_of_copy": 100 * rate / copy,
        "operations": case.flops,
        "teraflops": case.flops / seconds / 1e12,
        "floor_microseconds": floor * 1e6,
        "percent_of_roofline": 100 * floor / seconds,
        "xla_microseconds": xla_seconds * 1e6,
        "times_xla": xla_seconds / seconds,
    }
