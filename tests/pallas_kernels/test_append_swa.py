"""append_swa's kernel against the reference: interpreted, on a GPU, and compiled for one."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from dsv4_jax.quant import kv_format
from tests.ops.pools import ints, poison, same_bytes, swa_view
from tests.pallas_kernels.kernels import DIM, FORMATS, NOPE, ROPE, ROW_FORMATS, check, compile_in_process, registers


def view_of(fmt, *, layers=2, slots=4, ring=6, layer=1):
    codec = fmt.window(NOPE, ROPE)
    return ops.SWAView(poison(codec.struct, layers, slots, ring), ints(layer), ring, codec)


def rows_of(rng, tokens):
    """Rows of every magnitude, among them zeros, ties of the rounding and what saturates."""
    size = 10.0 ** rng.integers(-6, 6, (tokens, 8, 1))
    values = rng.standard_normal((tokens, 8, 64)) * size
    values[rng.random((tokens, 8)) < 0.1] = 0
    ties = rng.random((tokens, 8)) < 0.2
    values[ties] = (rng.integers(-31, 32, (tokens, 8, 64)) * 2.0 ** rng.integers(-3, 3, (tokens, 8, 1)))[ties]
    return jnp.asarray(values.reshape(tokens, DIM), jnp.bfloat16)


def call_of(rng, plan, padding, tokens):
    """(slots, positions) of `tokens` tokens: `plan` = (slot, how many, first position) and padding between."""
    slots = []
    positions = []
    for slot, count, first in plan:
        slots += [slot] * count
        positions += range(first, first + count)
        if padding:  # without a slot, or without a position
            missing = rng.random() < 0.5
            slots.append(-1 if missing else slot)
            positions.append(int(rng.integers(-1, 9)) if missing else -1)
    fill = [-1] * (tokens - len(slots))
    return ints((slots + fill)[:tokens]), ints((positions + fill)[:tokens])


@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@given(
    counts=st.tuples(*[st.sampled_from([0, 1, 2, 5, 6, 7, 15])] * 3),
    first=st.tuples(*[st.integers(0, 40)] * 3),
    order=st.permutations(range(4)),
    padding=st.booleans(),
    tokens=st.sampled_from([3, 26]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, deadline=None)
def test_interpreted(fmt, counts, first, order, padding, tokens, seed):
    rng = np.random.default_rng(seed)
    slots, positions = call_of(rng, list(zip(order, counts, first, strict=False)), padding, tokens)
    check(ops.append_swa, "interpret", view_of(fmt), rows_of(rng, tokens), slots, positions)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 257, 8192])
def test_on_gpu(fmt, tokens):
    rng = np.random.default_rng(tokens)
    if tokens < 300:
        slots = rng.permutation(300)[:tokens] - 20
        positions = rng.integers(-1, 1 << 20, tokens)
    else:  # a prefill: longer and shorter runs than the ring
        slots, positions = call_of(rng, [(7, 5000, 33), (3, 128, 1), (200, 129, 1 << 19), (0, 2000, 0)], True, tokens)
    view = view_of(fmt, layers=3, slots=280, ring=128)
    check(ops.append_swa, "mosaic_gpu", view, rows_of(rng, tokens), ints(slots), ints(positions))


@pytest.mark.aot
def test_compiles_for_h100_in_place_and_without_spills():
    used = registers("""
import jax, jax.numpy as jnp
from pallas_kernels import Rings, append_swa
from tests.pallas_kernels.kernels import ROW_FORMATS, window_pools
S = jax.ShapeDtypeStruct
for name, fmt in ROW_FORMATS.items():
    layout, pools = window_pools(fmt, 3, 64, 128)
    def append(kv, slots, positions, layer, *pools):
        return append_swa(kv, slots, positions, Rings(layer, pools, 128, layout))
    for T in (1, 8192):
        ints = S((T,), jnp.int32)
        args = S((T, 512), jnp.bfloat16), ints, ints, S((), jnp.int32), *pools
        compiled = compile_for_h100(f"{name}-{T}", append, *args, donate_argnums=(4, 5, 6))
        assert compiled.memory_analysis().temp_size_in_bytes < 1024
        assert " copy(" not in compiled.as_text()
""")
    assert len(used) == 6 and max(used.values()) <= 64, used


@pytest.mark.aot
def test_a_slice_of_a_larger_array_is_not_fused_with_the_write():
    """XLA would fuse it at T=1, and forget that the kernel writes in place."""
    compile_in_process("""
import jax, jax.numpy as jnp
from pallas_kernels import Rings, append_swa
from tests.pallas_kernels.kernels import LAYOUTS
S, ints = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1,), jnp.int32)
pools = S((3, 64, 128, 448), jnp.uint8), S((3, 64, 128, 64), jnp.bfloat16), S((3, 64, 128, 8), jnp.uint8)
def append(x, slots, positions, layer, *pools):
    return append_swa(x[:, 512:1024], slots, positions, Rings(layer, pools, 128, LAYOUTS["v4"]))
args = S((1, 2048), jnp.bfloat16), ints, ints, S((), jnp.int32), *pools
text = compile_for_h100("sliced", append, *args, donate_argnums=(4, 5, 6)).as_text()
(write,) = [line for line in text[text.index("ENTRY") :].splitlines() if 'custom_call_target="mosaic_gpu' in line]
assert "output_to_operand_aliasing" in write, write
""")


def test_what_the_kernel_does_not_take_is_refused_before_launch():
    def call(view, kv, implementation="interpret"):
        return ops.append_swa(view, kv, ints([0]), ints([0]), implementation=implementation)

    kv = jnp.ones((1, DIM), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="takes kv as bfloat16.1, 512., got float32"):
        call(view_of(FORMATS["v4"]), kv.astype(jnp.float32))
    with pytest.raises(NotImplementedError, match="takes rows of 512 values, got 64 . 32"):
        call(swa_view(FORMATS["v4"]), kv[:, :96])
    with pytest.raises(NotImplementedError, match="formats 'v4', 'v41' and 'per_entry'"):
        call(view_of(kv_format("plain", jnp.bfloat16)), kv)
    with pytest.raises(NotImplementedError, match="cannot run as 'mosaic_gpu'"):
        call(view_of(FORMATS["v4"]), kv, "mosaic_gpu")


def test_the_best_implementation_falls_back_to_xla():
    """Within use_implementation an op takes the kernel where it can, and the reference where the kernel cannot."""
    view = swa_view(FORMATS["v4"])
    kv = jnp.ones((1, 96), jnp.bfloat16)
    with ops.use_implementation("interpret"):
        got = ops.append_swa(view, kv, ints([0]), ints([0]))
    same_bytes(got, ops.append_swa(view, kv, ints([0]), ints([0]), implementation="xla"))
