"""Training with the values that a checkpoint in the release's storage will hold."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.match import listing
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.quant import QuantizedWeight, is_quantized_kind, round_to, straight_through


def fake_quantize(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """Returns a copy of a model whose weights have the values that `save_release` stores: FP8, FP4 and bfloat16.

    The gradient is straight-through: the gradient of a rounded weight is passed on to the given weight unchanged. Call
    this function within the loss, and let the optimizer update the given model::

        def loss(model):
            return -logprobs(fake_quantize(model), tokens, lengths, shape).mean()

        gradient = nnx.grad(loss)(model)
        engine.update_weights(fake_quantize(model))

    The copy has the structure, shapes and dtypes of the model, so it can take the model's place everywhere. It takes
    the memory of a second set of weights. Each call makes one pass over the weights. Weights that the storage holds
    exactly do not change, for instance the weights of such a copy. Quantized weights and adapters do not change either.

    On a mesh call this function outside of `sharded_step`, because a shard may end within a block of values with one
    scale.

    Args:
      model: the model, with float32 or bfloat16 weights.

    Raises:
      ValueError: the model lacks parameters of the release, since another module is in the place of a linear map.
    """
    rounded = nnx.clone(model)
    views = parameter_views(rounded)
    table = list(keys.weights(model.config, "release"))
    if missing := sorted({weight.path for weight in table} - views.keys()):
        raise ValueError(f"the model lacks parameters of the release:{listing(missing)}")
    # Parameters that share a variable have the same storage.
    weight_of_variable = {id(views[weight.path].variable): weight for weight in table}
    for weight in weight_of_variable.values():
        variable: Any = views[weight.path].variable
        if not isinstance(variable.get_value(), QuantizedWeight):
            variable.set_value(_as_stored(variable.get_value(), weight.dtype))
    return rounded


@functools.partial(jax.jit, static_argnames="dtype")
def _as_stored(values, dtype):
    """Returns parameters as they are read back from a storage, see `Weight.dtype`. The gradient is straight-through."""
    if not is_quantized_kind(dtype) and dtype != "BF16":
        return values

    def rounded(still):
        """Rounds `still`, the values without gradient, to the values that are read back."""
        if is_quantized_kind(dtype):
            return QuantizedWeight.encode(still, dtype)[...]
        return round_to(round_to(still, jnp.bfloat16), values.dtype)

    still = jax.lax.stop_gradient(values)
    # On a mesh, a shard may end within a block of values with one scale. `auto_axes` lets XLA choose the shardings of
    # the intermediate arrays.
    rounded = jax.sharding.auto_axes(rounded, out_sharding=jax.typeof(values).sharding)
    return straight_through(rounded(still), values)
