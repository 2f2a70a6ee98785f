"""Which implementation runs: the best that takes device and arguments, or exactly the named one."""

import logging
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from dsv4_jax.ops import dispatch, use_implementation
from pallas_kernels.runtime.lowering_cache import cached_trace


def refuses(x):
    raise NotImplementedError(f"the kernel takes even numbers, got {x}")


def leaves_to_xla(x):
    raise dispatch.PreferXla("the kernel is for large numbers")


BOTH = {"xla": lambda x: ("xla", x), "mosaic_gpu": lambda x: ("mosaic_gpu", x) if x % 2 == 0 else refuses(x)}
NO_GPU = "the default backend is 'cpu', not an NVIDIA GPU"


@pytest.fixture(params=[None, NO_GPU])
def reason(request, monkeypatch):
    """With a GPU, and without."""
    monkeypatch.setattr(dispatch, "why_no_mosaic_gpu", lambda: request.param)
    return request.param


@pytest.fixture
def with_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "why_no_mosaic_gpu", lambda: None)


@pytest.fixture
def log(caplog):
    """(level, message) of what is logged; nothing was said before."""
    dispatch._report.cache_clear()
    caplog.set_level(logging.DEBUG, "dsv4_jax.ops")
    return lambda: [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "dsv4_jax.ops"
    ]


def test_none_takes_the_best_that_can(reason):
    best = "xla" if reason else "mosaic_gpu"
    assert dispatch.run("op", BOTH, None, 2) == (best, 2)
    # The kernel refuses the arguments: XLA takes them.
    assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)
    assert dispatch.run("op", {"xla": BOTH["xla"]}, None, 2) == ("xla", 2)


def test_a_named_one_runs_or_says_why_not(reason):
    assert dispatch.run("op", BOTH, "xla", 2) == ("xla", 2)
    if reason:
        with pytest.raises(NotImplementedError, match="op cannot run as 'mosaic_gpu': the default backend is 'cpu'"):
            dispatch.run("op", BOTH, "mosaic_gpu", 2)
    else:
        assert dispatch.run("op", BOTH, "mosaic_gpu", 2) == ("mosaic_gpu", 2)
        with pytest.raises(NotImplementedError, match="op cannot run as 'mosaic_gpu': .* takes even numbers, got 3"):
            dispatch.run("op", BOTH, "mosaic_gpu", 3)
    with pytest.raises(
        NotImplementedError, match=r"op has no implementation 'interpret'; it has \['mosaic_gpu', 'xla'"
    ):
        dispatch.run("op", BOTH, "interpret", 2)
    with pytest.raises(ValueError, match="implementation='cuda' is not known; choose None or one of"):
        dispatch.run("op", BOTH, "cuda", 2)


def test_a_context_decides_for_ops_that_have_it(reason):
    with use_implementation("mosaic_gpu"):
        assert dispatch.run("op", BOTH, None, 2) == ("mosaic_gpu", 2)
        assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)
        assert dispatch.run("op", BOTH, "xla", 2) == ("xla", 2)
    with pytest.raises(ValueError, match="implementation='cuda' is not known"), use_implementation("cuda"):
        pass


# A fallback is said once, or is an error.


def test_a_fallback_is_said_once_for_each_reason(with_gpu, log):
    for x in (2, 3, 3, 5, 3):
        dispatch.run("op", BOTH, None, x)
    dispatch.run("other", BOTH, None, 3)
    assert log() == [
        ("INFO", "op runs as 'xla': the kernel takes even numbers, got 3"),
        ("INFO", "op runs as 'xla': the kernel takes even numbers, got 5"),
        ("INFO", "other runs as 'xla': the kernel takes even numbers, got 3"),
    ]


def test_where_there_are_no_kernels_it_is_said_to_who_debugs(monkeypatch, log):
    monkeypatch.setattr(dispatch, "why_no_mosaic_gpu", lambda: NO_GPU)
    for x in (2, 3):
        dispatch.run("op", BOTH, None, x)
    assert log() == [("DEBUG", f"op runs as 'xla': {NO_GPU}")]


def test_a_choice_is_no_fallback(with_gpu, log, monkeypatch):
    """XLA by name, XLA because it is faster, and an op without a kernel: nothing to say, and no error."""
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "1")
    left = BOTH | {"mosaic_gpu": leaves_to_xla}
    assert dispatch.run("op", BOTH, "xla", 3) == dispatch.run("op", left, None, 3) == ("xla", 3)
    assert dispatch.run("op", {"xla": BOTH["xla"]}, None, 3) == ("xla", 3)
    with use_implementation("xla"):
        assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)
    assert log() == []
    with pytest.raises(NotImplementedError, match="op cannot run as 'mosaic_gpu': the kernel is for large numbers"):
        dispatch.run("op", left, "mosaic_gpu", 3)


def test_required_kernels_turn_a_fallback_into_an_error(reason, monkeypatch):
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "1")
    message = reason or "the kernel takes even numbers, got 3"
    with pytest.raises(NotImplementedError, match=f"op would run as 'xla', .*REQUIRE_KERNELS is set: {message}"):
        dispatch.run("op", BOTH, None, 3)
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "0")
    assert dispatch.run("op", BOTH, None, 3) == ("xla", 3)


# The choice is part of the key of jit's cache. The stub's implementations return different numbers.

STUB = {name: partial(lambda number, x: x + number, number) for number, name in enumerate(dispatch.KNOWN)}


def stub(x, implementation=None):
    return dispatch.run("stub", STUB, implementation, x)


