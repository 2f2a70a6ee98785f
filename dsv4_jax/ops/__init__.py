"""The ops of the model and its KV cache: public functions, each with a jnp reference and most with a GPU kernel.

Examples:
  An op runs the best implementation for its device and arguments. The argument `implementation` chooses one for a call,
  and `use_implementation` one for a block of code:

  >>> import jax.numpy as jnp
  >>> from dsv4_jax import ops
  >>> scores = jnp.array([[0.5, 2.0, 1.0, 3.0]])
  >>> lengths = jnp.array([3])
  >>> ops.indexer_topk(scores, lengths, 2).tolist()
  [[1, 2]]
  >>> ops.indexer_topk(scores, lengths, 2, implementation="xla").tolist()
  [[1, 2]]
  >>> with ops.use_implementation("xla"):
  ...     ops.indexer_topk(scores, lengths, 4).tolist()
  [[0, 1, 2, -1]]
"""

from dsv4_jax.ops.add_adapters import add_adapters
from dsv4_jax.ops.all_reduce import (
    all_gather,
    all_reduce,
    local_rows,
    model_index,
    reduce_scatter,
    scatters_rows,
    with_mailboxes,
)
from dsv4_jax.ops.append_swa import append_swa
from dsv4_jax.ops.candidates import candidate_blocks, candidate_entries, candidate_lengths, entries_at
from dsv4_jax.ops.dispatch import use_implementation
from dsv4_jax.ops.experts import experts
from dsv4_jax.ops.flush import ClosedWindows, CompressorInputs, CompressorWeights, flush, pool_windows, write_entries
from dsv4_jax.ops.gather import gather_all_compressed_kv, gather_compressed_kv, gather_swa_kv
from dsv4_jax.ops.hyper_connections import HyperConnectionWeights, hyper_connections
from dsv4_jax.ops.indexer_scores import indexer_scores
from dsv4_jax.ops.indexer_topk import indexer_topk
from dsv4_jax.ops.linear import LinearSpec, linear, linear_swiglu, swiglu
from dsv4_jax.ops.ngram_rows import hash_multipliers, ngram_rows
from dsv4_jax.ops.norm_rope import norm_rope, norm_rope_append
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.router import Routing, router
from dsv4_jax.ops.sparse_attention import sparse_attention
from dsv4_jax.ops.views import AttentionKV, ClassicalView, IndexerView, StateView, SWAView, valid_lengths
