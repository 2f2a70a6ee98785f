"""Linear maps of few and of many tokens with bfloat16 or FP8 weights, and products of adapters."""

from pallas_kernels.linear.add_adapters import (
    MAX_TOKENS as MAX_ADAPTED_TOKENS,
    RANKS as ADAPTED_RANKS,
    TOKENS as ADAPTED_TOKENS,
    add_adapters,
)
from pallas_kernels.linear.bfloat16_linear import (
    MAX_TOKENS as MAX_BFLOAT16_TOKENS,
    TOKENS as BFLOAT16_TOKENS,
    bfloat16_linear,
)
from pallas_kernels.linear.quantized_linear import (
    MAX_NORMED_TOKENS,
    MAX_TOKENS as MAX_QUANTIZED_TOKENS,
    quantized_linear,
)
from pallas_kernels.linear.quantized_matmul import quantized_matmul
from pallas_kernels.linear.spec import LinearSpec
