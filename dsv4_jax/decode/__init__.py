"""Decoding: compiled steps, a loop of decode steps on the device, draft tokens, and sampling."""

from dsv4_jax.decode.drafts import DraftOptions, Drafts
from dsv4_jax.decode.exact_logprobs import RolloutShape, logprobs
from dsv4_jax.decode.logits_processor import LogitsProcessor
from dsv4_jax.decode.loop import LoopOutput, decode_loop
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import BatchedSamplingParams, LogprobOptions, SamplingParams, TopLogprobs, sample
from dsv4_jax.decode.step import EarlierTokens, Model, StepOutput, decode_step, forward, last_token_indices, sample_step
from dsv4_jax.parallel.sharded_step import sharded_step
