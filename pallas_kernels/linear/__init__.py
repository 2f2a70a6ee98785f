"""Linear maps of few and of many tokens with bfloat16 or FP8 weights, and products of adapters."""

from pallas_kernels.linear.add_adapters import RANKS as ADAPTED_RANKS, add_adapters
from pallas_kernels.linear.bfloat16_linear import bfloat16_linear
from pallas_kernels.linear.quantized_linear import (
    MAX_NORMED_TOKENS,
    MAX_TOKENS as MAX_QUANTIZED_TOKENS,
    quantized_linear,
)
from pallas_kernels.linear.quantized_matmul import quantized_matmul
from pallas_kernels.linear.spec import BFLOAT16_TOKENS, LinearSpec
