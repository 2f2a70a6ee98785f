"""The timing of `dsv4-jax bench all_reduce`: sums over the devices of a mesh, beside XLA's."""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax import ops
from dsv4_jax.bench.tables import LiveTable
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


def run(width: int, mesh: Mesh, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times all-reduces of [T, width] bfloat16; prints and yields a result for each T.

    A program makes many calls in a loop on the devices, each on the result of the one before. The time of the same
    loop without the calls is subtracted. First the result is compared, bit for bit, with the sum in the order of the
    devices, and between devices.

    Raises:
      RuntimeError: a result is wrong; times would mean nothing.
    """
    report["clock"] = "wall clock of a loop on the devices, less that without sums, median"
    devices = mesh.shape[MODEL_AXIS]
    table = make_mailboxes(mesh)
    names = ["xla"] if table is None else ["mosaic_gpu", "xla"]
    print(f"{report['device']} x {devices}, jax {report['jax']}; {report['clock']}.\n")
    lines = LiveTable(COLUMNS, shape=-12, by=-10)
    for tokens in TOKENS:
        x = np.random.default_rng(tokens).normal(size=(devices, tokens, width)).astype(jnp.bfloat16)
        shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec(MODEL_AXIS)))
        seconds = {name: _seconds(name, shards, table, mesh) for name in [*names, None]}
        net = {name: 1e6 * (seconds[name] - seconds[None]) for name in names}
        row = dict(op="all_reduce", shape=f"[{tokens}, {width}]", implementation=names[0], devices=devices)
        row |= dict(microseconds=net[names[0]], xla_microseconds=net["xla"])
        row |= dict(times_xla=net["xla"] / net[names[0]], loop_microseconds=1e6 * seconds[names[0]])
        lines.add(row)
        yield row


def _seconds(name, shards, table, mesh):
    """Returns the seconds of an iteration with a call of an implementation; None: without a call."""
    if name is not None:
        _check(name, shards, np.asarray(_summed(shards, table, name=name, mesh=mesh)))
    call = functools.partial(_loop, shards, table, name=name, mesh=mesh)
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (UNROLLED * ITERATIONS)


def _check(name, shards, got):
    want = functools.reduce(np.add, np.asarray(shards).astype(np.float32)).astype(got.dtype)
    if any(shard.tobytes() != got[0].tobytes() for shard in got):
        raise RuntimeError(f"all_reduce by {name}: devices have different results")
    # XLA chooses the order of a sum, so it may round to the next value.
    if not np.allclose(got[0].astype(np.float32), want.astype(np.float32), rtol=2**-7 if name == "xla" else 0, atol=0):
        raise RuntimeError(f"all_reduce by {name}: the result is not the sum")


def _sharded(function, shards, table, mesh):
    """Maps a function over each device's [T, width] values."""

    def local(x, table):
        with ops.with_mailboxes(table):
            return function(x[0])[None]

    sharded = PartitionSpec(MODEL_AXIS)
    specs = sharded, None if table is None else mailbox_sharding(mesh).spec
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=sharded, check_vma=False)(shards, table)


@functools.partial(jax.jit, static_argnames=("name", "mesh"))
def _summed(shards, table, *, name, mesh):
    return _sharded(functools.partial(ops.all_reduce, implementation=name), shards, table, mesh)


@functools.partial(jax.jit, static_argnames=("name", "mesh"))
def _loop(shards, table, *, name, mesh):
    def iteration(_, x):
        for _ in range(UNROLLED):
            total = x if name is None else ops.all_reduce(x, implementation=name)
            x = lax.optimization_barrier(total * jnp.asarray(0.5, total.dtype))
        return x

    return _sharded(functools.partial(lax.fori_loop, 0, ITERATIONS, iteration), shards, table, mesh)
