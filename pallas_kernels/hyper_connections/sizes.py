"""What the launches have in common."""

import jax
from jax import lax


STREAMS = 4
SQUARES = 31  # where partial sums have that of squares; logits come first


def mixing_terms(mixing: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(post [T, 4], comb [T, 4, 4]) of mixing weights [T, 24]: 4 of `pre`, 4 of `post`, 16 of `comb`."""
    comb = lax.slice_in_dim(mixing, 2 * STREAMS, (2 + STREAMS) * STREAMS, axis=1)
    return lax.slice_in_dim(mixing, STREAMS, 2 * STREAMS, axis=1), comb.reshape(-1, STREAMS, STREAMS)
