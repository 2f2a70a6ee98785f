"""`dsv4-jax bench`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro


if TYPE_CHECKING:
    from dsv4_jax.cli.bench_cases import Case

Op = Literal["append", "flush", "gather"]
OPS: tuple[Op, ...] = ("append", "flush", "gather")


@dataclasses.dataclass(frozen=True)
class Bench:
    """Times the cache's operations on this device, beside XLA's version of each.

    Every call has inputs of its own that no cache holds. On a GPU: the median over calls of the summed times of all
    kernels of a call, from the profiler; results are compared with XLA's, byte by byte, before they are timed. On a
    CPU: wall-clock time of XLA's version at small shapes.

    For example:
      dsv4-jax bench
      dsv4-jax bench append gather --shapes flash --json h100.json

    Attributes:
      ops: which operations; all by default.
      shapes: of which model.
      cache_format: what the cache's bytes mean.
      calls: calls a median is taken over.
      out: also write the results to this file.
    """

    ops: tyro.conf.Positional[tuple[Op, ...]] = OPS
    shapes: Literal["flash", "pro"] = "flash"
    cache_format: Literal["v4", "per_entry"] = "v4"
    calls: int = 32
    out: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")] = None

    def run(self) -> None:
        """Runs the command; raises ValueError where the user has to change something."""
        import jax

        from dsv4_jax.cli import bench_cases, timing
        from dsv4_jax.cli.common import check_positive
        from dsv4_jax.config import DSV4Config
        from dsv4_jax.quant import kv_format

        check_positive(calls=self.calls)
        config = DSV4Config.v4_flash() if self.shapes == "flash" else DSV4Config.v4_pro()
        gpu = jax.default_backend() == "gpu"
        calls = self.calls if gpu else min(self.calls, 4)
        copy = timing.copy_bandwidth()
        report: dict[str, Any] = dict(
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            clock="kernel time, CUPTI, median" if gpu else "wall clock, median",
            shapes=self.shapes,
            cache_format=self.cache_format,
            copy_bytes_per_second=copy,
            results=[],
        )
        _print_header(report)
        for op in dict.fromkeys(self.ops):
            for case in bench_cases.cases(op, config, kv_format(self.cache_format), small=not gpu):
                report["results"].append(_measure(case, calls, copy))
                _print_row(report["results"][-1])
        if self.out is not None:
            self.out.write_text(json.dumps(report, indent=1) + "\n")


def _measure(case: "Case", calls: int, copy: float) -> dict[str, Any]:
    from dsv4_jax.cli import timing
    from dsv4_jax.ops.dispatch import why_no_mosaic_gpu

    state, inputs = timing.build(case, calls)
    kernel = why_no_mosaic_gpu() is None and timing.kernel_is_right(case, state, inputs[0])
    state, xla = timing.median_seconds(case, "xla", state, inputs)
    seconds = timing.median_seconds(case, "mosaic_gpu", state, inputs)[1] if kernel else xla
    rate = case.nbytes / seconds
    return dict(
        op=case.op,
        shape=case.shape,
        implementation="mosaic_gpu" if kernel else "xla",
        microseconds=round(seconds * 1e6, 3),
        bytes=case.nbytes,
        gigabytes_per_second=round(rate / 1e9, 1),
        percent_of_copy=round(100 * rate / copy, 1),
        xla_microseconds=round(xla * 1e6, 3),
        times_xla=round(xla / seconds, 2),
    )


_COLUMNS = ("op", "shape", "by", "us", "bytes", "GB/s", "% of copy", "XLA us", "x XLA")
_LINE = "{:<24} {:<16} {:<10} {:>9} {:>11} {:>5} {:>9} {:>9} {:>5}"


def _print_header(report: dict[str, Any]) -> None:
    print(
        f"{report['device']}, jax {report['jax']}; {report['clock']}. Copying reaches "
        f"{report['copy_bytes_per_second'] / 1e9:,.0f} GB/s, reads and writes counted.\n"
        f"V4-{report['shapes'].capitalize()} shapes, format {report['cache_format']}\n\n{_LINE.format(*_COLUMNS)}"
    )


def _print_row(row: dict[str, Any]) -> None:
    # Every line at once: a run takes minutes.
    print(
        _LINE.format(
            row["op"],
            row["shape"],
            row["implementation"],
            f"{row['microseconds']:.2f}",
            row["bytes"],
            f"{row['gigabytes_per_second']:.0f}",
            f"{row['percent_of_copy']:.0f}",
            f"{row['xla_microseconds']:.2f}",
            f"{row['times_xla']:.2f}",
        ),
        flush=True,
    )
