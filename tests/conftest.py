"""Settings for every test: strict promotion finds silent casts and broadcasts; oracle data lies in tests/data."""

import jax


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
