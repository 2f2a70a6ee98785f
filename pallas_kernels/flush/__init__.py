"""Compression of the KV cache: stores the state rows of tokens, and an entry for each window of tokens that closes."""

from pallas_kernels.flush.flush import flush, pool_windows, write_entries
from pallas_kernels.flush.operands import CompressorOperands
