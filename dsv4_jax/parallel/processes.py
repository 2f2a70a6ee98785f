"""Processes that run one program together (`jax.distributed`)."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def lost_process_named() -> Iterator[None]:
    """Explains failures of JAX's runtime in the body when several processes run one program.

    Raises RuntimeError if the body failed and there are several processes. The message names this one and quotes JAX.
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
