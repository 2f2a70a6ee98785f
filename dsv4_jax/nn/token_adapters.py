"""The adapters that the tokens of a step use, for modules that have adapters (`nn.lora`)."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import jax
from jaxtyping import Array, Int

from dsv4_jax import ops


_numbers: contextvars.ContextVar[Any] = contextvars.ContextVar("adapter_numbers", default=None)


@contextlib.contextmanager
def token_adapters(numbers: Int[Array, "T"] | None) -> Iterator[None]:
    """Sets the adapter of each token for the calls of modules in this context.

    Args:
      numbers: [T] int32 index of each token's adapter; -1 = none. None = no token has an adapter.
    """
    token = _numbers.set(numbers)
    try:
        yield
    finally:
        _numbers.reset(token)


@jax.named_scope("projections")
def add_products(outputs, x, adapters):
    """Adds the product of each token's adapter to the outputs of several linear maps that have the same input x.

    Returns the outputs unchanged if no token has an adapter, see `token_adapters`.

    Args:
      outputs: output [T, m] of each map.
      x: [T, k] input of the maps.
      adapters: `lora.Adapters` of each map.
    """
    numbers = _numbers.get()
    if numbers is None:
        return outputs
    downs = [matrices.down.get_value() for matrices in adapters]
    ups = [matrices.up.get_value() for matrices in adapters]
    return ops.add_adapters(outputs, x, downs, ups, numbers, adapters[0].scales)
