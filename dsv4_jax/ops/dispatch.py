"""Which implementation of an op runs."""

from collections.abc import Callable, Mapping


KNOWN = ("xla", "mosaic_gpu", "interpret")


def choose(op: str, implementations: Mapping[str, Callable], implementation: str | None) -> Callable:
    """Returns the function that computes `op`.

    Args:
      op: the op's public name, for messages.
      implementations: name -> function, best first.
      implementation: None for the first one, or the name of exactly one.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the op has no such implementation.
    """
    if implementation is None:
        return next(iter(implementations.values()))
    if implementation not in KNOWN:
        raise ValueError(f"{implementation=} is not known; choose None or one of {KNOWN}")
    if implementation not in implementations:
        raise NotImplementedError(
            f"{op} has no implementation {implementation!r}; available: {sorted(implementations)}"
        )
    return implementations[implementation]
