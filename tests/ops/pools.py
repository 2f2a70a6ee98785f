"""Small views with poisoned bytes, shared by the op tests."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.ops import ClassicalView, IndexerView, StateView, SWAView
from dsv4_jax.quant import kv_format


NOPE = 64
ROPE = 32
INDEX = 32
DIM = NOPE + ROPE
FORMATS = {name: kv_format(name, jnp.float32) for name in ("v4", "v41", "per_entry", "plain")}


def poison(struct, *leading):
    """Arrays whose every byte is 0xFF: NaN as e4m3, bfloat16 and float32."""

    def fill(s):
        raw = np.full((*leading, *s.shape, np.dtype(s.dtype).itemsize), 0xFF, np.uint8)
        return jnp.asarray(raw.view(s.dtype)[..., 0])

    return jax.tree.map(fill, struct)


# Programs of the codecs: one by one, their operations are a hundred programs to compile.
encode = jax.jit(lambda codec, values: codec.encode(values), static_argnums=0)
decode = jax.jit(lambda codec, rows, *dtype: codec.decode(rows, *dtype), static_argnums=(0, 2))


def swa_view(fmt, *, layers=2, slots=3, ring=8, window=8, layer=1):
    codec = fmt.window(NOPE, ROPE)
    return SWAView(poison(codec.struct, layers, slots, ring), ints(layer), window, codec)


def classical_view(fmt, *, rate=4, layers=2, blocks=12, block_tokens=16, table=None, layer=1):
    codec = fmt.entries(NOPE, ROPE)
    rows = poison(codec.struct, layers, blocks, block_tokens // rate)
    return ClassicalView(rows, ints(layer), _table(table), rate, codec)


def indexer_view(fmt, *, layers=2, blocks=12, block_tokens=16, table=None, layer=1):
    codec = fmt.keys(INDEX)
    rows = poison(codec.struct, layers, blocks, block_tokens // 4)
    return IndexerView(rows, ints(layer), _table(table), 4, codec)


def state_view(*, rate, overlap, dim=DIM, layers=2, slots=3, spare=0, layer=1):
    ring, width = (2 * rate, 2 * dim) if overlap else (rate, dim)
    raw = poison(jax.ShapeDtypeStruct((ring + spare, width), jnp.float32), layers, slots)
    return StateView(raw, raw, ints(layer), rate, overlap)


def _table(table):
    # Three requests, four blocks each, handed out in no order.
    return jnp.asarray([[7, 2, 11, 0], [4, 9, 1, 6], [3, 10, 5, 8]] if table is None else table, jnp.int32)


def ints(values):
    return jnp.asarray(values, jnp.int32)


def same_bytes(a, b):
    """Trees of equal shapes, dtypes and bytes: this also tells -0 from 0."""
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)

    def raw(x):
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    chex.assert_trees_all_equal(jax.tree.map(raw, a), jax.tree.map(raw, b))
