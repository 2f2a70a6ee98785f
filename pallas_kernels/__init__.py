"""Pallas Mosaic GPU kernels as functions of arrays. The package imports jax and numpy only.

A function raises NotImplementedError before any launch if it does not support a shape, a dtype or a layout.

The kernels for a module of `dsv4_jax/ops` are in the module or package with the same name here; only those for
`ops/add_adapters.py` are in `linear`. A module with kernels imports from the four library packages `runtime`, `mgpu`,
`formats` and `matmul`, but not from other modules with kernels.

Examples:
  A kernel runs on a GPU, or interpreted on the CPU:

  >>> import jax.numpy as jnp
  >>> from pallas_kernels import norm_rope
  >>> q = jnp.ones((1, 64, 512), jnp.bfloat16)
  >>> kv = jnp.full((1, 512), 4, jnp.bfloat16)
  >>> positions = jnp.zeros(1, jnp.int32)
  >>> q, kv = norm_rope(q, kv, jnp.full(512, 2.0), positions, jnp.ones(32), eps=1e-6, interpret=True)
  >>> float(q[0, 0, 0]), float(kv[0, 0])
  (1.0, 2.0)
"""

from pallas_kernels.all_reduce import all_reduce
from pallas_kernels.append_swa import append_swa
from pallas_kernels.experts import experts, grouped_experts
from pallas_kernels.flush import CompressorOperands, flush, pool_windows, write_entries
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
