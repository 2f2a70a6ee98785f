"""Hyper-connections as kernels against jnp: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes
from pallas_kernels import hyper_connections
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import LAYERS, check_layers


MIXED = 24
HEAD = 4
OPTIONS = dict(norm_eps=1e-6, hc_eps=1e-6, iterations=20)
V41_OPTIONS = OPTIONS | dict(norm_eps=1e-20, delays_pre=True)


def operands(tokens, width, rows=MIXED, *, added=True):
    """Arguments of the kernel, with logits of about one unit."""
    rng = np.random.default_rng(tokens)

    def normal(*shape, mean=0.0, std=1.0):
        return jnp.asarray(mean + std * rng.standard_normal(shape), jnp.float32)

    streams = normal(tokens, 4, width).astype(jnp.bfloat16)
    fn = normal(rows, 4 * width, std=(4 * width) ** -0.5)
    base = normal(rows, std=0.5)
    scale = normal(3 if rows == MIXED else 1, mean=1.0, std=0.1)
    weight = normal(width, mean=1.0, std=0.1)
    if not added:
        return streams, fn, base, scale, weight, None, None
    return streams, fn, base, scale, weight, normal(tokens, width).astype(jnp.bfloat16), jnp.abs(normal(tokens, MIXED))


def v41_operands(tokens, width):
    """As `operands`, but token 1 is zero, and the mean squares of token 2 are about as small as `norm_eps`."""
    streams, *weights, y, mixing = operands(tokens, width)
    factors = jnp.asarray([1.0, 0.0, 1e-10, *[1.0] * tokens][:tokens], streams.dtype)
    return streams * factors[:, None, None], *weights, y * factors[:, None], mixing


@functools.partial(jax.jit, static_argnums=0, static_argnames="is_v41")
def run(implementation, streams, fn, base, scale, *others, is_v41=False):
    weights = ops.HyperConnectionWeights(fn, base, scale, **(V41_OPTIONS if is_v41 else OPTIONS))
    return ops.hyper_connections(streams, weights, *others, implementation=implementation)


def check(got, want):
    assert [x is None for x in got] == [x is None for x in want]
    for name, mine, other in zip(("streams", "x", "mixing"), got, want, strict=True):
        if mine is None:
            continue
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        mine = np.float64(mine)
        other = np.float64(other)
        if name == "mixing":
            # Sums of 16,384 float32 products in another order, and of streams of which some are a unit off.
            chex.assert_trees_all_close(mine, other, rtol=1e-3, atol=1e-4)
        else:
            # Where a sum in another order is rounded to bfloat16 the other way: by 2**-8 of it, and of values up to
            # about 8. A stream that is off so moves x, which may be smaller.
            assert np.mean(mine == other) > 0.99, name
            chex.assert_trees_all_close(mine, other, rtol=2.0**-7, atol=2.0**-4, custom_message=name)


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "added"), [(2, 2048, HEAD, False), (33, 1024, HEAD, True), (66, 1024, HEAD, True)]
)
def test_interpreted(tokens, width, rows, added):
    arrays = operands(tokens, width, rows, added=added)
    check(run("interpret", *arrays), run("xla", *arrays))


@pytest.mark.parametrize("tokens", [3, 66])
def test_delayed_pre_interpreted(tokens):
    arrays = v41_operands(tokens, 1024)
    got = run("interpret", *arrays, is_v41=True)
    check(got, run("xla", *arrays, is_v41=True))
    assert not got[1][1].any()


@pytest.mark.parametrize("tokens", [3, 66])
def test_delayed_pre_without_an_output_to_add(tokens):
    """As with an output of zeros and mixing weights that keep the streams, which the call need not add."""
    *arrays, y, mixing = v41_operands(tokens, 1024)
    kept = mixing.at[:, 4:8].set(0.0).at[:, 8:].set(jnp.eye(4).reshape(-1))
    want = run("xla", *arrays, jnp.zeros_like(y), kept, is_v41=True)
    got = run("interpret", *arrays, None, mixing, is_v41=True)
    check(got, want)
    check(run("xla", *arrays, None, mixing, is_v41=True), want)
    assert np.float32(got[0]).tobytes() == np.float32(arrays[0]).tobytes()


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, MIXED), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, MIXED), (66, HEAD)))],
)
def test_layers_of_a_stack(implementation, tokens, rows):
    """Each kernel of the first launch; on a GPU, `wgmma` needs more tokens."""
    if implementation == "mosaic_gpu" and tokens == 66:
        tokens = 300
    streams, *weights, y, mixing = operands(tokens, 1024, rows)

    def draw(layer):
        return jax.tree.map(lambda weight: jnp.roll(weight, layer, axis=-1) + 0.1 * layer, tuple(weights))

    def call(weights, streams, implementation):
        outputs = run(implementation, streams, *weights, y, mixing)
        return outputs[0], outputs

    check_layers(implementation, call, [draw(layer) for layer in range(LAYERS)], streams)


def test_values_and_gradient_interpreted():
    arrays = operands(5, 1024)

    def pulled(implementation):
        values, pull = jax.vjp(functools.partial(run, implementation), *arrays)
        return values, pull(jax.tree.map(lambda x: jnp.cos(x.astype(jnp.float32)).astype(x.dtype), want))

    want = run("xla", *arrays)
    values, gradient = pulled("interpret")
    _, expected = pulled("xla")
    check(values, want)
    for mine, other in zip(gradient, expected, strict=True):
        # The same program on the same inputs.
        chex.assert_trees_all_close(np.float32(mine), np.float32(other), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [MIXED, HEAD])
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 5, 64, 256, 333, 8192])
def test_on_gpu(tokens, rows, added):
    arrays = operands(tokens, 4096, rows, added=added)
    got = run("mosaic_gpu", *arrays)
    check(got, run("xla", *arrays))
    for mine, again in zip(got, run("mosaic_gpu", *arrays), strict=True):
        assert (mine is None and again is None) or (mine == again).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 100])
def test_on_gpu_pro(tokens):
    arrays = operands(tokens, 7168)
    check(run("mosaic_gpu", *arrays), run("xla", *arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5, 256, 333, 8192])
def test_delayed_pre_on_gpu(tokens):
    arrays = v41_operands(tokens, 5120)
    check(run("mosaic_gpu", *arrays, is_v41=True), run("xla", *arrays, is_v41=True))


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import hyper_connections
from tests.pallas_kernels.stacks import LAYERS, check_not_copied, looped
S, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
call = functools.partial(hyper_connections, norm_eps=1e-6, hc_eps=1e-6, iterations=20)
sizes = dict(one=(1, 4096, 24), some=(32, 7168, 24), many=(8192, 4096, 24), head=(1, 4096, 4), head_many=(999, 4096, 4))
for name, (tokens, width, rows) in sizes.items():
    own = S((rows, 4 * width), f32), S((rows,), f32), S((3 if rows == 24 else 1,), f32), S((width,), f32)
    streams, y, mixing = S((tokens, 4, width), bf16), S((tokens, width), bf16), S((tokens, 24), f32)
    compile_for_h100(name, call, streams, *own, y, mixing)
    compile_for_h100(name + "_first", call, streams, *own)
    if rows == 24 and width == 4096:
        v41 = functools.partial(call, delays_pre=True)
        own_v41 = S((rows, 4 * 5120), f32), *own[1:3], S((5120,), f32)
        others = S((tokens, 4, 5120), bf16), *own_v41, S((tokens, 5120), bf16), mixing
        compile_for_h100(name + "_v41", v41, *others)
        if tokens == 1:
            compile_for_h100("parts_v41", v41, *others, S((20,), jnp.uint32))
    if tokens == 1:
        compile_for_h100(name + "_parts", call, streams, *own, y, mixing, S((20,), jnp.uint32))
    def call_layer(carry, layer, *operands):
        new, x, _ = call(carry, *operands, layer=layer)
        return new + x[:, None, :]
    stacks = [S((LAYERS, *x.shape), x.dtype) for x in own]
    compiled = compile_for_h100(name + "_stack", looped(call_layer), streams, *stacks, y, mixing)
    check_not_copied(compiled, *stacks)
""")
    # Of the launch for many tokens, 384 threads a multiprocessor.
    assert max(used.values()) <= 168, used


