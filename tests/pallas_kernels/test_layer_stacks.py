"""Loops over stacked weights, compiled for an H100: kernels read the stacks, which nothing copies or slices."""

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import QuantizedWeight
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import slices


LAYERS, DEPTH, INNER, EXPERTS, TOP_K = 20, 1024, 512, 32, 6


def arguments(tokens):
    """(x, weights of a norm, of linear maps) of shapes alone, with a leading axis of layers of weights."""

    def stack(dtype, *shape):
        return jax.ShapeDtypeStruct((LAYERS, *shape), dtype)

    def quantized(kind, codes, scale):
        return QuantizedWeight(stack(jnp.uint8, *codes), stack(jnp.uint8, *scale), kind, jnp.dtype(jnp.bfloat16))

    def fp8(rows, columns):
        return quantized("FP8", (rows, columns), (-(-rows // 128), columns // 128))

    norm, plain = stack(jnp.float32, DEPTH), stack(jnp.bfloat16, 2 * DEPTH, DEPTH)
    # Scales of 12.5 blocks of rows.
    return jax.ShapeDtypeStruct((tokens, DEPTH), jnp.bfloat16), (norm, fp8(DEPTH + 576, DEPTH), plain)


def loop(x, stack):
    """Applies all layers' maps: FP8, and for few tokens a norm, bfloat16 beside FP8, and bfloat16 alone."""

    def body(x, own):
        weights, layer = own
        norm, quantized, plain = slices(stack, weights, layer)
        few = x.shape[0] <= 32
        matrices = (quantized, plain) if few else (quantized,)
        spec = LinearSpec(tuple(matrix.shape[0] for matrix in matrices), jnp.bfloat16)
        x = ops.linear(x, matrices, spec, norm=(norm, 1e-6) if few else None)[0][:, :DEPTH]
        if few:
            x = ops.linear(x, plain, LinearSpec((DEPTH, DEPTH), jnp.bfloat16))[0]
        return x, None

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
