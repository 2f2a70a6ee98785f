"""Warpgroup specialization: each warpgroup of a block runs the function of its role."""

from collections.abc import Callable, Mapping

import jax
import jax.experimental.pallas as pl


def dispatch_warpgroups(warpgroup: jax.Array, roles: Mapping[int, Callable[[], None]]) -> None:
    """Runs each warpgroup's role in a named scope, so that a profile shows the roles.

    Args:
      warpgroup: int32 scalar, index of this warpgroup in its block.
      roles: {index of a warpgroup: function without arguments}. The named scope takes the name of the function.
    """
    for number, role in roles.items():
        pl.when(warpgroup == number)(jax.named_scope(role.__name__)(role))
