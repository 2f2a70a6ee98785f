"""Routed experts whose matrices stay in FP4, for few tokens and for many."""

from pallas_kernels.experts.experts import MOST_PAIRS as MOST_PAIRS, experts as experts
from pallas_kernels.experts.grouped_experts import grouped_experts as grouped_experts
