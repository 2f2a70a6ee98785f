"""Serving: an engine that runs many requests at once, and streaming, generation and search on top of it."""

from dsv4_jax.engine.drafters import Drafter, PromptLookup
from dsv4_jax.engine.engine import Engine
from dsv4_jax.engine.engine_config import EngineConfig
from dsv4_jax.engine.generate import generate, stream
from dsv4_jax.engine.metrics import EngineMetrics
from dsv4_jax.engine.requests import Output, Request, RequestParams
from dsv4_jax.engine.search import Candidate, beam_search, n_best
from dsv4_jax.engine.text import stream_text
