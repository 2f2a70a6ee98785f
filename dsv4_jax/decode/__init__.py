"""Decoding: one compiled step, loops over it, and sampling."""

from dsv4_jax.decode.loop import (
    decode_loop as decode_loop,
    generate as generate,
    sample_step as sample_step,
    stream as stream,
)
from dsv4_jax.decode.packed import PackedModel as PackedModel, pack as pack
from dsv4_jax.decode.sampling import Sampling as Sampling, sample as sample
from dsv4_jax.decode.step import decode_step as decode_step, forward as forward
