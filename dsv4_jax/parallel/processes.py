"""Processes that run one program together (`jax.distributed`)."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def lost_process_named() -> Iterator[None]:
    """Says what may have happened if the body fails in JAX's runtime where several processes run one program.

    Raises:
      RuntimeError: it did, and there is more than one process; it names this one, and holds what JAX says.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise RuntimeError(
            f"a step failed in process {jax.process_index()} of {jax.process_count()}: another process of the mesh has "
            f"probably ended. End all of them and start again. JAX says: {error}"
        ) from error
