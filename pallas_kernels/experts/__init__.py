"""Routed experts with FP4 or bfloat16 weights: `experts` is for few tokens, `grouped_experts` for many."""

from pallas_kernels.experts.experts import MAX_PAIRS, MAX_SHARED_TOKENS, experts, sum_of_experts
from pallas_kernels.experts.grouped_experts import grouped_experts
