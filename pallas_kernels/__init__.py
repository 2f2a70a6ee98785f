"""Mosaic-GPU kernels: arrays in, arrays out; imports jax and numpy only.

For shapes, dtypes and layouts that it does not take a function raises NotImplementedError before any launch.

Each op of `dsv4_jax/ops` that has a kernel has a module or a package of the same name here. Ops import only the four
library rooms `runtime`, `mgpu`, `formats` and `matmul`, never each other.
"""

from pallas_kernels.all_reduce import all_reduce
from pallas_kernels.append_swa import append_swa
from pallas_kernels.experts import experts, grouped_experts
from pallas_kernels.flush import CompressorOperands, flush
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.gather import gather_all_compressed_kv, gather_compressed_kv, gather_swa_kv
from pallas_kernels.hyper_connections import hyper_connections
from pallas_kernels.indexer_scores import IndexerKeys, indexer_scores
from pallas_kernels.indexer_scores.round_index_query import round_index_query
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.linear import bfloat16_linear, quantized_linear, quantized_matmul
from pallas_kernels.norm_rope import norm_rope, norm_rope_append
from pallas_kernels.router import router
from pallas_kernels.sparse_attention import sparse_attention
