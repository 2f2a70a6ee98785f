"""`dsv4-jax bench all_reduce`: times of sums over the devices of a mesh, compared with XLA's all-reduce."""

import functools
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax import ops
from dsv4_jax.bench.tables import Row, print_rows
from dsv4_jax.bench.timing import wall_seconds
from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes


TOKENS = 1, 8, 32, 128
UNROLLED = 20  # number of all-reduces in an iteration of the timed loop
ITERATIONS = 50  # number of iterations of the timed loop
REPEATS = 5  # number of runs of the loop, whose median time is reported
# `COLUMNS` maps the title of each printed column to the format of its cells, with names of a result's fields in braces.
COLUMNS = {
    "shape": "{shape}",
    "by": "{implementation}",
    "us": "{microseconds:.2f}",
    "XLA us": "{xla_microseconds:.2f}",
    "x XLA": "{times_xla:.2f}",
}


def run(width: int, mesh: Mesh, report: Row) -> Iterator[Row]:
    """Times all-reduces of [T, width] bfloat16; prints and yields a result for each T of `TOKENS`.

    First the results are checked: on all devices they must be the sum in the order of the devices, rounded once. Then a
    loop on the devices is timed, in which each all-reduce adds up the result of the previous one. The time of the same
    loop without all-reduces is subtracted.

    Args:
      width: number of values of a token.
      mesh: the devices; arrays are added up over its axis "model".
      report: the report that the results belong to. The clock is added to it.

    Raises:
      RuntimeError: a result is wrong, so that times would mean nothing.
    """
    report["clock"] = "wall clock of a loop on the devices, less that without sums, median"
    mailboxes = make_mailboxes(mesh)
    print(f"{report['device']} x {mesh.shape[MODEL_AXIS]}, jax {report['jax']}; {report['clock']}.\n")
    rows = (_measure(tokens, width, mesh, mailboxes) for tokens in TOKENS)
    yield from print_rows(rows, COLUMNS, shape=-12, by=-10)


def _measure(tokens, width, mesh, mailboxes):
    """Checks and times the all-reduces of [tokens, width] values. Returns the result."""
    devices = mesh.shape[MODEL_AXIS]
    best = "xla" if mailboxes is None else "mosaic_gpu"
    x = np.random.default_rng(tokens).normal(size=(devices, tokens, width)).astype(jnp.bfloat16)
    shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec(MODEL_AXIS)))
    sums = {name: functools.partial(ops.all_reduce, implementation=name) for name in dict.fromkeys([best, "xla"])}
    for name, all_reduce in sums.items():
        _check_sum(name, shards, _on_devices(all_reduce, mesh, mailboxes)(shards))
    seconds = {name: _loop_seconds(call, shards, mesh, mailboxes) for name, call in sums.items()}
    empty_loop_seconds = _loop_seconds(lambda x: x, shards, mesh, mailboxes)
    microseconds = {name: 1e6 * (total - empty_loop_seconds) for name, total in seconds.items()}
    return {
        "op": "all_reduce",
        "shape": f"[{tokens}, {width}]",
        "implementation": best,
        "devices": devices,
        "microseconds": microseconds[best],
        "xla_microseconds": microseconds["xla"],
        "times_xla": microseconds["xla"] / microseconds[best],
    }


def _on_devices(function, mesh, mailboxes):
    """Returns a compiled function of [devices, T, width] shards that applies `function` to the shard of each device.

    The result of the compiled function has the shape [devices, T, width], too.
    """

    def local(x, mailboxes):
        with ops.with_mailboxes(mailboxes):
            return function(x[0])[None]

    sharded = PartitionSpec(MODEL_AXIS)
    specs = sharded, None if mailboxes is None else mailbox_sharding(mesh).spec
    compiled = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=sharded, check_vma=False))
    return lambda shards: compiled(shards, mailboxes)


def _loop_seconds(call, shards, mesh, mailboxes):
    """Measures the seconds of one call in a loop on the devices. Each call gets half of the previous call's result."""

    def iteration(_, x):
        """Runs the all-reduces of one iteration."""
        for _ in range(UNROLLED):
            total = call(x)
            x = lax.optimization_barrier(total * jnp.asarray(0.5, total.dtype))
        return x

    loop = _on_devices(functools.partial(lax.fori_loop, 0, ITERATIONS, iteration), mesh, mailboxes)
    jax.block_until_ready(loop(shards))  # the first run compiles
    seconds = [wall_seconds(loop, shards) for _ in range(REPEATS)]
    return statistics.median(seconds) / (UNROLLED * ITERATIONS)


def _check_sum(name, shards, result):
    """Raises RuntimeError unless the results of all devices have the same bits and are the sum of the shards.

    Args:
      name: implementation of the all-reduce, "xla" or "mosaic_gpu".
      shards: [devices, T, width] the summand of each device.
      result: [devices, T, width] the result of each device.
    """
    result = np.asarray(result)
    total = functools.reduce(np.add, np.asarray(shards).astype(np.float32)).astype(result.dtype)
    if any(shard.tobytes() != result[0].tobytes() for shard in result):
        raise RuntimeError(f"all_reduce by {name}: devices have different results")
    if result[0].tobytes() != total.tobytes():
        raise RuntimeError(f"all_reduce by {name}: the result is not the sum")
