"""The outputs of a linear map's kernels: which they take, and storing tiles of few tokens to them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.linear.spec import LinearSpec
from pallas_kernels.matmul.quantized_weights import ROWS, SCALED
from pallas_kernels.mgpu import wgmma
from pallas_kernels.runtime.checks import check_rules


Outputs = tuple[tuple[int, jnp.dtype], ...]


def checked_outputs(spec: LinearSpec, rows: int, swiglu_limit: float | None = None) -> Outputs:
    """Returns the size and the dtype of each output of weights with so many rows.

    Raises:
      NotImplementedError: an output has another dtype or size, or groups have another size, than kernels take.
    """
    outputs, groups = spec.outputs(rows), spec.num_groups
    sizes, dtypes = [size for size, _ in outputs], {str(dtype) for _, dtype in outputs}
    check_rules(
        {
            f"outputs in float32 or bfloat16, got {', '.join(dtypes)}": dtypes <= {"float32", "bfloat16"},
            f"outputs of a multiple of {ROWS} rows, got {sizes}": not any(size % ROWS for size in sizes),
            f"groups of a multiple of {SCALED} rows, got {groups} groups of {rows} rows": groups == 1
            or rows % (groups * SCALED) == 0,
            f"gate and up of a multiple of {SCALED} rows, got {sizes}": swiglu_limit is None or sizes[0] % SCALED == 0,
        }
    )
    return outputs


def store_tile(outs_gmem: Sequence[Any], outputs: Outputs, tile: jax.Array, sums: jax.Array) -> None:
    """Writes 64 rows of the product, sums [64, tokens] float32, to the output that has them."""
    row, start = tile * ROWS, 0
    for out_gmem, (size, _) in zip(outs_gmem, outputs, strict=False):

        @pl.when((row >= start) & (row < start + size))
        def _(out_gmem=out_gmem, start=start):
            wgmma.store(out_gmem.at[:, pl.ds(row - start, ROWS)], sums, transposed=True)

        start += size
