"""Residual streams after a block and what the next block reads of them, in two launches."""

from pallas_kernels.hyper_connections.hyper_connections import (
    fuses_all_reduce as fuses_all_reduce,
    hyper_connections as hyper_connections,
)
