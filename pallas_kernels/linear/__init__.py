"""Linear maps of few tokens, and of any number of them where weights are in the release's FP8."""

from pallas_kernels.linear.bfloat16_linear import MAX_TOKENS as MAX_BFLOAT16_TOKENS, bfloat16_linear
from pallas_kernels.linear.quantized_linear import (
    MAX_NORMED_TOKENS,
    MAX_TOKENS as MAX_QUANTIZED_TOKENS,
    quantized_linear,
)
from pallas_kernels.linear.quantized_matmul import quantized_matmul
from pallas_kernels.linear.spec import LinearSpec
