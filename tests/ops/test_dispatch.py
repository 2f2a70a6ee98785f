"""`dispatch` runs the best implementation that takes the device and the arguments, or exactly the named one."""

import logging
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from dsv4_jax.ops import dispatch, use_implementation
from pallas_kernels.runtime.lowering_cache import cached_trace


def doubled(x):
    """The reference of the op "double"."""
    return 2 * x, None


def doubled_by_kernel(x, *, interpret):
    """The kernel of the op "double", which takes even numbers; its second result says that it ran."""
    if x.size % 2:
        raise NotImplementedError(f"the kernel takes even sizes, got {x.size}")
    return 2 * x, jnp.int32(interpret)


def prefers_xla(x, *, interpret):
    raise dispatch.PreferXla("the kernel is for large arrays")


def double(size, implementation=None, op="double", kernel=doubled_by_kernel):
    """The name of the implementation that doubled an array of this size."""
    value, found = dispatch.dispatch(op, implementation, jnp.ones((size,)), xla=doubled, kernel=kernel)
    chex.assert_trees_all_equal(value, jnp.full((size,), 2.0))
    return "xla" if found is None else "interpret" if found else "mosaic_gpu"


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
    assert double(2) == ("xla" if reason else "mosaic_gpu")
    # The kernel refuses the arguments: XLA takes them.
    assert double(3) == "xla"


def test_a_named_one_runs_or_says_why_not(reason):
    assert double(2, "xla") == "xla"
    assert double(2, "interpret") == "interpret"
    if reason:
        with pytest.raises(
            NotImplementedError, match="double cannot run as 'mosaic_gpu': the default backend is 'cpu'"
        ):
            double(2, "mosaic_gpu")
    else:
        assert double(2, "mosaic_gpu") == "mosaic_gpu"
        with pytest.raises(NotImplementedError, match="double cannot run as 'mosaic_gpu': .* takes even sizes, got 3"):
            double(3, "mosaic_gpu")
    with pytest.raises(ValueError, match="implementation='cuda' is not known; choose None or one of"):
        double(2, "cuda")


def test_a_context_decides_for_ops_that_have_it(reason):
    with use_implementation("mosaic_gpu"):
        assert double(2) == "mosaic_gpu"
        assert double(3) == "xla"
        assert double(2, "xla") == "xla"
    with pytest.raises(ValueError, match="implementation='cuda' is not known"), use_implementation("cuda"):
        pass


def test_the_gradient_is_that_of_the_reference():
    """Also where the kernel returns more than the reference, and takes integers and static options."""

    def reference(x, selected, *, factor):
        return factor * x[selected], None

    def kernel(x, selected, *, factor, interpret):
        return jnp.zeros_like(x[selected]), (selected, x)

    def loss(x, selected, implementation):
        functions = dict(xla=reference, kernel=kernel)
        y, _ = dispatch.dispatch("op", implementation, x, selected, **functions, factor=3)
        return jnp.sum(y * jnp.arange(2.0))

    x = jnp.zeros((4,))
    selected = jnp.array([1, 3])
    values = {name: jax.grad(loss)(x, selected, name) for name in ("xla", "interpret")}
    chex.assert_trees_all_equal(*values.values(), jnp.array([0.0, 0.0, 0.0, 3.0]))


def scaled_by_kernel(x, scale, bias, *, factor, interpret):
    return factor * x * scale + 1 + (0 if bias is None else bias)


@dispatch.with_kernel(scaled_by_kernel)
def scaled(x, scale, bias=None, *, factor=2, implementation=None):
    """An op by decorator, whose kernel adds 1; `bias` is an array or None."""
    assert implementation == "xla"
    return factor * x * scale + (0 if bias is None else bias)


@pytest.mark.parametrize(("implementation", "more"), [("xla", 0), ("interpret", 1)])
def test_a_decorated_op_takes_arrays_and_options_by_place_and_by_name(implementation, more):
    x = jnp.arange(3.0)
    scale = jnp.full((3,), 5.0)
    for values in (
        scaled(x, scale, implementation=implementation),
        scaled(scale=scale, x=x, factor=2, implementation=implementation),
        jax.jit(lambda x: scaled(x, scale, np.zeros(3, np.float32), implementation=implementation))(x),
    ):
        chex.assert_trees_all_equal(values, 10 * x + more)
    bias = jnp.ones((3,))
    chex.assert_trees_all_equal(scaled(x, scale, bias, factor=3, implementation=implementation), 15 * x + 1 + more)
    slope = jax.grad(lambda bias: jnp.sum(scaled(x, scale, bias, implementation=implementation) * x))(bias)
    chex.assert_trees_all_equal(slope, x)
    with pytest.raises(TypeError, match="missing a required argument: 'scale'"):
        scaled(x, implementation=implementation)
    assert scaled.__name__ == "scaled" and scaled.__doc__.startswith("An op by decorator")


# A fallback is said once, or is an error.


def test_a_fallback_is_said_once_for_each_reason(with_gpu, log):
    for size in (2, 3, 3, 5, 3):
        double(size)
    double(3, op="other")
    assert log() == [
        ("INFO", "double runs as 'xla': the kernel takes even sizes, got 3"),
        ("INFO", "double runs as 'xla': the kernel takes even sizes, got 5"),
        ("INFO", "other runs as 'xla': the kernel takes even sizes, got 3"),
    ]


