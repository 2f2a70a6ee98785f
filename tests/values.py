"""Values of a model's parameters."""

import numpy as np
from flax import nnx

from dsv4_jax.nn import parameter_views
from dsv4_jax.quant import QuantizedWeight


def parameter_values(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns {path: values} of a model's parameters, as `parameter_views` names them.

    NumPy indexes the arrays where it can: JAX would compile programs for each layer and shape.
    """
    return {path: np.asarray(_read(view)) for path, view in parameter_views(model).items()}


def _read(view):
    value = view.variable.get_value()
    return view.read() if isinstance(value, QuantizedWeight) else np.asarray(value)[view.index]
