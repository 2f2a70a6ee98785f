"""Settings for every test: strict promotion finds silent casts and broadcasts; oracle data lies in tests/data."""

import os


# The kernel interpreter blocks a thread of XLA's for each simulated one that waits: on a machine with two cores, where
# XLA would make two, it can wait for ever. Read when the backend starts, so before any use of JAX.
os.environ.setdefault("NPROC", "16")

import jax  # noqa: E402


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
