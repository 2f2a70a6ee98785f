"""Decoding: one compiled step, an engine of many requests, loops over it, sampling and drafts."""

from dsv4_jax.decode.engine import Engine as Engine
from dsv4_jax.decode.loop import decode_loop as decode_loop, generate as generate, stream as stream
from dsv4_jax.decode.metrics import EngineMetrics as EngineMetrics, PoolUse as PoolUse
from dsv4_jax.decode.packed import PackedModel as PackedModel, pack as pack
from dsv4_jax.decode.requests import Output as Output, Request as Request
from dsv4_jax.decode.sampling import Sampling as Sampling, SamplingRows as SamplingRows, sample as sample
from dsv4_jax.decode.search import (
    Candidate as Candidate,
    beam_search as beam_search,
    n_best as n_best,
    top_step as top_step,
)
from dsv4_jax.decode.speculation import Drafter as Drafter, PromptLookup as PromptLookup
from dsv4_jax.decode.step import decode_step as decode_step, forward as forward, sample_step as sample_step
