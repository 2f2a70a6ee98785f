"""Products that compilers never contract with a sum to an FMA, cheaper than `exact_math.product` and its fence."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.formats import exact_math
from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.runtime.launch import primitive


def product_in(layout: Callable[..., Any]) -> Callable[[jax.Array, jax.Array | float], jax.Array]:
    """Returns `exact_math.product` for float32 arrays whose register layout is `layout(shape)`."""

    @primitive
    def product(x: jax.Array, y: jax.Array | float) -> jax.Array:
        """Returns x * y, computed by an instruction of its own."""
        return exact_math.product(x, y)

    @product.mosaic
    def _product_mosaic(x, y):
        factors = [] if isinstance(y, float) else [y]

        def emit(x, *factors):
            left = mlir.values(x)
            right = mlir.values(*factors) if factors else [mlir.f32(y)] * len(left)
            return [
                mlir.ptx("mul.rn.f32 $0, $1, $2;", *pair, results=mlir.f32_type(), pure=True)
                for pair in zip(left, right, strict=True)
            ]

        return mlir.inline(emit, x, *factors, layout=layout, returns=x)

    return product


vector_product = product_in(lambda shape: vectors.layout(*shape))