@pytest.mark.gpu
def test_parts_on_two_gpus_are_added_up_as_by_all_reduce():
    """Calls in a row, between sums of other sizes: every bit as from the sum, then the kernel of a whole y."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])

    @functools.partial(jax.jit, static_argnames=("fused", "times"))
    def run_steps(table, arrays, *, fused, times):
        def local(table, arrays):
            *others, y, mixing = arrays
            share = 0.25 + 0.5 * jax.lax.axis_index("model").astype(y.dtype)

            def call(_, carry):
                streams, y, mixing = carry
                y = y * share
                if fused:
                    arrays = streams, *others[1:], y, mixing
                    streams, x, again = run("mosaic_gpu", *arrays)
                else:
                    arrays = streams, *others[1:], ops.all_reduce(y, implementation="mosaic_gpu"), mixing
                    streams, x, again = hyper_connections(*arrays, **OPTIONS)
                sums = ops.all_reduce(jnp.tile(x, (9, 1)), implementation="mosaic_gpu")
                return streams, sums[: len(x)] * jnp.asarray(0.5, x.dtype), mixing if again is None else again

            with ops.with_mailboxes(table):
                return jax.tree.map(lambda x: x[None], jax.lax.fori_loop(0, times, call, (others[0], y, mixing)))

        specs = mailbox_sharding(mesh).spec, jax.P()
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P("model"), check_vma=False)(table, arrays)

    table = make_mailboxes(mesh)
    for tokens, width, rows, times in (
        (1, 1024, MIXED, 1),
        (1, 4096, MIXED, 300),
        (4, 4096, MIXED, 300),
        (4, 5120, MIXED, 300),  # more blocks than a bank of the mailboxes is for
        (3, 4096, HEAD, 3),
    ):
        arrays = jax.device_put(operands(tokens, width, rows), jax.NamedSharding(mesh, jax.P()))
        found, want = (jax.device_get(run_steps(table, arrays, fused=fused, times=times)) for fused in (True, False))
        for mine, other in zip(found, want, strict=True):
            assert mine[0].tobytes() == mine[1].tobytes() == other[0].tobytes() and np.isfinite(np.float32(mine)).all()


def test_what_the_kernel_does_not_take_is_refused():
    streams, fn, base, scale, weight, y, mixing = operands(2, 1024)
    call = functools.partial(run, "interpret")
    with pytest.raises(NotImplementedError, match="takes streams as bfloat16.any, 4, any., got float32.2, 4, 1024."):
        call(streams.astype(jnp.float32), fn, base, scale, weight)
    with pytest.raises(NotImplementedError, match="1024, 2048, .. or 7168 channels, got 512"):
        call(streams[..., :512], fn[:, :2048], base, scale, weight[:512])
    table = jnp.zeros(8, jnp.uint32)
    with pytest.raises(NotImplementedError, match="several GPUs: it is not interpreted"):
        hyper_connections(streams, fn, base, scale, weight, y, mixing, table, interpret=True, **OPTIONS)
    with pytest.raises(NotImplementedError, match="parts of up to 4 tokens, got .5, 1024."):
        hyper_connections(*operands(5, 1024), table, **OPTIONS)
    with pytest.raises(NotImplementedError, match="mixing if delays_pre is True"):
        hyper_connections(streams, fn, base, scale, weight, **V41_OPTIONS)
    with pytest.raises(ValueError, match="y needs mixing"):
        call(streams, fn, base, scale, weight, y)
    with pytest.raises(ValueError, match="mixing needs y"):
        call(streams, fn, base, scale, weight, None, mixing)
    for implementation in ("interpret", "xla"):
        with pytest.raises(ValueError, match="y has 1 rows; it must have one for each of the tokens of streams, 2"):
            run(implementation, streams, fn, base, scale, weight, y[:1], mixing)
