"""Sparse attention kernels on quantized or dequantized rows: decode, prefill, and the combination of KV splits."""

from pallas_kernels.sparse_attention.dense_rows import DenseRows
from pallas_kernels.sparse_attention.online_softmax import HEADS
from pallas_kernels.sparse_attention.prefill_attention import MAX_PAIRS, prefill_attention
from pallas_kernels.sparse_attention.sparse_attention import attention_sums, sparse_attention
