"""Norm and rotation as a kernel against jnp: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from tests.ops.pools import ints, poison, same_bytes
from tests.pallas_kernels.kernels import NOPE, ROPE, ROW_FORMATS, compile_in_process, registers
from tests.pallas_kernels.stacks import LAYERS, check_layers


def arguments(tokens, heads=8, pairs=32):
    rng = np.random.default_rng(tokens)
    sizes = 2.0 ** rng.integers(-20, 20, (tokens, heads + 1, 1))
    rows = jnp.asarray(rng.standard_normal((tokens, heads + 1, 512)) * sizes, jnp.bfloat16)
    weight = jnp.asarray(rng.uniform(0.1, 2, 512), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 1 << 20, tokens), jnp.int32)
    if tokens > 1:
        positions = positions.at[0].set(0)
    inv_freq = jnp.asarray(160000.0 ** -(np.arange(pairs) / pairs), jnp.float32)
    return rows[:, :-1], rows[:, -1], weight, positions, inv_freq


def check(implementation, *given, **options):
    got = jax.jit(lambda *x: ops.norm_rope(*x, eps=1e-6, implementation=implementation, **options))(*given)
    cpu = jax.device_put(given, jax.devices("cpu")[0])
    want = ops.norm_rope(*cpu, eps=1e-6, implementation="xla", **options)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        mine, other = (np.asarray(x, np.float32) for x in (mine, other))
        # One unit in the last place of bfloat16, 2**-7 of a value, from a sum in another order before either rounding;
        # a rotated value may be small beside its pair, from which the unit comes then.
        size = np.maximum(
            np.abs(other), np.abs(other.reshape(*other.shape[:-1], -1, 2)[..., ::-1].reshape(other.shape))
        )
        assert np.all(np.abs(mine - other) <= 2.0**-6 * size)
        assert np.mean(mine == other) > 0.99


@pytest.mark.parametrize(
    ("tokens", "heads", "pairs"), [(1, 2, 32), pytest.param(3, 1, 32, marks=pytest.mark.slow), (2, 1, 256)]
)
def test_interpreted(tokens, heads, pairs):
    check("interpret", *arguments(tokens, heads, pairs))


@pytest.mark.parametrize("pairs", [32, pytest.param(100, marks=pytest.mark.slow)])
def test_queries_without_a_norm_interpreted(pairs):
    """Rows of several heads, of which the last is not full; 200 rotated channels lie in 4 groups of 64."""
    q, *others = arguments(2, 9, pairs)
    check("interpret", q, *others, norms_queries=False)
    rotated, _ = ops.norm_rope(q, *others, eps=1e-20, norms_queries=False, implementation="interpret")
    same_bytes(rotated[..., : -2 * pairs], q[..., : -2 * pairs])


def rings_of(rng, tokens, fmt, *, slots=4, ring=6):
    """A view, and slots and positions of tokens among which is padding; tokens of a slot stand together."""
    codec = ROW_FORMATS[fmt].window(NOPE, ROPE)
    view = ops.SWAView(poison(codec.struct, 2, slots, ring), ints(1), ring, codec)
    return view, ints(np.sort(rng.integers(-1, slots, tokens))), ints(rng.integers(-1, 1 << 20) + np.arange(tokens))


def check_append(implementation, fmt, tokens, heads, **sizes):
    """The bits of `norm_rope` and then `append_swa`."""
    q, kv, weight, _, inv_freq = arguments(tokens, heads)
    view, slots, positions = rings_of(np.random.default_rng(tokens), tokens, fmt, **sizes)

    @functools.partial(jax.jit, static_argnames="together")
    def run(view, q, kv, together):
        options = dict(eps=1e-6, norms_queries=fmt != "v41", implementation=implementation)
        if together:
            return ops.norm_rope_append(view, q, kv, weight, slots, positions, inv_freq, **options)
        q, kv = ops.norm_rope(q, kv, weight, jnp.maximum(positions, 0), inv_freq, **options)
        return q, ops.append_swa(view, kv, slots, positions, implementation=implementation)

    same_bytes(run(view, q, kv, together=True), run(view, q, kv, together=False))


# A token, and more of one slot than its ring has room for, of which the last are stored.
@pytest.mark.parametrize(("fmt", "tokens", "heads"), [("v4", 1, 3), ("v41", 3, 5), ("per_entry", 15, 1)])
def test_append_interpreted(fmt, tokens, heads):
    check_append("interpret", fmt, tokens, heads, slots=1 if tokens > 3 else 4)


@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_append_of_xla(fmt):
    check_append("xla", fmt, 9, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ROW_FORMATS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (8, 64), (64, 1), (300, 16)])
def test_append_on_gpu(fmt, tokens, heads):
    check_append("mosaic_gpu", fmt, tokens, heads, slots=100, ring=128)


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_layers_of_a_stack(implementation):
    q, kv, weight, _, inv_freq = arguments(3, 2)
    view, slots, positions = rings_of(np.random.default_rng(3), 3, "v4")

    def call(weight, view, implementation):
        options = dict(eps=1e-6, implementation=implementation)
        outputs = ops.norm_rope(q, kv, weight, jnp.maximum(positions, 0), inv_freq, **options)
        rotated, view = ops.norm_rope_append(view, q, kv, weight, slots, positions, inv_freq, **options)
        return view, (outputs, rotated)

    check_layers(implementation, call, [jnp.roll(weight, layer) for layer in range(LAYERS)], view)


def test_the_first_position_is_not_rotated():
    q, kv, weight, _, inv_freq = arguments(1, 1)
    q, kv = ops.norm_rope(q, kv, weight, jnp.zeros(1, jnp.int32), inv_freq, eps=0.0, implementation="interpret")
    chex.assert_trees_all_close(np.mean(np.asarray(q, np.float32) ** 2), 1, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (8, 64), (333, 128)])
@pytest.mark.parametrize("norms_queries", [True, False])
def test_on_gpu(tokens, heads, norms_queries):
    check("mosaic_gpu", *arguments(tokens, heads), norms_queries=norms_queries)


@pytest.mark.slow
def test_its_gradient_is_that_of_the_reference():
    q, kv, weight, positions, inv_freq = arguments(1, 1)

    def gradient(implementation):
        def loss(q, kv, weight):
            out = ops.norm_rope(q, kv, weight, positions, inv_freq, eps=1e-6, implementation=implementation)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in out)

        return jax.grad(loss, argnums=(0, 1, 2))(q, kv, weight)

    for mine, other in zip(gradient("interpret"), gradient("xla"), strict=True):
        # Where the values differ by a rounding, so does the sine's slope.
        chex.assert_trees_all_close(np.float32(mine), np.float32(other), rtol=0.05, atol=0.05 * np.abs(other).max())


@pytest.mark.aot
@pytest.mark.parametrize("tokens", [1, 64])
def test_queries_are_rotated_in_place(tokens):
    """Also a slice of a larger array, which XLA would fuse with the kernel."""
    compile_in_process(f"""
