"""Decoding: one compiled step, a loop of steps on the device, sampling."""

from dsv4_jax.decode.drafts import DraftingModel
from dsv4_jax.decode.loop import decode_loop, sample_loop
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import BatchedSamplingParams, LogprobRows, SamplingParams, TopLogprobs, sample
from dsv4_jax.decode.step import Model, decode_step, draft_step, forward, last_tokens, sample_step, topk_step
from dsv4_jax.parallel.sharded_step import sharded_step
