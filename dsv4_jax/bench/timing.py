"""Measures times: kernel time on a GPU, wall-clock time elsewhere."""

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from dsv4_jax.bench.cases import Case


def check_kernel(case: Case, layer: tuple, inputs: tuple) -> bool:
    """Checks the op's kernel for this case against XLA. Returns False, without a check, if the op has no kernel for it.

    Args:
      case: the case.
      layer: arrays of a layer.
      inputs: inputs of a call.

    Raises:
      RuntimeError: the results differ in a bit, or by more than the case's `agree` allows.
    """

    def result(implementation):
        """Returns the result of an implementation."""
        copied = jax.tree.map(jnp.copy, layer) if case.updates else layer
        return _jitted(case, implementation)(*copied, *inputs)

    try:
        output = result("mosaic_gpu")
    except NotImplementedError:
        return False
    agree = _same_bits if case.agree is None else jax.jit(case.agree)
    if not all(jax.tree.leaves(jax.tree.map(agree, output, result("xla")))):
        raise RuntimeError(f"{case.op} {case.shape}: the kernel's result differs from XLA's; times would mean nothing")
    return True


def median_seconds(case: Case, implementation: str, layers: list[tuple], inputs: list[tuple]) -> float:
    """Measures the median seconds of a call.

    Args:
      case: the case.
      implementation: "xla" or "mosaic_gpu".
      layers: the arrays of each layer. If `case.updates` is True, each call donates a layer's first item and replaces
        it in this list by the result.
      inputs: inputs of each call.
    """
    function = _jitted(case, implementation)

    def call(i):
        """Runs call i, with its inputs and its layer."""
        layer = i % len(layers)
        result = function(*layers[layer], *inputs[i])
        if case.updates:
            layers[layer] = (result, *layers[layer][1:])
        return result

    return _median(call, len(inputs))


def copy_bandwidth() -> float:
    """Measures the bytes a second, read plus written, of copying an array that is larger than the L2 cache."""
    # On a GPU, the array and its copy have only 128 MiB each, because placed experts leave little memory.
    x = jnp.ones((1 << (25 if _on_gpu() else 24),), jnp.float32)
    return 2 * x.nbytes / _median_of(jnp.negative, x)


def read_bandwidth() -> float:
    """Measures the bytes a second of reading an array that is larger than the L2 cache."""
    x = jnp.ones((1 << (28 if _on_gpu() else 24),), jnp.int32)
    return x.nbytes / _median_of(jnp.max, x)


def matmul_rate() -> float:
    """Measures the floating-point operations a second of a large bfloat16 matrix product by XLA."""
    size = 8192 if _on_gpu() else 512
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / _median_of(lambda x: x @ x, x)


def wall_seconds(function: Callable[..., Any], *args: Any) -> float:
    """Measures the wall-clock seconds of a call, until its result is computed."""
    begin = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - begin


def process_seconds() -> float:
    """Returns the seconds since this process started. Works on Linux only."""
    # Linux gives the start of the process in clock ticks since boot.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def kernels(calls: Callable[[], Any]) -> list[tuple[str, float]]:
    """Runs `calls` with a cold L2 cache; returns (name, milliseconds) of each kernel, GPU by GPU in order of start.

    While kernels of a GPU overlap, the time counts only for the kernel that started first. The sum over a GPU's kernels
    is therefore the time in which at least one of them runs.
    """
    evict = _evict()
    evict()
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            evict()
            calls()
        (path,) = Path(folder).rglob("*.xplane.pb")
        launches = []
        for plane in ProfileData.from_file(str(path)).planes:
            if plane.name.startswith("/device:GPU"):
                spans = sorted(
                    (event.start_ns, event.start_ns + event.duration_ns, event.name)
                    for line in plane.lines
                    for event in line.events
                    if not event.name.startswith("Mem")
                )
                launches += without_overlaps(spans)
    return launches[1:]  # without the kernel of `evict`


def without_overlaps(spans: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Returns (name, milliseconds) of each kernel, without the time in which the kernel overlaps an earlier one.

    Args:
      spans: (start, end, name) of each kernel, in nanoseconds, sorted by start.
    """
    launches = []
    last_end = 0.0
    for start, end, name in spans:
        launches.append((name, max(end - max(start, last_end), 0.0) / 1e6))
        last_end = max(last_end, end)
    return launches


def _on_gpu():
    return jax.default_backend() == "gpu"


def _median_of(function, x):
    """Compiles a function of one array and measures the median seconds of a call."""
    compiled = jax.jit(function)
    return _median(lambda _: compiled(x), 10 if _on_gpu() else 5)


def _median(call, count):
    """Measures the median seconds of the calls `call(0)` .. `call(count - 1)`, after `call(-1)`, which compiles.

    On a GPU the seconds are the sum of the times of a call's kernels, elsewhere wall-clock time. Raises RuntimeError if
    the number of kernels is not a multiple of `count`.
    """

    def calls():
        """Runs all calls. Returns the wall-clock seconds of each."""
        return [wall_seconds(call, i) for i in range(count)]

    jax.block_until_ready(call(-1))
    if not _on_gpu():
        return statistics.median(calls())
    times = [milliseconds / 1e3 for _, milliseconds in kernels(calls)]
    if len(times) % count:
        raise RuntimeError(f"{len(times)} kernels in {count} equal calls")
    return float(np.median(np.reshape(times, (count, -1)).sum(axis=1)))


@functools.cache
def _evict():
    """Returns a function that evicts all data from the L2 cache: one kernel reads 128 MiB and writes 128 MiB."""
    x = jnp.zeros((1 << 25,), jnp.float32)
    negative = jax.jit(jnp.negative)
    return lambda: negative(x).block_until_ready()


@functools.cache
def _jitted(case, implementation):
    """Returns the case's call as a jitted function. The check and the timing share it, so it is compiled once."""
    call = functools.partial(case.call, implementation=implementation)
    return jax.jit(call, donate_argnums=(0,) if case.updates else ())


@jax.jit
def _same_bits(a, b):
    bits = f"uint{8 * a.dtype.itemsize}"
    return jnp.array_equal(a.view(bits), b.view(bits))
