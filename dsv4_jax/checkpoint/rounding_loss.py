"""The differences between the values of a checkpoint and the values that another storage holds."""

import collections
import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class TensorLoss:
    """The loss in one tensor.

    Attributes:
      num_values: number of values in the tensor.
      differences: sum of the squared differences between values and stored values.
      values: sum of the squared values, over those that were compared.
    """

    num_values: int = 0
    differences: float = 0.0
    values: float = 0.0

    @property
    def error(self) -> float:
        """The relative error: the root mean square of the differences divided by the root mean square of the values."""
        return math.sqrt(self.differences / self.values) if self.differences else 0.0


@dataclasses.dataclass
class RoundingLoss:
    """The errors of rounding in all tensors with one storage format, summed up while the tensors are written.

    Errors are computed per tensor. The largest relative error of a single value would say little: a small value in a
    block of larger ones becomes 0, which is a relative error of 1.

    Attributes:
      num_rounded: number of values that changed.
      num_zeroed: number of values that were not 0 and became 0.
      tensors: {name of a tensor: its loss}.
    """

    num_rounded: int = 0
    num_zeroed: int = 0
    tensors: dict[str, TensorLoss] = dataclasses.field(default_factory=lambda: collections.defaultdict(TensorLoss))

    def add(self, name: str, values: np.ndarray, stored: np.ndarray) -> None:
        """Counts values of a tensor, and compares them with the values that are stored in their place.

        Args:
          name: name of the tensor.
          values: some of its values.
          stored: the stored values, in the shape of `values`; `values` itself if no value was converted.
        """
        tensor = self.tensors[name]
        tensor.num_values += values.size
        if stored is values:
            return
        exact = values.astype(np.float32, copy=False).reshape(-1)
        rounded = stored.astype(np.float32, copy=False).reshape(-1)
        difference = rounded - exact
        self.num_rounded += int(np.count_nonzero(difference))
        self.num_zeroed += int(np.count_nonzero((rounded == 0) & (exact != 0)))
        # `einsum` converts to float64 in a small buffer, not the whole array.
        tensor.differences += float(np.einsum("i,i->", difference, difference, dtype=np.float64))
        tensor.values += float(np.einsum("i,i->", exact, exact, dtype=np.float64))

    @property
    def num_values(self) -> int:
        """The number of values of all tensors."""
        return sum(tensor.num_values for tensor in self.tensors.values())

    @property
    def error(self) -> float:
        """The root mean square of the tensors' errors, weighted by their numbers of values."""
        total = sum(tensor.num_values * tensor.error**2 for tensor in self.tensors.values())
        return math.sqrt(total / max(self.num_values, 1))

    @property
    def largest(self) -> tuple[float, str]:
        """The largest error of a tensor, and this tensor's name."""
        return max((tensor.error, name) for name, tensor in self.tensors.items())
