"""Linear maps of few tokens, and of any number of them where weights are in the release's FP8."""

from pallas_kernels.linear.linear import MAX_TOKENS as MAX_TOKENS, linear as linear
from pallas_kernels.linear.quantized_linear import (
    MAX_NORMED_TOKENS as MAX_NORMED_TOKENS,
    MAX_STORED_TOKENS as MAX_STORED_TOKENS,
    quantized_linear as quantized_linear,
)
from pallas_kernels.linear.quantized_matmul import quantized_matmul as quantized_matmul
from pallas_kernels.linear.spec import LinearSpec as LinearSpec
