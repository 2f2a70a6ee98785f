"""The sum through mailboxes: a model of its protocol, compiled for a GPU, and on two GPUs."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes
from pallas_kernels.all_reduce import all_reduce
from pallas_kernels.mgpu.mailbox import (
    BANKS,
    BLOCKS,
    GENERATIONS,
    ROUNDS,
    SLOT_BYTES,
    SLOTS_PER_UNIT,
    counter_offset,
    mailbox_bytes,
    slot_offset,
)
from pallas_kernels.mgpu.mlir import THREADS
from tests.pallas_kernels.kernels import registers


def receive_all(rng, ranks, calls, generations):
    """Values that each rank of one block of threads receives in each call, with stores and reads in random order.

    A rank is a program of single steps; a store arrives some time after it was issued, in any order.
    """
    boxes = [{} for _ in range(ranks)]
    flying = []
    received = [[] for _ in range(ranks)]

    def program(rank):
        for call in range(1, calls + 1):
            for peer in rng.sample(range(ranks), ranks):
                flying.append((peer, (call % generations, rank), (call, f"{rank} in {call}")))
                yield
            got = {}
            while len(got) < ranks:
                source = rng.randrange(ranks)
                number, value = boxes[rank].get((call % generations, source), (0, None))
                if number == call:
                    got[source] = value
                yield
            received[rank].append([got[source] for source in range(ranks)])

    programs = {rank: program(rank) for rank in range(ranks)}
    idle = 0
    while programs and idle < 1000:
        idle += 1
        if flying and rng.random() < 0.3:
            peer, where, content = flying.pop(rng.randrange(len(flying)))
            boxes[peer][where] = content
            idle = 0
        # One rank may be far ahead of the others.
        rank = min(programs) if rng.random() < 0.5 else rng.choice(list(programs))
        before = len(flying), len(received[rank])
        if next(programs[rank], "ended") == "ended":
            del programs[rank]
        idle *= before == (len(flying), len(received[rank]))
    return received


def test_the_protocol_needs_two_generations_and_no_more():
    def lost(ranks, generations, seed):
        calls = 6
        received = receive_all(random.Random(seed), ranks, calls, generations)
        want = [[f"{source} in {call}" for source in range(ranks)] for call in range(1, calls + 1)]
        return any(values != want for values in received)

    seeds = range(60)
    assert not any(lost(ranks, GENERATIONS, seed) for ranks in (2, 3, 4) for seed in seeds)
    # With one, a rank's next value replaces one that another has not read yet, and that waits for ever.
    assert any(lost(2, GENERATIONS - 1, seed) for seed in seeds)


def test_slots_lie_apart_and_within_the_mailbox():
    ranks = 4
    slot = THREADS * SLOT_BYTES
    sizes = GENERATIONS, ranks, ROUNDS, BLOCKS
    starts = {slot_offset(*at, 0, ranks=ranks) for at in np.ndindex(sizes)}
    assert len(starts) == np.prod(sizes)
    ordered = sorted(starts)
    assert {b - a for a, b in zip(ordered, ordered[1:], strict=False)} == {SLOTS_PER_UNIT * slot}
    assert slot_offset(0, 0, 0, 0, 1, ranks=ranks) == SLOT_BYTES
    assert ordered[-1] + SLOTS_PER_UNIT * slot == counter_offset(0, ranks=ranks)
    bank = counter_offset(BLOCKS, ranks=ranks)
    assert bank % SLOT_BYTES == 0
    assert BANKS * bank == mailbox_bytes(ranks)


def test_what_the_kernel_does_not_take_is_refused():
    table = jnp.zeros(8, jnp.uint32)
    with pytest.raises(NotImplementedError, match="takes x as bfloat16.2, 8., got float32.2, 8."):
        all_reduce(jnp.zeros((2, 8)), table)
    with pytest.raises(NotImplementedError, match="a multiple of 8 values up to 524288, got 12"):
        all_reduce(jnp.zeros(12, jnp.bfloat16), table)
    with pytest.raises(NotImplementedError, match="2 to 8 GPUs, got 1"):
        all_reduce(jnp.zeros(8, jnp.bfloat16), table[:6])
    with pytest.raises(NotImplementedError, match="several GPUs: it is not interpreted"):
        all_reduce(jnp.zeros(8, jnp.bfloat16), table, interpret=True)


def test_devices_without_mailboxes_add_up_by_xla():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    assert make_mailboxes(mesh) is None
    cut = jax.P("model")

    def call(x, implementation):
        local = functools.partial(ops.all_reduce, implementation=implementation)
        return jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)(x)

    x = jax.device_put(jnp.ones((2, 8), jnp.bfloat16), jax.NamedSharding(mesh, cut))
    assert np.all(np.asarray(call(x, None)) == 2)
    with ops.use_implementation("mosaic_gpu"):  # as when a program is compiled for GPUs that are not here
        assert np.all(np.asarray(call(x, None)) == 2)
    with pytest.raises(
        NotImplementedError, match="all_reduce cannot run as 'mosaic_gpu': the default backend is 'cpu'"
    ):
        call(x, "mosaic_gpu")


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import jax, jax.numpy as jnp
from pallas_kernels.all_reduce import all_reduce
S = jax.ShapeDtypeStruct
for ranks, tokens in ((2, 1), (4, 32), (8, 128)):
    compile_for_h100(f"{ranks}_{tokens}", all_reduce, S((tokens, 4096), jnp.bfloat16), S((4 + 2 * ranks,), jnp.uint32))
""")
    assert max(used.values()) <= 96, used


