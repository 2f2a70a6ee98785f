"""Choosing the next token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.arguments import check_real, check_whole


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; hashable, a static argument of jitted steps.

    Attributes:
      temperature: 0 = greedy (the lowest id among equal logits), otherwise from 1e-5 to 1e5.
      top_k: keep this many best logits; 0 = all.
      top_p: keep the smallest set of best tokens whose probability reaches this; 1 = all.

    Raises:
      TypeError: one of them is no number, or `top_k` no whole one.
      ValueError: one of them is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        temperature, top_p = check_real("temperature", self.temperature), check_real("top_p", self.top_p)
        # Logits divided by it must stay finite in float32.
        if not (temperature == 0 or 1e-5 <= temperature <= 1e5):
            raise ValueError(f"temperature={temperature} must be 0 (greedy) or positive, from 1e-5 to 1e5")
        if not np.finfo(np.float32).tiny <= top_p <= 1:
            raise ValueError(f"top_p={top_p} must be in (0, 1]")
        top_k = check_whole("top_k", self.top_k, 0, 2**31 - 1)
        for name, value in dict(temperature=temperature, top_k=top_k, top_p=top_p).items():
            object.__setattr__(self, name, value)  # one spelling, so that equal ones hash equal


GREEDY = SamplingParams()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchedSamplingParams:
    """How each row's token is drawn: arrays, so that one program serves requests that differ.

    Attributes:
      temperature: [n] float32, as in `SamplingParams`.
      top_k: [n] int32.
      top_p: [n] float32.
    """

    temperature: Any
    top_k: Any
    top_p: Any

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> "BatchedSamplingParams":
        """Numpy arrays with a row for each of `rows`."""
        return cls(
            np.array([row.temperature for row in rows], np.float32),
            np.array([row.top_k for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float32),
        )

    def __getitem__(self, rows) -> "BatchedSamplingParams":
        return jax.tree.map(lambda x: x[rows], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogprobRows:
    """Which log-probabilities a step finds, besides those of the tokens that it draws.

    Attributes:
      given: [rows] int32 the token that is known to follow each row: it takes the place of a drawn one; -1 = draw one.
        None = draw all.
      wanted: [] bool whether the likeliest tokens of any row are wanted: otherwise zeros come back, and nothing is
        computed. None = they are.
      top: how many of the likeliest tokens of each row (static).
    """

    given: Any = None
    wanted: Any = None
    top: int = dataclasses.field(default=0, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens in some places, the best first; of equal ones the lowest id.

    Attributes:
      ids: [..., k] int32.
      logprobs: [..., k] float32 log-probabilities under the model, temperature and `top_p` aside.
    """

    ids: Any
    logprobs: Any

    def __getitem__(self, places) -> "TopLogprobs":
        return TopLogprobs(self.ids[places], self.logprobs[places])


@jax.named_scope("sampling")
def sample(
    logits: Float[Array, "n vocab"],
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    positions: Int[Array, "n"],
) -> Int[Array, "n"]:
    """Draws one token a row.

    The random bits of a row depend on its seed and position only, so a request draws the same tokens in any batch,
    streamed, in an on-device loop, or checked against drafts.

    Args:
      logits: [n, vocab] float32.
      sampling: temperature, top-k, top-p: for all rows, or arrays [n] of them.
      seeds: [n] one seed a request.
      positions: [n] position of the token being drawn.

    Returns:
      [n] int32 token ids.
    """
    if isinstance(sampling, SamplingParams):
        # Constants: what they do not need is removed when the program is compiled.
        sampling = jax.tree.map(jnp.asarray, BatchedSamplingParams.of([sampling] * logits.shape[0]))
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = sampling.temperature > 0
    cut = warm & ((sampling.top_k > 0) | (sampling.top_p < 1))

    def draw():
        scaled = logits / jnp.where(warm, sampling.temperature, 1.0)[:, None]
        scaled = jax.lax.cond(jnp.any(cut), _keep_best, lambda logits, *_: logits, scaled, sampling)
        drawn = jax.vmap(lambda seed, position, row: jax.random.categorical(_key(seed, position), row))
        return jnp.where(warm, drawn(seeds, positions, scaled).astype(jnp.int32), best)

    return jax.lax.cond(jnp.any(warm), draw, lambda: best)


@jax.named_scope("sampling")
def top_logprobs(logits: Float[Array, "n vocab"], norm: Float[Array, "n"], rows: LogprobRows) -> TopLogprobs:
    """The likeliest tokens of each row.

    Args:
      logits: [n, vocab] float32.
      norm: [n] the log of the sum of their exponentials.
      rows: how many, and whether at all.

    Returns:
      Arrays [n, k].
    """

    def find():
        best, ids = jax.lax.top_k(logits, rows.top)
        return TopLogprobs(ids.astype(jnp.int32), best - norm[:, None])

    if rows.wanted is None:
        return find()
    # A step in which nobody wants them costs what it did.
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(find))
    return jax.lax.cond(rows.wanted, find, lambda: nothing)


def _key(seed, position):
    return jax.random.fold_in(jax.random.key(seed), position)


def _keep_best(logits, sampling):
    """-inf for tokens that are not among the `top_k` best, or outside the smallest set of these that holds `top_p`."""
    best_first = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.clip(sampling.top_k, 1, logits.shape[-1])[:, None] - 1
    worst = jnp.take_along_axis(best_first, last, axis=-1)
    worst = jnp.where(sampling.top_k[:, None] > 0, worst, -jnp.inf)
    best_first = jnp.where(best_first < worst, -jnp.inf, best_first)
    probability = jax.nn.softmax(best_first, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = sampling.top_p[:, None]
    # The best token is always kept: nothing stands before it.
    nucleus = jnp.min(jnp.where(before < top_p, best_first, jnp.inf), axis=-1, keepdims=True)
    worst = jnp.maximum(worst, jnp.where(top_p < 1, nucleus, -jnp.inf))
    return jnp.where(logits < worst, -jnp.inf, logits)
