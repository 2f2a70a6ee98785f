"""Hyper-connections: one launch for new residual streams and logits, one for mixing weights, collapse and norm."""

from pallas_kernels.hyper_connections.hyper_connections import fuses_all_reduce, hyper_connections