@pytest.fixture(scope="module", params=[2, 8])
def mesh(request):
    if len(jax.devices()) < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return jax.make_mesh((request.param,), ("model",), devices=jax.devices()[: request.param])


@functools.partial(jax.jit, static_argnames=("mesh", "times"))
def summed(parts, table, *, mesh, times=1):
    """[devices, T, D]: each device's sum after `times` sums, where all devices share the sum before equally."""

    def local(x, table):
        with ops.with_mailboxes(table):

            def again(_, x):
                return ops.all_reduce(x * jnp.asarray(1 / mesh.size, x.dtype), implementation="mosaic_gpu")

            return jax.lax.fori_loop(0, times - 1, again, ops.all_reduce(x[0], implementation="mosaic_gpu"))[None]

    cut = jax.P("model")
    specs = cut, mailbox_sharding(mesh).spec
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)(parts, table)


def check_sum(mesh, table, tokens, width, seed, times=1):
    x = np.random.default_rng(seed).normal(size=(mesh.size, tokens, width)).astype(jnp.bfloat16)
    parts = jax.device_put(x, jax.NamedSharding(mesh, jax.P("model")))
    got = np.asarray(summed(parts, table, mesh=mesh, times=times))
    want = functools.reduce(np.add, x.astype(np.float32)).astype(jnp.bfloat16)  # in the order of the devices
    assert {part.tobytes() for part in got} == {want.tobytes()}


@pytest.mark.gpu
def test_on_several_gpus(mesh):
    table = make_mailboxes(mesh)
    check_sum(mesh, table, 1, 8, seed=0)
    # Programs of all sizes in turn: blocks that one does not use, counters that differ between blocks.
    for seed, (tokens, width) in enumerate([(1, 4096), (128, 4096), (1, 4096), (8, 4096), (33, 7168), (3, 1024)] * 3):
        check_sum(mesh, table, tokens, width, seed)
    check_sum(mesh, table, 1, 4096, seed=1, times=10_001)
    check_sum(mesh, table, 32, 4096, seed=2, times=1_001)


@pytest.mark.gpu
def test_calls_are_counted_where_they_ran(mesh):
    table = make_mailboxes(mesh)
    check_sum(mesh, table, 2, 4096, seed=0)
    jax.jit(functools.partial(summed.__wrapped__, mesh=mesh)).lower(
        jax.device_put(jnp.ones((mesh.size, 4, 4096), jnp.bfloat16), jax.NamedSharding(mesh, jax.P("model"))), table
    ).compile()  # never runs
    with pytest.raises(TypeError):
        summed(None, table, mesh=mesh)
    # Another table of the same mailboxes, as of a second model, and the devices in another order, with others.
    again = make_mailboxes(mesh)
    turned = jax.make_mesh((mesh.size,), ("model",), devices=mesh.devices[::-1])
    for seed in range(4):
        check_sum(mesh, again, 2, 4096, seed)
        check_sum(turned, make_mailboxes(turned), 2, 4096, seed)
        check_sum(mesh, table, 2, 4096, seed)
    assert np.array_equal(np.asarray(table), np.asarray(again))
