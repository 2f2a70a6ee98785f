"""Launches compiled steps. Their arguments are checked on the host first, so that an error does not lose the cache."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.host.step_order import check_not_donated, check_order, record_step
from dsv4_jax.parallel.sharded_step import sharded_step


def compiled_step(step: Callable[..., Any]) -> Any:
    """Decorates a step, so that it is jitted, sharded over its arguments' mesh, and launched by `launch`.

    Args:
      step: function of `(model, cache, batch, ...)` that returns a tuple whose last item is the cache. The cache is
        donated. Keyword-only arguments, and no others, are static.

    Returns:
      A function with the signature of the step, and with the methods of a jitted function that this package uses. Its
      attribute `body` is the undecorated step, for use within another traced function.
    """
    sharded = sharded_step(step)
    program: Any = jax.jit(sharded, donate_argnames="cache", static_argnames=tuple(static_names(step)))

    @functools.wraps(sharded)
    def call(model: Any, cache: Any, batch: Any, *args: Any, **options: Any) -> Any:
        return launch(program, model, cache, batch, *args, **options)

    methods = {name: getattr(program, name) for name in ("trace", "lower", "eval_shape", "clear_cache", "_cache_size")}
    vars(call).update(methods, body=step)
    return call


@functools.cache
def static_names(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of a function's keyword-only arguments."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY)


def launch(program: Callable[..., Any], model: Any, cache: Any, batch: Any, *args: Any, **options: Any) -> Any:
    """Calls a compiled step and records the cache that it returns, see `host.step_order`.

    Args:
      program: the jitted or compiled step.
      model, cache, batch, args: positional arguments of the step.
      options: keyword arguments of the step.

    Returns:
      The results of the step.

    Raises:
      TypeError: the model, the cache and the batch are not in this order.
      RuntimeError: the cache was donated to an earlier step.
      ValueError: by its record, the cache lacks an earlier batch, or has already run this batch or a later one. Nothing
        was changed.
    """
    is_cache = isinstance(cache, KVCache)  # a user's model may have another class of cache
    if isinstance(model, KVCache | Batch) or isinstance(cache, Batch) or (is_cache and not isinstance(batch, Batch)):
        kinds = ", ".join(type(x).__name__ for x in (model, cache, batch))
        raise TypeError(f"a step takes (model, cache, batch) in this order, got ({kinds})")
    if not is_cache:
        return program(model, cache, batch, *args, **options)
    check_not_donated(cache)
    check_order(cache, batch)
    results = program(model, cache, batch, *args, **options)
    record_step(cache, batch, results[-1])
    return results
