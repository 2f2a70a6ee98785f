"""Routed experts whose matrices are FP4 or bfloat16, for few tokens and for many."""

from pallas_kernels.experts.experts import (
    MOST_PAIRS as MOST_PAIRS,
    MOST_SHARED_TOKENS as MOST_SHARED_TOKENS,
    experts as experts,
)
from pallas_kernels.experts.grouped_experts import grouped_experts as grouped_experts
