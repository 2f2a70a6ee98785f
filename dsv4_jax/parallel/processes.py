"""Error messages for several processes that run one program together (`jax.distributed`)."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def lost_process_named() -> Iterator[None]:
    """Explains a failure of JAX's runtime in the body of the `with` statement, if several processes run one program.

    Raises:
      RuntimeError: the body raised JaxRuntimeError and there are several processes. The message contains the index of
        this process and JAX's message.
      jax.errors.JaxRuntimeError: the body raised it and there is one process.
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
