"""Sparse attention on quantised rows."""

from pallas_kernels.sparse_attention.dense_rows import DenseRows
from pallas_kernels.sparse_attention.few_queries import HEADS
from pallas_kernels.sparse_attention.many_queries import MOST_PAIRS, many_queries
from pallas_kernels.sparse_attention.row_addresses import Paged
from pallas_kernels.sparse_attention.sparse_attention import attention_sums, sparse_attention
