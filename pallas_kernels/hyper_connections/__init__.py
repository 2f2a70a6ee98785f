"""Residual streams after a block and what the next block reads of them, in two launches."""

from pallas_kernels.hyper_connections.hyper_connections import (
    adds_up_parts as adds_up_parts,
    hyper_connections as hyper_connections,
)
