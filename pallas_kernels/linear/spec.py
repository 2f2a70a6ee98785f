"""The static description of a linear map, and functions by which kernels check it and store tiles to its outputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.matmul.quantized_weights import ROWS, SCALED
from pallas_kernels.mgpu import wgmma
from pallas_kernels.runtime.checks import check_rules


Outputs = tuple[tuple[int, jnp.dtype], ...]  # (number of rows, dtype) of each output
BFLOAT16_TOKENS = range(8, 65, 8)  # numbers of tokens that the kernels with bfloat16 weights take


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Description of a linear map: the groups of a weight's rows, and how the product is split and rounded.

    Attributes:
      output_sizes: number of rows of each output; they sum to the rows of all weights. None means one output.
      output_dtype: dtype of all outputs, or a tuple with the dtype of each. Sums are in float32.
      num_groups: number of equal groups of the weight's rows. Group g multiplies the g-th share of the input channels.
    """

    output_sizes: tuple[int, ...] | None = None
    output_dtype: DTypeLike | tuple[DTypeLike, ...] = jnp.float32
    num_groups: int = 1

    def outputs(self, rows: int) -> Outputs:
        """Returns the size and the dtype of each output.

        Args:
          rows: number of rows of all weights.

        Raises:
          ValueError: the spec does not fit weights with this number of rows.
        """
        sizes = (rows,) if self.output_sizes is None else self.output_sizes
        dtypes = self.output_dtype if isinstance(self.output_dtype, tuple) else (self.output_dtype,) * len(sizes)
        if sum(sizes) != rows:
            raise ValueError(f"output_sizes={sizes} must sum to {rows}, the number of rows of the weights")
        if len(dtypes) != len(sizes):
            raise ValueError(f"{len(sizes)} outputs want as many dtypes, got output_dtype={self.output_dtype}")
        if rows % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide the weight's {rows} rows")
        return tuple((size, jnp.dtype(dtype)) for size, dtype in zip(sizes, dtypes, strict=True))


def checked_outputs(
    spec: LinearSpec,
    rows: int,
    swiglu_limit: float | None = None,
    *,
    gate_multiple: int = SCALED,
    min_last: int = ROWS,
) -> Outputs:
    """Returns the size and the dtype of each output, and checks that kernels take them.

    Args:
      spec: description of the linear map.
      rows: number of rows of all weights.
      swiglu_limit: clipping limit of SwiGLU, or None.
      gate_multiple: with SwiGLU, the number of rows of the gate must be a multiple of this number.
      min_last: a size that the last output may have even if it is not a multiple of 64.

    Raises:
      NotImplementedError: kernels do not take the outputs' sizes or dtypes, or the size of the groups.
      ValueError: the spec does not fit weights with this number of rows.
    """
    outputs = spec.outputs(rows)
    groups = spec.num_groups
    sizes = [size for size, _ in outputs]
    dtypes = {str(dtype) for _, dtype in outputs}
    last_fits = sizes[-1] % ROWS == 0 or sizes[-1] == min_last
    sizes_fit = last_fits and not any(size % ROWS for size in sizes[:-1])
    groups_fit = groups == 1 or rows % (groups * SCALED) == 0
    gate_fits = swiglu_limit is None or sizes[0] % gate_multiple == 0
    check_rules(
        {
            f"outputs in float32 or bfloat16, got {', '.join(dtypes)}": dtypes <= {"float32", "bfloat16"},
            f"outputs of a multiple of {ROWS} rows, got {sizes}": sizes_fit,
            f"groups of a multiple of {SCALED} rows, got {groups} groups of {rows} rows": groups_fit,
            f"gate and up of a multiple of {gate_multiple} rows, got {sizes}": gate_fits,
        }
    )
    return outputs


def out_types(outputs: Outputs, tokens: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((tokens, size), dtype) for size, dtype in outputs]


def at_row(refs: Sequence[Any], sizes: Sequence[int], row: jax.Array, function: Callable[[Any, jax.Array], None]):
    """Calls `function(ref, r)` with the reference that contains row `row`, and the row's index r in that reference.

    Args:
      refs: references in global memory, such as those of weights or of outputs.
      sizes: number of rows of each reference.
      row: int32 scalar, index of the row, counted over all references.
      function: function of a reference and the index of a row in it; it is not called for a row past the end.
    """
    first_row = 0
    for ref, size in zip(refs, sizes, strict=False):
        has_row = (row >= first_row) & (row < first_row + size)
        pl.when(has_row)(lambda ref=ref, first_row=first_row: function(ref, row - first_row))
        first_row += size


def store_tile(outs_gmem: Sequence[Any], outputs: Outputs, tile: jax.Array, sums: jax.Array) -> None:
    """Writes a tile of 64 rows of the product to the output that contains these rows.

    An output of only 32 rows gets the first 32 rows of the tile.

    Args:
      outs_gmem: [tokens, size] outputs in global memory.
      outputs: sizes and dtypes of the outputs.
      tile: int32 scalar, index of the tile in the product.
      sums: [64, tokens] float32 rows of the product.
    """

    def store(out_gmem, row):
        wgmma.store(out_gmem.at[:, pl.ds(row, min(ROWS, out_gmem.shape[1]))], sums, transposed=True)

    at_row(outs_gmem, [size for size, _ in outputs], tile * ROWS, store)
