"""Loops over stacked weights, compiled for an H100: kernels read the stacks, which nothing copies or slices."""

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import QuantizedWeight
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import slices


LAYERS = 20
DEPTH = 1024
INNER = 512
EXPERTS = 32
TOP_K = 6


def arguments(tokens):
    """(x, selected, weights, the stacks of a norm, of linear maps and of experts) of shapes alone."""

    def stack(dtype, *shape):
        return jax.ShapeDtypeStruct((LAYERS, *shape), dtype)

    def fp8(rows, columns):
        codes = stack(jnp.uint8, rows, columns)
        scale = stack(jnp.uint8, -(-rows // 128), columns // 128)
        return QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16))

    def fp4(rows, columns):
        codes, scale = (stack(jnp.uint8, EXPERTS, rows, columns // n) for n in (2, 32))
        return QuantizedWeight(codes, scale, "FP4", jnp.dtype(jnp.bfloat16))

    # The first map's scales are those of 12.5 blocks of rows.
    maps = stack(jnp.float32, DEPTH), fp8(DEPTH + 576, DEPTH), stack(jnp.bfloat16, 2 * DEPTH, DEPTH)
    routed, shared = ((kind(2 * INNER, DEPTH), kind(DEPTH, INNER)) for kind in (fp4, fp8))
    selected, weights = (jax.ShapeDtypeStruct((tokens, TOP_K), dtype) for dtype in (jnp.int32, jnp.float32))
    return jax.ShapeDtypeStruct((tokens, DEPTH), jnp.bfloat16), selected, weights, (*maps, routed, shared)


def loop(x, selected, weights, stack):
    """Applies all layers' maps and experts; for few tokens also a norm, bfloat16 beside FP8, and bfloat16 alone."""

    def body(x, layer):
        norm, quantized, plain, routed, shared = slices(stack, *layer)
        few = x.shape[0] <= 32
        matrices = (quantized, plain) if few else (quantized,)
        spec = LinearSpec(tuple(matrix.shape[0] for matrix in matrices), jnp.bfloat16)
        x = ops.linear(x, matrices, spec, norm=(norm, 1e-6) if few else None)[0][:, :DEPTH]
        if few:
            x = ops.linear(x, plain, LinearSpec((DEPTH, DEPTH), jnp.bfloat16))[0]
        return ops.experts(x, selected, weights, *routed, None, shared, limit=7.0), None

    with ops.use_implementation("mosaic_gpu"):
        return jax.lax.scan(body, x, (stack, jnp.arange(LAYERS, dtype=jnp.int32)))[0]


@pytest.mark.aot
@pytest.mark.parametrize(("tokens", "most"), [(8, 80), (256, 168)])
def test_no_stack_is_copied_or_sliced(tokens, most):
    used = registers(f"""
from tests.pallas_kernels.stacks import readers_of_stacks
from tests.pallas_kernels.test_layer_stacks import LAYERS, arguments, loop
text = compile_for_h100("loop", loop, *arguments({tokens})).as_text()
readers = readers_of_stacks(text, LAYERS)
assert readers - {{"bitcast"}} == {{"custom-call", "tuple"}}, readers
""")
    assert used["loop"] <= most, used
