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
from jax import lax
from jax.profiler import ProfileData

from dsv4_jax.bench.cases import Case


def kernel_is_right(case: Case, layer: tuple, inputs: tuple) -> bool:
    """Returns whether the op has a kernel for this case, after comparing its result with XLA's.

    Raises:
      RuntimeError: the results differ in a bit, or by more than the case's `agree` allows.
    """

    def result(implementation):
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
    """Returns the median seconds of a call. Updated states of layers, whose old ones are donated, replace them."""
    function = _jitted(case, implementation)

    def call(i):
        layer = i % len(layers)
        result = function(*layers[layer], *inputs[i])
        if case.updates:
            layers[layer] = (result, *layers[layer][1:])
        return result

    jax.block_until_ready(call(-1))  # compiles
    return statistics.median(_seconds(call, len(inputs)))


def copy_bandwidth() -> float:
    """Measures the bytes a second, read and written, of a copy of an array that is larger than any cache."""
    # Twice 128 MiB: experts in pages leave little memory.
    x = jnp.ones((1 << (25 if _on_gpu() else 24),), jnp.float32)
    return 2 * x.nbytes / _median_of(jnp.negative, x)


def read_bandwidth() -> float:
    """Measures the bytes a second of reading an array that is larger than any cache."""
    x = jnp.ones((1 << (28 if _on_gpu() else 24),), jnp.int32)
    return x.nbytes / _median_of(jnp.max, x)


def matmul_rate() -> float:
    """Measures the operations a second of a large bfloat16 matrix product by XLA."""
    size = 8192 if _on_gpu() else 512
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / _median_of(lambda x: x @ x, x)


def process_seconds() -> float:
    """Returns the seconds since this process started. Linux only."""
    # The start is counted in ticks since boot.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def kernels(calls: Callable[[], Any]) -> list[tuple[str, float]]:
    """Returns (name, milliseconds) of every kernel that `calls` runs, in order, starting with a cold L2 cache.

    Where kernels overlap, the time counts for the first one, so that the sum is the time in which any kernel runs.
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
        planes = [plane for plane in ProfileData.from_file(str(path)).planes if plane.name.startswith("/device:GPU")]
        devices = [[event for line in plane.lines for event in line.events] for plane in planes]
    launches = []
    for events in devices:
        spans = [(x.start_ns, x.start_ns + x.duration_ns, x.name) for x in events if not x.name.startswith("Mem")]
        launches += without_overlaps(sorted(spans))
    return launches[1:]


def without_overlaps(spans: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Returns (name, milliseconds) of kernels (start, end, name), in ns and sorted by start, without their overlaps."""
    launches = []
    last = 0.0
    for start, end, name in spans:
        launches.append((name, max(end - max(start, last), 0.0) / 1e6))
        last = max(last, end)
    return launches


def _on_gpu():
    return jax.default_backend() == "gpu"


def _median_of(function, x):
    """Measures the median seconds of a call of a function, compiled."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(x))
    return statistics.median(_seconds(lambda _: compiled(x), 10 if _on_gpu() else 5))


def _seconds(call, count):
    """Measures the seconds of each of `count` calls: the sum of its kernels on a GPU, by the wall clock elsewhere."""
    wall = []

    def calls():
        for i in range(count):
            begin = time.perf_counter()
            jax.block_until_ready(call(i))
            wall.append(time.perf_counter() - begin)

    if not _on_gpu():
        calls()
        return wall
    times = [milliseconds / 1e3 for _, milliseconds in kernels(calls)]
    if len(times) % count:
        raise RuntimeError(f"{len(times)} kernels in {count} equal calls")
    size = len(times) // count
    return [sum(times[i * size : (i + 1) * size]) for i in range(count)]


@functools.cache
def _evict():
    """Returns a function that fills the L2 cache with other data, in one kernel."""
    x = jnp.zeros((1 << 25,), jnp.float32)
    negative = jax.jit(jnp.negative)
    return lambda: negative(x).block_until_ready()


@functools.cache
def _jitted(case, implementation):
    """Returns the compiled call, which the check and the timing share."""
    call = functools.partial(case.call, implementation=implementation)
    return jax.jit(call, donate_argnums=(0,) if case.updates else ())


@jax.jit
def _same_bits(a, b):
    def bits(x):
        return x if x.dtype == bool else lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))

    return jnp.all(bits(a) == bits(b))
