"""Warpgroup specialization: each warpgroup of a block runs the function of its role."""

from collections.abc import Callable, Mapping

import jax
import jax.experimental.pallas as pl


def dispatch_warpgroups(warpgroup: jax.Array, roles: Mapping[int, Callable[[], None]]) -> None:
    """Runs each warpgroup's role in a named scope, so that a profile shows the roles.

    Args:
      warpgroup: int32 number of this warpgroup.
      roles: warpgroup number -> function without arguments.
    """
    for number, role in roles.items():
        pl.when(warpgroup == number)(jax.named_scope(role.__name__)(role))
