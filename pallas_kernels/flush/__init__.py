"""Compression of the KV cache: stores state rows of tokens, and an entry for every window of tokens that closes."""

from pallas_kernels.flush.flush import flush
from pallas_kernels.flush.operands import CompressorOperands
