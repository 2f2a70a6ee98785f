"""Mosaic-GPU kernels of the cache: arrays in, arrays out; imports jax and numpy only.

Each kernel stands in a file named like the op in `dsv4_jax/ops` that calls it.
"""

from pallas_kernels.append_swa import append_swa as append_swa
from pallas_kernels.flush import Compressor as Compressor, flush as flush
from pallas_kernels.gather import (
    gather_all_compressed_kv as gather_all_compressed_kv,
    gather_compressed_kv as gather_compressed_kv,
    gather_swa_kv as gather_swa_kv,
)
