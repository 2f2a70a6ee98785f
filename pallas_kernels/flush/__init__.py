"""Compression of the KV cache: stores state rows of tokens, and an entry for every window of tokens that closes."""

from pallas_kernels.flush.flush import flush, pool_windows, write_entries
from pallas_kernels.flush.operands import CompressorOperands
