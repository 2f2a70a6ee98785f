"""Sampling: draws the next token of each request from its logits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.common.arguments import check, check_temperature, check_top_k, check_top_p
from dsv4_jax.ops.views import int_range
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of a request. A static pytree without leaves: jitted steps are compiled for its values.

    Attributes:
      temperature: divisor of the logits, from 1e-5 to 1e5. 0 = greedy: the token with the largest logit, the lowest id
        among equal ones.
      top_k: number of largest logits to keep. Logits that equal the smallest of these are kept, too. 0 = keep all.
      top_p: probability that the kept tokens must reach together. Of the tokens that `top_k` keeps, the smallest set of
        most probable tokens that reaches this probability is kept. Tokens as probable as the last one in this set are
        kept, too. 1 = keep all.

    Raises:
      TypeError: a parameter is not a number, or `top_k` is not an integer.
      ValueError: a parameter is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        # Converts each field to one type (int 1 to float 1.0), so that equal parameters hash equally.
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        object.__setattr__(self, "top_k", check_top_k(self.top_k))
        object.__setattr__(self, "top_p", check_top_p(self.top_p))


GREEDY = SamplingParams()
# A search for up to this number of likeliest tokens is unrolled. A search for more is a loop on the device, for which
# the host has to wait in each step. OpenAI's API allows 20.
MAX_UNROLLED = 20


@pytree_dataclass
class BatchedSamplingParams:
    """The sampling parameters of many requests as arrays, so that one program serves requests that differ.

    Attributes:
      temperature: [n] float32, as in `SamplingParams`.
      top_k: [n] int32, as in `SamplingParams`.
      top_p: [n] float32, as in `SamplingParams`.
    """

    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> "BatchedSamplingParams":
        """Returns the parameters of n requests as NumPy arrays [n]."""
        return cls(
            np.array([row.temperature for row in rows], np.float32),
            np.array([row.top_k for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float32),
        )

    def __getitem__(self, rows) -> "BatchedSamplingParams":
        return jax.tree.map(lambda x: x[rows], self)


@pytree_dataclass
class LogprobOptions:
    """Options for log-probabilities that a step computes in addition to the log-probabilities of the drawn tokens.

    Attributes:
      forced_tokens: [n] int32, a known token for each row, such as the next token of a prompt. It replaces the drawn
        token, so that the known token's log-probability is computed; -1 = keep the drawn token. None = -1 for all rows.
      wants_top: [] bool, whether any row asks for its likeliest tokens. If it is False, the search is skipped, and
        TopLogprobs of zeros are returned. None = True.
      num_top: number of likeliest tokens to find per row (static).
    """

    forced_tokens: Any = None
    wants_top: Any = None
    num_top: int = static_field(default=0)


@pytree_dataclass
class TopLogprobs:
    """The k likeliest tokens for each row of logits, the likeliest first. Equally likely tokens are ordered by id.

    Attributes:
      ids: [..., k] int32 token ids.
      logprobs: [..., k] float32, log-probabilities under the model, before temperature and `top_p`.
    """

    ids: Any
    logprobs: Any

    def __getitem__(self, rows) -> "TopLogprobs":
        return TopLogprobs(self.ids[rows], self.logprobs[rows])


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "n vocab"],
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    positions: Int[Array, "n"],
    token_mask: UInt32[Array, "n words"] | None = None,
) -> Int[Array, "n"]:
    """Draws one token per row.

    The random bits of a row depend only on its seed and position. From equal logits, a request therefore draws equal
    tokens in any batch, in single steps or in a loop, and with or without drafts.

    Args:
      logits: [n, vocab] float32.
      sampling: sampling parameters, one for all rows or arrays [n].
      seeds: [n] one seed per row.
      positions: [n] position of the token being drawn.
      token_mask: [n, ceil(vocab / 32)] uint32, the tokens that each row may draw: bit i % 32 of word i // 32 is set if
        token i may be drawn. Each row needs at least one token. None = all tokens.

    Returns:
      [n] int32 token ids.
    """
    if token_mask is not None:
        bits = jnp.unpackbits(token_mask.view(jnp.uint8), axis=1, count=logits.shape[1], bitorder="little")
        logits = jnp.where(bits > 0, logits, -jnp.inf)
    if isinstance(sampling, SamplingParams):
        # The new arrays are constants of the program, so the compiler removes branches that are never taken.
        sampling = jax.tree.map(jnp.asarray, BatchedSamplingParams.of([sampling] * logits.shape[0]))
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    is_random = sampling.temperature > 0
    is_limited = is_random & ((sampling.top_k > 0) | (sampling.top_p < 1))

    def draw():
        """Draws a token of each row, at random or the likeliest one."""
        scaled = logits / jnp.where(is_random, sampling.temperature, 1.0)[:, None]
        scaled = jax.lax.cond(jnp.any(is_limited), _keep_best, lambda logits, *_: logits, scaled, sampling)

        @jax.vmap
        def draw_row(seed, position, row):
            """Draws a token of one row."""
            return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

        return jnp.where(is_random, draw_row(seeds, positions, scaled).astype(jnp.int32), likeliest)

    return jax.lax.cond(jnp.any(is_random), draw, lambda: likeliest)


def log_probabilities(
    logits: Float[Array, "n vocab"], tokens: Int[Array, "n"]
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """Returns the log-probabilities of tokens [n] under logits [n, vocab], and the logsumexp of each row of logits."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    norm = jax.nn.logsumexp(logits, axis=1)
    return chosen - norm, norm


