"""Routed experts whose matrices stay in FP4, for few tokens."""

from pallas_kernels.experts.experts import experts as experts
