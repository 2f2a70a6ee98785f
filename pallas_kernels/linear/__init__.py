"""Linear maps of few tokens: of bfloat16 weights, and of weights in the release's FP8."""

from pallas_kernels.linear.linear import MOST_TOKENS as MOST_TOKENS, linear as linear
from pallas_kernels.linear.stored_linear import MOST_STORED_TOKENS as MOST_STORED_TOKENS, stored_linear as stored_linear