@jax.named_scope("sampling")
def top_logprobs(logits: Float[Array, "n vocab"], norm: Float[Array, "n"], options: LogprobOptions) -> TopLogprobs:
    """Finds the likeliest tokens of each row.

    Args:
      logits: [n, vocab] float32.
      norm: [n] float32, logsumexp of each row of logits.
      options: `num_top` and `wants_top` are used.

    Returns:
      TopLogprobs [n, num_top].

    Raises:
      ValueError: `num_top` exceeds the size of the vocabulary.
    """
    most = logits.shape[1]
    check(options.num_top <= most, f"num_top={options.num_top} must be at most {most}, the size of the vocabulary")

    def find():
        """Returns the likeliest tokens of all rows."""

        def find_next(last, _):
            """Finds the token after `last`, by falling logits and, among equal logits, by rising ids."""
            last_logit, last_id = last
            is_later = (logits < last_logit) | ((logits == last_logit) & (ids > last_id))
            id = jnp.argmax(jnp.where(is_later, logits, -jnp.inf), axis=-1, keepdims=True).astype(jnp.int32)
            token = jnp.take_along_axis(logits, id, axis=-1), id
            return token, token

        # Tokens are found one at a time, by a scan. If the scan is unrolled, this code can be in a CUDA graph. A sort
        # or a loop could not, see `_keep_best`.
        ids = int_range(logits.shape[1])[None, :]
        shape = (logits.shape[0], 1)
        before_first = jnp.full(shape, jnp.inf, logits.dtype), jnp.full(shape, -1, jnp.int32)
        _, tokens = jax.lax.scan(
            find_next, before_first, length=options.num_top, unroll=options.num_top <= MAX_UNROLLED
        )
        best, chosen = (x[:, :, 0].T for x in tokens)
        return TopLogprobs(chosen, best - norm[:, None])

    if options.wants_top is None:
        return find()
    # The search is skipped when no row asks for its likeliest tokens.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(find))
    return jax.lax.cond(options.wants_top, find, lambda: zeros)


def _keep_best(logits, sampling):
    """Returns the logits [n, vocab] with -inf for the tokens that `top_k` and then `top_p` exclude.

    Thresholds are found without sorting, because this function runs in a `lax.cond` branch. XLA can put a branch in a
    CUDA graph, but not if it has a sort, which is a library call on a GPU. The host would then have to wait for the
    whole step to learn whether the branch is taken.
    """
    top_k = sampling.top_k[:, None]
    top_p = sampling.top_p[:, None]
    worst = _largest_threshold(lambda kept: jnp.sum(kept, axis=-1, dtype=jnp.int32) >= top_k, logits)
    logits = jnp.where(logits >= jnp.where(top_k > 0, worst, -jnp.inf), logits, -jnp.inf)
    probability = jax.nn.softmax(logits, axis=-1)[:, None, :]
    nucleus = _largest_threshold(lambda kept: jnp.sum(jnp.where(kept, probability, 0.0), axis=-1) >= top_p, logits)
    return jnp.where(logits >= jnp.where(top_p < 1, nucleus, -jnp.inf), logits, -jnp.inf)


def _largest_threshold(is_enough, logits):
    """Finds for each row the largest threshold such that `is_enough` accepts the logits at or above the threshold.

    The search is over the ranks of all float32 in ascending order, see `_float_at`. It finds one hexadecimal digit of
    the rank at a time, the highest first, by testing 15 thresholds.

    Args:
      is_enough: monotone function ([n, 15, vocab] bool, which logits are kept for each of 15 thresholds) -> [n, 15]
        bool, whether the kept logits are enough.
      logits: [n, vocab] float32.

    Returns:
      [n, 1] float32 thresholds; -inf if not even all logits are enough.
    """
    rank = jnp.zeros((logits.shape[0], 1), jnp.uint32)
    digits = jnp.arange(1, 16, dtype=jnp.uint32)[None, :]
    for shift in range(28, -1, -4):
        thresholds = _float_at(rank + (digits << shift))
        enough = is_enough(logits[:, None, :] >= thresholds[:, :, None])
        rank += jnp.sum(enough, axis=-1, keepdims=True, dtype=jnp.uint32) << shift
    return _float_at(rank)


def _float_at(rank):
    """Returns the float32 with a given rank, uint32, among all float32 in ascending order.

    Ranks below the rank of -inf give -inf, and ranks above the rank of inf give NaN.
    """
    sign = np.uint32(1 << 31)
    rank = jnp.maximum(rank, np.uint32(0x007FFFFF))
    return jax.lax.bitcast_convert_type(jnp.where(rank >= sign, rank - sign, ~rank), jnp.float32)