import jax, jax.numpy as jnp
from pallas_kernels import norm_rope
S = jax.ShapeDtypeStruct
def sliced(q, kv, weight, positions, inv_freq):
    q = q[:, : 64 * 512].reshape({tokens}, 64, 512)
    return norm_rope(q, kv, weight, positions, inv_freq, eps=1e-20, norms_queries=False)
q, kv = S(({tokens}, 65 * 512), jnp.bfloat16), S(({tokens}, 512), jnp.bfloat16)
args = q, kv, S((512,), jnp.float32), S(({tokens},), jnp.int32), S((32,), jnp.float32)
text = compile_for_h100("sliced", sliced, *args).as_text()
(write,) = [line for line in text[text.index("ENTRY") :].splitlines() if 'custom_call_target="mosaic_gpu' in line]
assert "output_to_operand_aliasing" in write, write
assert " copy(" not in text
""")


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import Rings, norm_rope, norm_rope_append
from tests.pallas_kernels.kernels import ROW_FORMATS, window_pools
from tests.pallas_kernels.stacks import LAYERS, check_not_copied, looped
S = jax.ShapeDtypeStruct
args = S((8, 64, 512), jnp.bfloat16), S((8, 512), jnp.bfloat16), S((512,), jnp.float32), S((8,), jnp.int32)
compile_for_h100("norm_rope", functools.partial(norm_rope, eps=1e-6), *args, S((32,), jnp.float32))
q, kv, weight, ints = args
for name, fmt in ROW_FORMATS.items():
    layout, pools = window_pools(fmt, 3, 64, 128)
    options = dict(eps=1e-6, norms_queries=name != "v41")
    def append(q, kv, weight, slots, positions, inv_freq, layer, *pools):
        rings = Rings(layer, pools, 128, layout)
        return norm_rope_append(q, kv, weight, slots, positions, inv_freq, rings, **options)
    args = q, kv, weight, ints, ints, S((32,), jnp.float32), S((), jnp.int32), *pools
    in_place = (7, 8, 9) if options["norms_queries"] else (0, 7, 8, 9)
    compiled = compile_for_h100(name, append, *args, donate_argnums=in_place)
    assert compiled.memory_analysis().temp_size_in_bytes < 1024
    assert " copy(" not in compiled.as_text()
    def append_layer(carry, layer, stack, slots, positions, inv_freq, ring):
        q, kv, *pools = carry
        rings = Rings(ring, tuple(pools), 128, layout)
        q, *pools = norm_rope_append(q, kv, stack, slots, positions, inv_freq, rings, layer=layer, **options)
        return q, kv, *pools
    stack = S((LAYERS, 512), jnp.float32)
    args = (q, kv, *pools), stack, ints, ints, S((32,), jnp.float32), S((), jnp.int32)
    compiled = compile_for_h100(name + "_stack", looped(append_layer), *args, donate_argnums=0)
    check_not_copied(compiled, stack)
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20, "copies more than the queries"
""")
    # Four warpgroups on a multiprocessor, each with enough rows on their way.
    assert len(used) == 7 and max(used.values()) <= 128, used


def test_what_the_kernel_does_not_take_is_refused():
    q, kv, weight, *others = arguments(1, 1)
    with pytest.raises(NotImplementedError, match="takes q as bfloat16.any, any, 512., got bfloat16.1, 1, 256."):
        ops.norm_rope(*(x[..., :256] for x in (q, kv, weight)), *others, eps=1e-6, implementation="interpret")
    with pytest.raises(NotImplementedError, match="takes up to 512 channels to rotate, got 514"):
        ops.norm_rope(*arguments(1, 1, 257), eps=1e-6, implementation="interpret")
