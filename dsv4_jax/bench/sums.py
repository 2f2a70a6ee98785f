"""The timing of `dsv4-jax bench all_reduce`: sums over the devices of a mesh, beside XLA's."""

import functools
import statistics
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax import ops
from dsv4_jax.bench.tables import Row, print_rows
from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes


TOKENS = 1, 8, 32, 128
UNROLLED = 20
ITERATIONS = 50
REPEATS = 5
COLUMNS = {
    "shape": "{shape}",
    "by": "{implementation}",
    "us": "{microseconds:.2f}",
    "XLA us": "{xla_microseconds:.2f}",
    "x XLA": "{times_xla:.2f}",
}


def run(width: int, mesh: Mesh, report: Row) -> Iterator[Row]:
    """Times all-reduces of [T, width] bfloat16; prints and yields a result for each T.

    A program makes many calls in a loop on the devices, each on the result of the one before. The time of the same
    loop without the calls is subtracted. First the result is compared, bit for bit, with the sum in the order of the
    devices, and between devices.

    Raises:
      RuntimeError: a result is wrong; times would mean nothing.
    """
    report["clock"] = "wall clock of a loop on the devices, less that without sums, median"
    mailboxes = make_mailboxes(mesh)
    print(f"{report['device']} x {mesh.shape[MODEL_AXIS]}, jax {report['jax']}; {report['clock']}.\n")
    rows = (_measure(tokens, width, mesh, mailboxes) for tokens in TOKENS)
    yield from print_rows(rows, COLUMNS, shape=-12, by=-10)


def _measure(tokens, width, mesh, mailboxes):
    devices = mesh.shape[MODEL_AXIS]
    best = "xla" if mailboxes is None else "mosaic_gpu"
    x = np.random.default_rng(tokens).normal(size=(devices, tokens, width)).astype(jnp.bfloat16)
    shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec(MODEL_AXIS)))
    sums = {name: functools.partial(ops.all_reduce, implementation=name) for name in dict.fromkeys([best, "xla"])}
    for name, all_reduce in sums.items():
        _check_sum(name, shards, _on_devices(all_reduce, mesh, mailboxes)(shards))
    seconds = {name: _loop_seconds(call, shards, mesh, mailboxes) for name, call in sums.items()}
    without = _loop_seconds(lambda x: x, shards, mesh, mailboxes)
    net = {name: 1e6 * (total - without) for name, total in seconds.items()}
    return {
        "op": "all_reduce",
        "shape": f"[{tokens}, {width}]",
        "implementation": best,
        "devices": devices,
        "microseconds": net[best],
        "xla_microseconds": net["xla"],
        "times_xla": net["xla"] / net[best],
        "loop_microseconds": 1e6 * seconds[best],
    }


def _on_devices(function, mesh, mailboxes):
    """Returns a compiled function of shards [devices, T, width] that maps each device's [T, width]."""

    def local(x, mailboxes):
        with ops.with_mailboxes(mailboxes):
            return function(x[0])[None]

    sharded = PartitionSpec(MODEL_AXIS)
    specs = sharded, None if mailboxes is None else mailbox_sharding(mesh).spec
    compiled = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=sharded, check_vma=False))
    return lambda shards: jax.block_until_ready(compiled(shards, mailboxes))


def _loop_seconds(call, shards, mesh, mailboxes):
    """Measures the seconds of a call among many in a loop on the devices, each on the result of the one before."""

    def iteration(_, x):
        for _ in range(UNROLLED):
            total = call(x)
            x = lax.optimization_barrier(total * jnp.asarray(0.5, total.dtype))
        return x

    loop = _on_devices(functools.partial(lax.fori_loop, 0, ITERATIONS, iteration), mesh, mailboxes)
    loop(shards)  # compiles
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        loop(shards)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / (UNROLLED * ITERATIONS)


def _check_sum(name, shards, result):
    """Raises RuntimeError unless each device's result [devices, T, width] is the sum of the shards."""
    result = np.asarray(result)
    total = functools.reduce(np.add, np.asarray(shards).astype(np.float32)).astype(result.dtype)
    if any(shard.tobytes() != result[0].tobytes() for shard in result):
        raise RuntimeError(f"all_reduce by {name}: devices have different results")
    # XLA chooses the order of a sum, so it may round to the next value.
    rtol = 2**-7 if name == "xla" else 0
    if not np.allclose(result[0].astype(np.float32), total.astype(np.float32), rtol=rtol, atol=0):
        raise RuntimeError(f"all_reduce by {name}: the result is not the sum")
