"""Quantization formats of the KV cache and of weights, as jnp functions, and FlashMLA's page layout."""

from dsv4_jax.quant.codecs import (
    FakeQuantKeys,
    FakeQuantRows,
    FP4Keys,
    FP4Rows,
    FP8Rows,
    IndexRows,
    KeyCodec,
    PlainKeys,
    PlainRows,
    RowCodec,
    Rows,
)
from dsv4_jax.quant.formats import (
    FORMATS,
    FakeQuantFormat,
    KVFormat,
    PerEntryFormat,
    PlainFormat,
    V4Format,
    V41Format,
    kv_format,
)
from dsv4_jax.quant.fp4 import (
    decode_e2m1,
    decode_mxfp4,
    decode_nvfp4,
    encode_e2m1,
    encode_fp4_entry,
    encode_mxfp4,
    encode_nvfp4,
)
from dsv4_jax.quant.fp8 import (
    decode_e4m3,
    decode_fp8_block,
    decode_fp8_entry,
    encode_e4m3,
    encode_fp8_block,
    encode_fp8_entry,
)
from dsv4_jax.quant.layer_slice import LayerSlice, layer_stacks, layer_value
from dsv4_jax.quant.numerics import (
    e8m0_ceil,
    e8m0_reciprocal,
    e8m0_value,
    hadamard,
    ordered_sum,
    round_to,
    straight_through,
)
from dsv4_jax.quant.pages import flashmla_page_bytes, from_flashmla_pages, to_flashmla_pages
from dsv4_jax.quant.quantized_weight import (
    BLOCKS,
    WEIGHT_BLOCK,
    QuantizedKind,
    QuantizedWeight,
    fp8_kind,
    is_quantized_kind,
    quantized_shapes,
    quantized_struct,
)
