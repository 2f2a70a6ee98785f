"""Routed experts whose matrices stay in FP4, for few tokens."""

from pallas_kernels.experts.experts import MOST_PAIRS as MOST_PAIRS, experts as experts
