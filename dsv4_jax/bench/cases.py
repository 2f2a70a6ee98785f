"""A benchmark case, one op at one shape of a real model, and helpers that make inputs of cases."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Int

from dsv4_jax.cache import CacheSchema, GroupSpec
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.ops import ClassicalView, SWAView
from dsv4_jax.quant import KeyCodec, RowCodec


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
      op: public name of the op.
      shape: label of the shape.
      nbytes: number of bytes that a call has to read and write, by the op's definition.
      inputs: rng -> the arrays of one call.
      call: (state, *weights, *inputs, implementation) -> result.
      state: (rng, layers) -> views of so many layers, or other arrays that all calls share.
      weights: rng -> the arrays of one layer.
      layer_bytes: number of bytes of a layer's state or weights.
      updates: whether the result is the next call's state; the state is then donated.
      flops: number of operations of a call on the tensor cores.
      reads: whether nearly all bytes are read, so that the rate of a read is the limit, not that of a copy.
      agree: (array, XLA's array) -> bool scalar, called for each array of a result; None compares bit for bit.
      xla_calls: number of timed calls of XLA's version; None for as many as of the kernel.
    """

    op: str
    shape: str
    nbytes: int
    inputs: Callable[[np.random.Generator], tuple]
    call: Callable
    state: Callable[[np.random.Generator, int], Any] = lambda rng, layers: None
    weights: Callable[[np.random.Generator], tuple] = lambda rng: ()
    layer_bytes: int = 1 << 28
    updates: bool = False
    flops: int = 0
    reads: bool = False
    agree: Callable[[Any, Any], Any] | None = None
    xla_calls: int | None = None

    def make(self, rng: np.random.Generator, calls: int) -> tuple[Any, list[tuple]]:
        """Returns the state, and the layer, weights and inputs of each call.

        Calls rotate through so many layers that none finds its data in the L2 cache.
        """
        layers = min(calls, 1 + (1 << 28) // self.layer_bytes)  # several times the 50 MB of the cache
        state = self.state(rng, layers)
        weights = [self.weights(rng) for _ in range(layers)]
        return state, [(int32(i % layers), *weights[i % layers], *self.inputs(rng)) for i in range(calls)]

    def run(self, state: Any, layer: Any, *arrays: Any, implementation: str) -> Any:
        """Calls the op with the state's views at a layer; views of the result are those of layer 0, as the state's."""
        return _at_layer(self.call(_at_layer(state, layer), *arrays, implementation=implementation), 0)


def _at_layer(tree, layer):
    """Returns a tree whose views are those of a layer."""

    def is_view(x):
        return hasattr(x, "layer")

    return jax.tree.map(lambda x: dataclasses.replace(x, layer=layer) if is_view(x) else x, tree, is_leaf=is_view)


def measured_config(config: DSV4Config, report: dict[str, Any], field: str = "shapes") -> DSV4Config:
    """Returns the configuration to measure: without a GPU that of the packaged model, "tiny" in the report's field.

    It has draft layers of the kind that `config` has.
    """
    if jax.default_backend() == "gpu":
        return config
    report[field] = "tiny"
    return read_config(packaged_checkpoint()).with_drafts_of(config)


def close(relative: float, absolute: float) -> Callable[[Array, Array], Array]:
    """Returns an `agree` of a case that compares in float32 with these tolerances."""

    def agree(got, expected):
        got = got.astype(jnp.float32)
        expected = expected.astype(jnp.float32)
        return jnp.all(jnp.abs(got - expected) <= relative * jnp.abs(expected) + absolute)

    return agree


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of all arrays or `jax.ShapeDtypeStruct`s of a pytree that one device holds."""

    def size(leaf):
        sharding = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))

    return sum(size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def int32(values: ArrayLike) -> Int[Array, "..."]:
    """Returns the values as an int32 array."""
    return jnp.asarray(values, jnp.int32)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Returns normally distributed values, made on the device."""
    return jax.random.normal(jax.random.key(int(rng.integers(1 << 30))), shape, dtype)


def random_rows(codec: RowCodec | KeyCodec, rng: np.random.Generator, *leading: int) -> Any:
    """Returns a pool of encoded random rows or keys; `leading` are the axes before a row's own, first layers."""
    encode = jax.jit(codec.encode)
    layers = [encode(normal(rng, (*leading[1:], codec.dim), jnp.bfloat16)) for _ in range(leading[0])]
    return jax.tree.map(lambda *rows: jnp.stack(rows), *layers)


def random_table(rng: np.random.Generator, slots: int, max_blocks: int) -> Int[Array, "slots blocks"]:
    """Returns a block table of full requests whose blocks lie in random order."""
    return int32(rng.permutation(slots * max_blocks).reshape(slots, max_blocks))


def window_view(schema: CacheSchema, rng: np.random.Generator, layers: int, slots: int) -> SWAView:
    """Returns sliding-window rings of random rows."""
    window = schema.config.sliding_window
    codec = schema.window_codec
    return SWAView(random_rows(codec, rng, layers, slots, window), 0, window, codec)


def entries_view(
    schema: CacheSchema,
    group: GroupSpec,
    rng: np.random.Generator,
    layers: int,
    slots: int,
    entries: int,
    *,
    shared: int = 0,
) -> ClassicalView:
    """Returns the compressed entries of full requests, `entries` rows each: their own, or drawn from `shared` rows."""
    rows = schema.entries_per_block(group.name)
    max_blocks = entries // rows
    if shared:
        table = int32(np.stack([rng.permutation(shared // rows)[:max_blocks] for _ in range(slots)]))
    else:
        table = random_table(rng, slots, max_blocks)
    pool = random_rows(group.entry, rng, layers, shared // rows or slots * max_blocks, rows)
    return ClassicalView(pool, 0, table, group.compress_rate, group.entry)
