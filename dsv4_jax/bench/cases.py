"""The benchmark case, which is one op at one shape of a real model, and functions that make the arrays of cases."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from dsv4_jax.bench.tables import MODELS
from dsv4_jax.cache import CacheSchema, GroupSpec
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.ops import ClassicalView, IndexerView, SWAView
from dsv4_jax.quant import KeyCodec, RowCodec


# A `Draw` is a function that makes random arrays. If it returns a numpy array of integers, this array is converted to
# an int32 array on the device.
Draw = Callable[[np.random.Generator], Any]
# The calls of a case take turns with several layers, which have about this number of bytes in total. Attention may read
# a quarter of the entries only. This quarter is still more than twice as large as the L2 cache.
_LAYERS_BYTES = 1 << 29


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One op at one shape.

    Attributes:
      op: public name of the op.
      shape: label of the shape.
      nbytes: number of bytes that a call has to read and write, by the op's definition.
      call: function of (*layer, *inputs, implementation=...) that runs the op and returns its result.
      inputs: the arrays of one call, each an array or a `Draw`.
      layer: the arrays of one layer, such as views of its pools and weights, as pytrees of arrays and `Draw` objects.
      updates: whether the result replaces the first item of `layer`, which is then donated.
      flops: number of floating-point operations of a call on the tensor cores.
      reads: whether nearly all of `nbytes` are read. If so, the minimum time of a call is computed from the bandwidth
        of reading, otherwise from the bandwidth of copying.
      agree: function of (the kernel's array, XLA's array) that returns whether the two agree, a bool scalar. It is
        called for each array of a result. None compares bit for bit.
      xla_calls: number of timed calls of XLA's version; None = the number of the kernel's calls.
    """

    op: str
    shape: str
    nbytes: int
    call: Callable
    inputs: tuple[Any, ...]
    layer: tuple[Any, ...] = ()
    updates: bool = False
    flops: int = 0
    reads: bool = False
    agree: Callable[[Any, Any], Any] | None = None
    xla_calls: int | None = None

    @functools.cached_property
    def layer_bytes(self) -> int:
        """The number of bytes of a layer's arrays."""
        return tree_bytes(jax.eval_shape(lambda: draw(self.layer, np.random.default_rng(0))))

    def make(self, calls: int) -> tuple[list[tuple], list[tuple]]:
        """Makes the arrays of several layers, and the inputs of each call, on the device.

        Call i uses layer i modulo the number of layers, so that a call does not find its data in the L2 cache.

        Args:
          calls: number of calls.

        Returns:
          (the arrays of each layer, the inputs of each call).
        """
        rng = np.random.default_rng(0)
        count = min(calls, 2 + _LAYERS_BYTES // max(self.layer_bytes, 1))
        layers = [draw(self.layer, rng) for _ in range(count)]
        return jax.block_until_ready((layers, [draw(self.inputs, rng) for _ in range(calls)]))


def draw(tree: Any, rng: np.random.Generator) -> Any:
    """Returns a pytree in which each `Draw` is replaced by its arrays, and each numpy array by an int32 JAX array."""

    def array(leaf):
        value = leaf(rng) if callable(leaf) else leaf
        return jnp.int32(value) if isinstance(value, np.ndarray) else value

    return jax.tree.map(array, tree)


def measured_config(config: DSV4Config, report: dict[str, Any], field: str = "shapes") -> DSV4Config:
    """Returns the configuration to measure.

    Without a GPU, the packaged model's small configuration replaces the configuration of a released model. The packaged
    model then gets draft layers of the same kind as the released model has.

    Args:
      config: the requested configuration.
      report: the report. If the model is replaced, `report[field]` is set to "tiny".
      field: name of the field of the report that says which model is measured.

    Raises:
      ValueError: there is no GPU, and the packaged model has another KV format than the released model.
    """
    if jax.default_backend() == "gpu" or report[field].removeprefix("v4_") not in MODELS:
        return config
    packaged = read_config(packaged_checkpoint())
    if packaged.kv_format != config.kv_format:
        raise ValueError(
            f"--config {report[field]} needs a GPU: on a CPU, a tiny model replaces DeepSeek-V4's only. Give --config "
            "a folder with the config.json of a small model"
        )
    report[field] = "tiny"
    return packaged.with_drafts_of(config)


def close(relative: float, absolute: float) -> Callable[[Array, Array], Array]:
    """Returns a function for `Case.agree`, which tests |result - expected| <= relative * |expected| + absolute.

    The values are compared in float32. The result is True only if the inequality holds for all values.
    """

    def agree(result, expected):
        return jnp.allclose(result.astype(jnp.float32), expected.astype(jnp.float32), rtol=relative, atol=absolute)

    return agree


def tree_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree of arrays or `jax.ShapeDtypeStruct` objects, counting one device's shards."""

    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total


def normal(*shape: int, dtype: DTypeLike = jnp.bfloat16, scale: float = 1.0) -> Draw:
    """Returns a `Draw` that makes an array [*shape] of normally distributed values on the device.

    Args:
      *shape: shape of the array.
      dtype: dtype of the array.
      scale: standard deviation of the values; their mean is 0.
    """
    return lambda rng: scale * jax.random.normal(random_key(rng), shape, dtype)


normal_float32 = functools.partial(normal, dtype=jnp.float32)  # as `normal`, for float32 values


def random_key(rng: np.random.Generator) -> Array:
    """Returns a key for random values that are made on the device."""
    return jax.random.key(int(rng.integers(1 << 30)))


def permutation(requests: int, tokens: int = 1) -> Draw:
    """Returns a `Draw` of [requests * tokens] slots: 0 to requests - 1 in random order, each `tokens` times."""
    return lambda rng: rng.permutation(requests).repeat(tokens)


def distinct(tokens: int, count: int, limit: int) -> Draw:
    """Returns a `Draw` of [tokens, count] integers from 0 to limit - 1. The integers of a token are distinct."""
    return lambda rng: np.stack([rng.choice(limit, count, replace=False) for _ in range(tokens)])


def group_label(schema: CacheSchema, group: GroupSpec) -> str:
    """Returns the name of a group of layers in capitals, such as "CSA".

    The name ends in the compression rate only if another group has the same name apart from the rate.
    """
    stems = [name.rstrip("0123456789") for name in schema.groups]
    stem = group.name.rstrip("0123456789")
    return (stem if stems.count(stem) == 1 else group.name).upper()


def group_with_keys(schema: CacheSchema) -> Any:
    """Returns the first group of layers whose entries have index keys."""
    return next(group for group in schema.groups.values() if group.key is not None)


def window_view(schema: CacheSchema, slots: int) -> Draw:
    """Returns a `Draw` of an `SWAView`: a layer's sliding windows of `slots` requests, with random contents."""
    window = schema.config.sliding_window
    codec = schema.window_codec
    return lambda rng: SWAView(_random_rows(codec, rng, slots, window), jnp.int32(0), window, codec)


def paged_view(
    schema: CacheSchema, group: GroupSpec, codec: RowCodec | KeyCodec, lengths: Sequence[int], shared: int = 0
) -> Draw:
    """Returns a `Draw` that makes a view of a layer's compressed entries or index keys, with random contents.

    Args:
      schema: schema of the cache.
      group: the layer's group.
      codec: codec of the entries, or of the index keys.
      lengths: number of entries of each request.
      shared: number of entries in a pool that all requests share: each request gets distinct random blocks, which other
        requests may get, too. 0 = a pool of just the blocks that the requests need, in random order, none of them
        shared.
    """
    block_entries = schema.entries_per_block(group.name)
    block_counts = -(-np.array(lengths) // block_entries)
    view = IndexerView if isinstance(codec, KeyCodec) else ClassicalView

    def make(rng):
        """Makes the view."""
        if shared:
            block_ids = np.concatenate([rng.permutation(shared // block_entries)[:count] for count in block_counts])
        else:
            block_ids = rng.permutation(block_counts.sum())
        table = np.full((len(block_counts), block_counts.max()), -1)
        table[np.arange(block_counts.max()) < block_counts[:, None]] = block_ids
        pool = _random_rows(codec, rng, shared // block_entries or int(block_counts.sum()), block_entries)
        return view(pool, jnp.int32(0), jnp.int32(table), group.compress_rate, codec)

    return make


def _random_rows(codec, rng, *leading):
    """Returns random rows, encoded by `codec`: arrays [1, *leading, ...] of a pool with one layer."""
    return jax.jit(codec.encode)(normal(1, *leading, codec.dim)(rng))
