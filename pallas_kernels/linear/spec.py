"""The static description of a linear map."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class LinearSpec:
    """Description of a linear map: the groups of a weight's rows, and how the product is split and rounded.

    Attributes:
      output_sizes: number of rows of each output; they sum to the rows of all weights. None means one output.
      output_dtype: dtype of all outputs, or a tuple with the dtype of each. Sums are in float32.
      num_groups: number of diagonal blocks: the g-th share of the weight's rows multiplies the g-th share of the input
        channels.
    """

    output_sizes: tuple[int, ...] | None = None
    output_dtype: DTypeLike | tuple[DTypeLike, ...] = jnp.float32
    num_groups: int = 1

    def outputs(self, rows: int) -> tuple[tuple[int, jnp.dtype], ...]:
        """Returns the size and the dtype of each output.

        Args:
          rows: number of rows of all weights.

        Raises:
          ValueError: the spec does not fit a weight with so many rows.
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
