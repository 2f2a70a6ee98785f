"""Linear maps of few tokens, and of any number of them where weights are in the release's FP8."""

from pallas_kernels.linear.linear import MOST_TOKENS as MOST_TOKENS, linear as linear
from pallas_kernels.linear.stored_linear import (
    MOST_NORMED_TOKENS as MOST_NORMED_TOKENS,
    MOST_STORED_TOKENS as MOST_STORED_TOKENS,
    stored_linear as stored_linear,
)
from pallas_kernels.linear.stored_matmul import stored_matmul as stored_matmul