def program(x):
    """The stub's results [3] in the body of a loop, in a `cached_trace` function, and bare."""
    once = cached_trace()(lambda x, interpret=False: stub(x))
    looped = jax.lax.while_loop(lambda state: state[0] < 1, lambda state: (state[0] + 1, stub(state[1])), (0, x))[1]
    return jnp.stack([looped, once(x), stub(x)])


def chosen(numbers):
    """Which implementation gave the numbers: one and the same everywhere."""
    (number,) = set(numbers.tolist())
    return dispatch.KNOWN[int(number)]


def fresh():
    return jax.jit(lambda x: program(x))  # a function that was never traced


@pytest.mark.parametrize("order", [(None, "interpret"), ("interpret", None), ("interpret", "xla", "mosaic_gpu")])
def test_a_jitted_function_follows_the_context(order):
    function, x = fresh(), jnp.zeros(())
    for name in 2 * order:
        if name is None:
            assert chosen(function(x)) == "xla"
        else:
            with use_implementation(name):
                assert chosen(function(x)) == name
    assert function._cache_size() == len(order)  # traced once for each choice


def test_contexts_nest():
    function, x = fresh(), jnp.zeros(())
    with use_implementation("interpret"):
        with use_implementation("xla"):
            assert chosen(function(x)) == "xla"
        with use_implementation(None):
            assert chosen(function(x)) == "xla"
        assert chosen(function(x)) == "interpret"
        with pytest.raises(RuntimeError), use_implementation("mosaic_gpu"):
            raise RuntimeError
        assert chosen(function(x)) == "interpret"
    assert chosen(function(x)) == "xla"


def test_a_context_within_a_traced_function_reaches_jitted_ones():
    inner = fresh()

    @jax.jit
    def outer(x):
        with use_implementation("interpret"):
            first = inner(x)
        return first, inner(x)

    assert list(map(chosen, outer(jnp.zeros(())))) == ["interpret", "xla"]


def test_a_context_holds_for_its_thread():
    function, x, found = fresh(), jnp.zeros(()), {}

    def other():
        found["outside"] = chosen(function(x))
        with use_implementation("mosaic_gpu"):
            found["inside"] = chosen(function(x))

    with use_implementation("interpret"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert chosen(function(x)) == "interpret"
    assert found == {"outside": "xla", "inside": "mosaic_gpu"}


# Programs over several devices. conftest.py makes two CPU devices; the stub's kernel returns x + 1.

MANY = "the program runs on 2 devices and XLA cannot partition a kernel; call it in jax.shard_map"


def mesh(kind=AxisType.Auto, sizes=(2,), names=("data",)):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def on(mesh, spec, shape=(4, 2)):
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))


def in_every_form(x):
    """Sums of the stub's results, called directly and in all the ways that a model calls an op."""
    tree = {"xla": lambda tree: tree["x"][0], "mosaic_gpu": lambda tree: tree["x"][0] + 1}
    forms = dict(
        eager=stub,
        jit=jax.jit(stub),
        nested=jax.jit(lambda x: jax.jit(stub)(x * 2)),
        loop=jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (1, stub(s[1])), (0, x))[1]),
        vmap=jax.jit(jax.vmap(stub)),
        tree=jax.jit(lambda x: dispatch.run("stub", tree, None, {"x": (x, None)})),
    )
    return {name: form(x).sum() for name, form in forms.items()}


@pytest.mark.parametrize("device", [0, 1])
def test_arrays_of_one_of_two_devices_keep_their_kernel(with_gpu, device):
    assert jax.device_count() > device
    x = jax.device_put(jnp.zeros((4, 2)), jax.devices()[device])
    assert set(map(float, in_every_form(x).values())) == {8.0}
    alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[device : device + 1])
    assert set(map(float, in_every_form(on(alone, P("data"))).values())) == {8.0}


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["cut", "copied"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_of_two_devices_are_left_to_xla(with_gpu, log, kind, spec):
    x = on(mesh(kind), spec)
    assert set(map(float, in_every_form(x).values())) == {0.0}
    assert log() == [("INFO", f"stub runs as 'xla': {MANY}")]
    for call in (stub, jax.jit(stub, static_argnums=1)):
        for name in ("mosaic_gpu", "interpret"):
            with pytest.raises(NotImplementedError, match=f"stub cannot run as '{name}': {MANY}"):
                call(x, name)
    # One argument of several is enough; so is a mesh that is set.
    with pytest.raises(NotImplementedError, match=MANY):
        dispatch.run("op", {"mosaic_gpu": lambda *args: None}, "mosaic_gpu", jnp.zeros(()), x)
    with jax.set_mesh(mesh(kind)):
        assert jax.jit(stub)(jnp.zeros((4, 2))).sum() == 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parts_of_arrays_in_shard_map_keep_their_kernel(with_gpu, kind):
    def body(x):
        return {name: value[None] for name, value in in_every_form(x).items()}

    local = jax.shard_map(body, mesh=mesh(kind), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    found = jax.jit(local)(on(mesh(kind), P("data")))
    assert {name: value.tolist() for name, value in found.items()} == dict.fromkeys(found, [4.0, 4.0])


def test_a_copied_constant_in_shard_map_keeps_its_kernel(with_gpu):
    copied = on(mesh(), P())
    local = jax.shard_map(lambda: stub(copied), mesh=mesh(), in_specs=(), out_specs=P("data"))
    assert jax.jit(local)().tolist() == [[1.0, 1.0]] * 8


def test_a_shard_map_over_some_axes_leaves_the_others_to_xla(with_gpu):
    for sizes, expected in (((2, 1), 8.0), ((1, 2), 0.0)):
        grid = mesh(sizes=sizes, names=("data", "model"))
        local = jax.shard_map(stub, mesh=grid, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        assert jax.jit(local)(on(grid, P("data"))).sum() == expected