def test_where_there_are_no_kernels_it_is_said_to_who_debugs(monkeypatch, log):
    monkeypatch.setattr(dispatch, "why_no_mosaic_gpu", lambda: NO_GPU)
    for size in (2, 3):
        double(size)
    assert log() == [("DEBUG", f"double runs as 'xla': {NO_GPU}")]


def test_a_choice_is_no_fallback(with_gpu, log, monkeypatch):
    """XLA by name, XLA because it is faster, and XLA by the context are neither reported nor an error."""
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "1")
    assert double(3, "xla") == double(3, kernel=prefers_xla) == "xla"
    with use_implementation("xla"):
        assert double(3) == "xla"
    assert log() == []
    with pytest.raises(NotImplementedError, match="double cannot run as 'mosaic_gpu': the kernel is for large arrays"):
        double(3, "mosaic_gpu", kernel=prefers_xla)


def test_required_kernels_turn_a_fallback_into_an_error(reason, monkeypatch):
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "1")
    message = reason or "the kernel takes even sizes, got 3"
    with pytest.raises(NotImplementedError, match=f"double would run as 'xla', .*REQUIRE_KERNELS is set: {message}"):
        double(3)
    monkeypatch.setenv("DSV4_JAX_REQUIRE_KERNELS", "0")
    assert double(3) == "xla"


# The choice is part of the key of jit's cache. The stub's implementations return different numbers.


def stub(x, implementation=None):
    """x, plus 1 by the kernel or 2 by the interpreted one: the name's place in `dispatch.KNOWN`."""
    functions = dict(xla=lambda x: x, kernel=lambda x, interpret: x + (2 if interpret else 1))
    return dispatch.dispatch("stub", implementation, x, **functions)


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
    function = fresh()
    x = jnp.zeros(())
    for name in 2 * order:
        if name is None:
            assert chosen(function(x)) == "xla"
        else:
            with use_implementation(name):
                assert chosen(function(x)) == name
    assert function._cache_size() == len(order)  # traced once for each choice


def test_contexts_nest():
    function = fresh()
    x = jnp.zeros(())
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
    function = fresh()
    x = jnp.zeros(())
    found = {}

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


# Programs over two of the eight CPU devices that conftest.py makes; the stub's kernel returns x + 1.

MANY = "the program runs on 2 devices and XLA cannot partition a kernel; call it in jax.shard_map"


def mesh(kind=AxisType.Auto, sizes=(2,), names=("data",)):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def on(mesh, spec, shape=(4, 2)):
    return jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec))


def in_every_form(x):
    """Sums of the stub's results, called directly and in all the ways that a model calls an op."""
    tree = dict(xla=lambda tree: tree["x"][0], kernel=lambda tree, interpret: tree["x"][0] + 1)
    forms = dict(
        eager=stub,
        jit=jax.jit(stub),
        nested=jax.jit(lambda x: jax.jit(stub)(x * 2)),
        loop=jax.jit(lambda x: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (1, stub(s[1])), (0, x))[1]),
        vmap=jax.jit(jax.vmap(stub)),
        tree=jax.jit(lambda x: dispatch.dispatch("stub", None, {"x": (x, None)}, **tree)),
    )
    return {name: form(x).sum() for name, form in forms.items()}


@pytest.mark.parametrize("device", [0, 1])
def test_arrays_of_one_of_several_devices_keep_their_kernel(with_gpu, device):
    assert jax.device_count() == 8
    x = jax.device_put(jnp.zeros((4, 2)), jax.devices()[device])
    assert set(map(float, in_every_form(x).values())) == {8.0}
    alone = jax.make_mesh((1,), ("data",), devices=jax.devices()[device : device + 1])
    assert set(map(float, in_every_form(on(alone, P("data"))).values())) == {8.0}


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["sharded", "replicated"])
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
        dispatch.dispatch("op", "mosaic_gpu", jnp.zeros(()), x, xla=max, kernel=max)
    with jax.set_mesh(mesh(kind)):
        assert jax.jit(stub)(jnp.zeros((4, 2))).sum() == 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_in_shard_map_keep_their_kernel(with_gpu, kind):
    def body(x):
        return {name: value[None] for name, value in in_every_form(x).items()}

    local = jax.shard_map(body, mesh=mesh(kind), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    found = jax.jit(local)(on(mesh(kind), P("data")))
    assert {name: value.tolist() for name, value in found.items()} == dict.fromkeys(found, [4.0, 4.0])


def test_a_replicated_constant_in_shard_map_keeps_its_kernel(with_gpu):
    replicated = on(mesh(), P())
    local = jax.shard_map(lambda: stub(replicated), mesh=mesh(), in_specs=(), out_specs=P("data"))
    assert jax.jit(local)().tolist() == [[1.0, 1.0]] * 8


def test_a_shard_map_over_some_axes_leaves_the_others_to_xla(with_gpu):
    for sizes, expected in (((2, 1), 8.0), ((1, 2), 0.0)):
        grid = mesh(sizes=sizes, names=("data", "model"))
        local = jax.shard_map(stub, mesh=grid, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        assert jax.jit(local)(on(grid, P("data"))).sum() == expected
