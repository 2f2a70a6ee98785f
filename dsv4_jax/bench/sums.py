"""`dsv4-jax bench all_reduce`: sums over the devices of a mesh, beside XLA's."""

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
from dsv4_jax.mesh_axes import MODEL_AXIS
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes


TOKENS = 1, 8, 32, 128
UNROLLED, ITERATIONS, REPEATS = 20, 50, 5


def run(width: int, mesh: Mesh, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Times sums of [T, width] bfloat16 in a loop on the devices, prints and yields a result for each T.

    A time is that of a call among many in one program, each on the result of the one before, less what the same loop
    takes without the sums. Before it is timed, a result is compared: bit for bit with the sum in the devices' order,
    and between devices.

    Raises:
      RuntimeError: a result is wrong; times would mean nothing.
    """
    report["clock"] = "wall clock of a loop on the devices, less that without sums, median"
    devices, table = mesh.shape[MODEL_AXIS], make_mailboxes(mesh)
    names = ["xla"] if table is None else ["mosaic_gpu", "xla"]
    print(f"{report['device']} x {devices}, jax {report['jax']}; {report['clock']}.\n")
    print(f"{'shape':<12} {'by':<10} {'us':>8} {'XLA us':>8} {'x XLA':>6}")
    for tokens in TOKENS:
        x = np.random.default_rng(tokens).normal(size=(devices, tokens, width)).astype(jnp.bfloat16)
        parts = jax.device_put(x, NamedSharding(mesh, PartitionSpec(MODEL_AXIS)))
        seconds = {name: _seconds(name, parts, table, mesh) for name in [*names, None]}
        net = {name: 1e6 * (seconds[name] - seconds[None]) for name in names}
        row = dict(op="all_reduce", shape=f"[{tokens}, {width}]", implementation=names[0], devices=devices)
        row |= dict(microseconds=round(net[names[0]], 2), xla_microseconds=round(net["xla"], 2))
        row |= dict(times_xla=round(net["xla"] / net[names[0]], 2), loop_microseconds=round(1e6 * seconds[names[0]], 2))
        print(
            "{shape:<12} {implementation:<10} {microseconds:>8.2f} {xla_microseconds:>8.2f} {times_xla:>6.2f}".format(
                **row
            ),
            flush=True,
        )
        yield row


def _seconds(name, parts, table, mesh):
    """Of one call of an implementation, with what else the loop does; None = without a sum."""
    if name is not None:
        _check(name, parts, np.asarray(_summed(parts, table, name=name, mesh=mesh)))
    call = functools.partial(_loop, parts, table, name=name, mesh=mesh)
    jax.block_until_ready(call())
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (UNROLLED * ITERATIONS)


def _check(name, parts, got):
    want = functools.reduce(np.add, np.asarray(parts).astype(np.float32)).astype(got.dtype)
    if any(part.tobytes() != got[0].tobytes() for part in got):
        raise RuntimeError(f"all_reduce by {name}: devices have different results")
    # XLA adds up in an order of its own: a sum may be rounded to the next value.
    if not np.allclose(got[0].astype(np.float32), want.astype(np.float32), rtol=2**-7 if name == "xla" else 0, atol=0):
        raise RuntimeError(f"all_reduce by {name}: the result is not the sum")


def _on_devices(function, parts, table, mesh):
    """The function of each device's values, [devices, T, width] in all."""

    def local(x, table):
        with ops.with_mailboxes(table):
            return function(x[0])[None]

    cut = PartitionSpec(MODEL_AXIS)
    specs = cut, None if table is None else mailbox_sharding(mesh).spec
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)(parts, table)


@functools.partial(jax.jit, static_argnames=("name", "mesh"))
def _summed(parts, table, *, name, mesh):
    return _on_devices(functools.partial(ops.all_reduce, implementation=name), parts, table, mesh)


@functools.partial(jax.jit, static_argnames=("name", "mesh"))
def _loop(parts, table, *, name, mesh):
    def iteration(_, x):
        for _ in range(UNROLLED):
            total = x if name is None else ops.all_reduce(x, implementation=name)
            x = lax.optimization_barrier(total * jnp.asarray(0.5, total.dtype))
        return x

    return _on_devices(functools.partial(lax.fori_loop, 0, ITERATIONS, iteration), parts, table, mesh)
