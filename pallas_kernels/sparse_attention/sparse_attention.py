"""Sparse attention on quantised rows: one softmax over window rows, compressed entries and a sink.

Where tokens are few, several blocks divide the rows of one, and `combine` adds up their sums. The place of a row in the
sums depends on the shapes of the arguments and on the token's own position, never on another token.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_rows import ROW_DIM, check_row_pools
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.sparse_attention.combine import combine
from pallas_kernels.sparse_attention.decode_attention import HEADS, decode_attention, head_groups
from pallas_kernels.sparse_attention.dense_rows import HALF
from pallas_kernels.sparse_attention.row_addresses import TILE, AttentionProblem, Paged


# More parts of a token than this cost more to add up than they save.
MAX_SPLITS = 66


@cached_trace("window", "layout", "splits")
def sparse_attention(
    q: jax.Array,
    sinks: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    rings: tuple[jax.Array, jax.Array, jax.Array],
    compressed: Paged | None,
    inv_freq: jax.Array | None = None,
    *,
    window: int,
    layout: RowLayout,
    places: jax.Array | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of each token over its window and its compressed entries; a row is key and value of all heads.

    Args:
      q: [T, H, 512] bfloat16, H a multiple of 64, or of 8 below that. Scores are scaled by `512 ** -0.5`.
      sinks: [H] float32 sink logits: one more weight in the softmax's sum, with no value.
      slots: [T] int32 request slots; -1 = padding.
      positions: [T] int32; -1 = padding.
      layer: int32 scalar, index on axis 0 of the rings; -1: windows are left out.
      rings: (nope [layers, slots, ring, N] uint8, rope [.., R] bfloat16, scale as in `Paged`); the row of a position is
        `position % ring`.
      compressed: entries, or None.
      inv_freq: [P] float32, at most 1, P a multiple of 4 up to 128: the last 2 * P channels of results are
        rotated back by the token's position, in interleaved pairs. Rounded before and after. None: they are not.
      window: rows a token sees, itself included; a multiple of 64, at most the ring.
      layout: of the rings' rows: N + R = 512, both multiples of 64, a scale for 64 values or one for the row. The NaN
        codes 0x7F and 0xFF are read as +-480.
      places: [T] int32 where in the first slot's ring each token's own row is, behind the rows of its window. None: in
        its own slot's ring, by position. For calls that bring more tokens than a ring has room for.
      splits: parts of a token's rows; None: as many as fill an H100. The result's bits depend on it.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, H, 512] bfloat16; zeros for padding.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these, or the entries have another layout.
    """
    check_array("sinks", sinks, jnp.float32, q.shape[1])
    if inv_freq is not None:
        check_array("inv_freq", inv_freq, jnp.float32, None)
        pairs = len(inv_freq)
        check_rules({f"up to {HALF // 2} pairs, a multiple of 4, got {pairs}": 2 * pairs <= HALF and pairs % 4 == 0})
    problem = _problem(q, slots, positions, layer, rings, compressed, window, layout, places)
    if not q.size:
        return q
    splits = splits or _splits(problem, q)
    if splits > 1:
        sums, stats = decode_attention(problem, q, None, None, splits=splits, interpret=interpret)
        return combine(sums, stats, sinks, positions, inv_freq, interpret=interpret)
    sinks = jnp.pad(sinks, (0, -sinks.size % HEADS))
    angles = None
    if inv_freq is not None:
        angle = jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * inv_freq[None, :]
        angles = jnp.cos(angle), jnp.sin(angle)
    return decode_attention(problem, q, sinks, angles, splits=None, interpret=interpret)


@cached_trace("window", "layout", "splits")
def attention_sums(
    q: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    rings: tuple[jax.Array, jax.Array, jax.Array],
    compressed: Paged | None,
    *,
    window: int,
    layout: RowLayout,
    places: jax.Array | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """What `sparse_attention` adds up: parts of each token's softmax, for `combine`, or for other devices.

    Args:
      q, slots, positions, layer, rings, compressed, window, layout, places, splits, interpret: as there; T at least 1.

    Returns:
      (sums [T, S, H, 512], stats [T, S, 2, H]) float32, S = splits, H rounded up to a multiple of 64; see `combine`.

    Raises:
      NotImplementedError: as `sparse_attention`.
    """
    problem = _problem(q, slots, positions, layer, rings, compressed, window, layout, places)
    return decode_attention(problem, q, None, None, splits=splits or _splits(problem, q), interpret=interpret)


def _problem(q, slots, positions, layer, rings, compressed, window, layout, places):
    """The rows to attend to, of checked arguments."""
    tokens, heads, _ = q.shape
    check_array("q", q, jnp.bfloat16, tokens, None, ROW_DIM)
    check_array("slots", slots, jnp.int32, tokens)
    check_array("positions", positions, jnp.int32, tokens)
    check_row_pools(layout, *rings)
    check_rules(
        {
            f"a multiple of {HEADS} heads, or of 8 below that, got {heads}": heads % min(HEADS, -(-heads // 8) * 8)
            == 0,
            f"windows of a multiple of {TILE} rows, got {window}": window % TILE == 0,
            f"rows with RoPE values, got {layout}": layout.rope_dim > 0,
        }
    )
    if places is not None:
        check_array("places", places, jnp.int32, tokens)
    if compressed is not None:
        check_rules({f"one layout, got {layout} and {compressed.layout}": compressed.layout == layout})
        check_row_pools(layout, *compressed.pools)
        check_array("block_table", compressed.block_table, jnp.int32, None, None)
        if compressed.indices is not None:
            check_array("indices", compressed.indices, jnp.int32, tokens, None)
        compressed = dataclasses.replace(compressed, layer=compressed.layer.reshape(1)) if compressed.count else None
    return AttentionProblem(slots, positions, layer.reshape(1), places, compressed, rings, window, layout)


def _splits(problem, q):
    """Parts of a token's tiles, so that all blocks run at once and no part is empty."""
    tokens, heads, _ = q.shape
    tiles = problem.tiles
    most = max(1, min(tiles, MULTIPROCESSORS // (tokens * head_groups(heads)), MAX_SPLITS))
    return -(-tiles // -(-tiles // most))
