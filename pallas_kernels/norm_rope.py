"""RMS norm and rotary embedding of queries and key-value rows, in one launch.

    q_out = rope(q / rms(q))        kv_out = rope(weight * kv / rms(kv))

Normed queries are stored in a new array. In DeepSeek-V4.1, queries have no norm. Then the kernel reads and writes only
the groups of 64 channels that contain rotated channels. These groups are written in place if the program does not need
the old queries afterwards. The key-value rows are stored in a new array (`norm_rope`) or in the rings of window rows of
the KV cache (`norm_rope_append`).

A warp computes a row of 512 channels at a time. The first blocks compute four key-value rows each. Each other block
computes heads of one token. Every block loads its first rows before it computes the rotation's cosines and sines, which
hides the latency of the loads.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.exact_math import cos_sin, inverse_sqrt, product, round_bfloat16
from pallas_kernels.formats.kv_rows import GROUP, GROUPS, WARPS
from pallas_kernels.formats.pool_operands import Rings
from pallas_kernels.formats.row_encoder import store_quantized
from pallas_kernels.mgpu import bfloat16_words, mlir, vectors
from pallas_kernels.runtime.checks import check_array, check_rules, check_tokens
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel, primitive
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand
from pallas_kernels.runtime.lowering_cache import cached_trace


DIM = kv_rows.ROW_DIM


@cached_trace("eps", "norms_queries")
def norm_rope(
    q: jax.Array,
    kv: jax.Array,
    weight: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    layer: jax.Array | None = None,
    eps: float,
    norms_queries: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `rope(q / rms(q))` and `rope(weight * kv / rms(kv))`, rounded after the norm and after the rotation.

    Args:
      q: [T, H, 512] bfloat16.
      kv: [T, 512] bfloat16.
      weight: [512] float32 weight of kv's norm.
      positions: [T] int32, up to 2**20; negative positions count as 0.
      inv_freq: [P] float32 inverse frequencies, each at most 1, P at most 256. The last 2 * P channels are rotated, in
        interleaved pairs.
      layer: [] int32 index of this layer if the weight is a stack [layers, 512], else None.
      eps: constant added to the mean square.
      norms_queries: whether queries are normed before they are rotated.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (queries [T, H, 512] bfloat16, key-value rows [T, 512] bfloat16).

    Raises:
      NotImplementedError: the kernel does not take a shape or dtype.
    """
    _check(q, kv, weight, layer, positions, inv_freq)
    if len(q) == 0:
        return q, kv
    arrays = q, kv, weight, layer_operand(layer), positions, inv_freq
    q, kv = _launch("norm_rope", arrays, None, None, eps, norms_queries, interpret)
    return q, kv


@cached_trace("eps", "norms_queries", writes=True)
def norm_rope_append(
    q: jax.Array,
    kv: jax.Array,
    weight: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    rings: Rings,
    *,
    layer: jax.Array | None = None,
    eps: float,
    norms_queries: bool = True,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Computes `norm_rope`, and appends the key-value rows to the rings as `append_swa` does, in one launch.

    The results have the same bits as the results of the two functions.

    Args:
      q, kv, weight, inv_freq, layer, eps, norms_queries, interpret: as in `norm_rope`.
      slots, positions, rings: as in `append_swa`.

    Returns:
      (q, nope, rope, scale): the queries [T, H, 512] bfloat16, and the updated pools of the rings, which are written in
      place if the caller donates them.

    Raises:
      NotImplementedError: the kernel does not take a layout, shape or dtype.
    """
    rings.check()
    _check(q, kv, weight, layer, positions, inv_freq)
    check_tokens(len(q), slots=slots)
    if len(q) == 0:
        return q, *rings.pools
    pools = rings.mutable_pools()
    destination = slots, positions, rings.layer.reshape(1), pools
    arrays = q, kv, weight, layer_operand(layer), positions, inv_freq
    (q,) = _launch("norm_rope_append", arrays, rings, destination, eps, norms_queries, interpret)
    return q, *rings.freeze(pools)


def _check(q, kv, weight, layer, positions, inv_freq):
    check_array("q", q, jnp.bfloat16, None, None, DIM)
    check_array("kv", kv, jnp.bfloat16, len(q), DIM)
    check_weight("weight", weight, layer, jnp.float32, DIM)
    check_tokens(len(q), positions=positions)
    check_array("inv_freq", inv_freq, jnp.float32, None)
    check_rules({f"up to {DIM} channels to rotate, got {2 * len(inv_freq)}": 2 * len(inv_freq) <= DIM})


def _launch(name, arrays, rings, destination, eps, norms_queries, interpret):
    """Launches the kernel. Returns the rotated queries, and without rings also the rotated key-value rows.

    With rings, the kernel stores the key-value rows in them. `destination` is then (slots, positions, layer [1],
    mutable pools of the rings), otherwise None.
    """
    q, kv, weight, *others = arrays
    tokens, heads, _ = q.shape
    queries = QueryRows(heads, None if norms_queries else others[-1].shape[0])
    # Warps load 4 rows at once if there are 16 rows or more for each multiprocessor, otherwise 1 row. The heads of a
    # token are divided among several blocks, so that each multiprocessor gets about four blocks or more. A token has at
    # most `steps` blocks, because a block without rows would be useless.
    rows_at_once = 4 if tokens * queries.rows >= MULTIPROCESSORS * WARPS * 4 else 1
    steps = -(-queries.rows // (WARPS * rows_at_once))
    blocks_per_token = min(steps, -(-4 * MULTIPROCESSORS // tokens))
    out_types = [jax.ShapeDtypeStruct(kv.shape, kv.dtype)] if rings is None else []
    if norms_queries:
        q_operand = q.reshape(-1, DIM)
        out_types.insert(0, jax.ShapeDtypeStruct(q_operand.shape, q.dtype))
    else:
        # Without the barrier, if q is a slice of an array, XLA would fuse the slice with the kernel, and the kernel
        # could not write in place.
        q_operand = jax.new_ref(jax.lax.optimization_barrier(q).reshape(-1, GROUP))
    launch = kernel(
        functools.partial(_norm_rope_kernel, rows_at_once, blocks_per_token, queries, eps, rings),
        out_type=out_types,
        kernel_name=name,
        grid={"block": -(-tokens // WARPS) + tokens * blocks_per_token},
        interpret=interpret,
    )
    results = launch((q_operand, kv, weight.reshape(-1, DIM), *others), destination)
    if not norms_queries:
        results = [jax.freeze(q_operand), *results]
    q_out, *kv_out = results
    return q_out.reshape(q.shape), *kv_out


@dataclasses.dataclass(frozen=True)
class QueryRows:
    """The division of a token's queries into rows of 512 channels. A warp computes one row at a time.

    A row has 8 groups of 64 channels. With a norm, a row is a head. Without a norm, only the last `groups` groups of
    each head are computed, which include all rotated channels. A row then consists of these groups of 8 / groups heads,
    and the array of queries has the shape [T * H * 8, 64], in which axis 0 is the groups of all heads.
    """

    heads: int
    pairs: int | None  # number of rotated pairs of channels of a head; None if queries are normed

    @property
    def groups(self) -> int:
        """The number of groups to compute of each head. A power of two, so that a row has the groups of whole heads."""
        return GROUPS if self.pairs is None else 1 << (-(-2 * self.pairs // GROUP) - 1).bit_length()

    @property
    def rows(self) -> int:
        """The number of rows of a token."""
        return -(-self.heads * self.groups // GROUPS)

    def first_channel(self, shape) -> jax.Array:
        """Returns the index of each group's first channel among the channels of its head, int32 of this shape.

        Axis 1 of the shape is the groups of a row; the result is the same along the other axes.
        """
        group = kv_rows.iota(shape, 1)
        return (GROUPS - self.groups + (group & (self.groups - 1))) * GROUP

    def places(self, token, row: jax.Array) -> jax.Array:
        """Returns the indices of a token's rows on axis 0 of the array of queries, see `QueryRows`.

        Args:
          token: int32 scalar, index of the token.
          row: [4] int32, indices of four rows among the rows of the token.

        Returns:
          With a norm, [4] int32. Without a norm, [4, 8] int32, an index for each group of the rows. -1 = no such head.
        """
        if self.pairs is None:
            return jnp.where(row < self.heads, token * self.heads + row, -1)
        shape = (WARPS, GROUPS)
        number = lax.broadcast_in_dim(row, shape, (0,)) * GROUPS + kv_rows.iota(shape, 1)
        head = lax.div(number, self.groups)
        group = GROUPS - self.groups + (number & (self.groups - 1))
        return jnp.where(head < self.heads, (token * self.heads + head) * GROUPS + group, -1)


def _norm_rope_kernel(rows_at_once, blocks, queries, eps, rings, arrays_gmem, destination_gmem, *out_gmem):
    q_gmem, kv_gmem, weight_gmem, layer_gmem, positions_gmem, inv_freq_gmem = arrays_gmem
    norms_queries = queries.pairs is None
    tokens = positions_gmem.shape[0]
    first_rotated = DIM - 2 * inv_freq_gmem.shape[0]
    block = lax.axis_index("block")
    warp = kv_rows.iota((WARPS,), 0)
    kv_blocks = -(-tokens // WARPS)
    shape = (WARPS, GROUPS, GROUP)
    channel = kv_rows.iota(shape, 1) * GROUP + kv_rows.iota(shape, 2)
    # `pair` and `query_pair` are computed outside of the branches below. Within a branch, LLVM would compute two values
    # at once as 16-bit integers, which ptxas adds wrongly.
    pair = (channel - first_rotated) >> 1
    if norms_queries:
        query_pair = pair
    else:
        query_pair = (queries.first_channel(shape) + kv_rows.iota(shape, 2) - first_rotated) >> 1

    def load(ref_gmem, row):
        return kv_rows.load_rows(ref_gmem, jnp.maximum(row, 0), shape).astype(jnp.float32)

    def rotation(token, pair):
        return _rotation(kv_rows.load_rows(positions_gmem, token, token.shape), inv_freq_gmem, pair)

    def rotate(x, angles, first=first_rotated):
        cos, sin = angles
        return _rotate(x, cos, sin, first)

    @pl.when(block < kv_blocks)
    @jax.named_scope("key_value_rows")
    def store_key_value_rows():
        row_number = block * WARPS + warp
        token = jnp.minimum(row_number, tokens - 1)
        x = load(kv_gmem, token)
        if rings is None:
            row = jnp.where(row_number < tokens, row_number, -1)
        else:
            row = kv_rows.ring_rows(row_number, *destination_gmem[:3], shape=rings.pools[0].shape)
        layer = 0 if layer_gmem is None else layer_gmem[0]
        weight_row = jnp.minimum(row_number, 0) + layer  # the layer's index for each warp, as the minimum is always 0
        weight = kv_rows.load_rows(weight_gmem, weight_row, shape)
        angles = rotation(token, pair)
        rotated = rotate(weight * _norm(x, eps), angles)
        if rings is None:
            kv_rows.store_rows(out_gmem[-1], row, rotated)
        else:
            store_quantized(rotated.astype(jnp.float32), destination_gmem[3], row, rings.layout)

    @pl.when(block >= kv_blocks)
    @jax.named_scope("queries")
    def store_queries():
        steps = -(-queries.rows // (WARPS * rows_at_once))
        steps_per_block = -(-steps // blocks)
        token = lax.div(block - kv_blocks, blocks)
        part = lax.rem(block - kv_blocks, blocks)

        def load_heads(step):
            row = step * (WARPS * rows_at_once) + warp
            step_rows = [row + i * WARPS for i in range(rows_at_once)]
            places = [queries.places(token, row) for row in step_rows]
            return [(load(q_gmem, place), place) for place in places]

        def store_heads(loaded, angles):
            for x, place in loaded:
                if norms_queries:
                    kv_rows.store_rows(out_gmem[0], place, rotate(_norm(x, eps), angles))
                else:
                    kv_rows.store_rows(q_gmem, place, rotate(x, angles, first=0))

        first_step = part * steps_per_block
        loaded = load_heads(first_step)
        # The condition always holds. The `where` makes the token's index an array, with a value for each warp.
        angles = rotation(jnp.where(warp >= 0, token, 0), query_pair)
        store_heads(loaded, angles)
        end = jnp.minimum((part + 1) * steps_per_block, steps)
        pl.loop(first_step + 1, end)(lambda step: store_heads(load_heads(step), angles))


def _rotation(positions, inv_freq_gmem, pair):
    """Returns the cosines and sines of the angles of four rows' channels, (cos, sin), each [4, 8, 64] float32.

    Args:
      positions: [4] int32 position of each row.
      inv_freq_gmem: [P] float32 inverse frequencies.
      pair: [4, 8, 64] int32 index of the pair that a channel belongs to, negative for channels that are not rotated.
    """
    positions = jnp.maximum(positions, 0).astype(jnp.float32)
    # For channels that are not rotated, `_take` returns frequency 0. A rotation by an angle of 0 changes nothing.
    frequency = _take(inv_freq_gmem, pair)
    angle = kv_rows.product(frequency, lax.broadcast_in_dim(positions, frequency.shape, (0,)))
    return cos_sin(angle, kv_rows.product)


def _norm(x, eps):
    squares = jnp.sum(jnp.sum(kv_rows.product(x, x), axis=2), axis=1)
    mean = kv_rows.product(squares, 1 / DIM)
    return x * lax.broadcast_in_dim(inverse_sqrt(mean + eps, kv_rows.product), x.shape, (0,))


_take = vectors.take_in(lambda _: kv_rows.VALUES)


@primitive
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, first: int) -> jax.Array:
    """Rounds rows to bfloat16, rotates interleaved pairs of channels, and rounds the result to bfloat16.

    Args:
      x: [n, 8, 64] float32 rows.
      cos, sin: as `_rotation` returns them; the angle of a channel below `first` is 0.
      first: index of a channel, at most that of the first rotated channel. Groups of 64 channels that lie below `first`
        are only rounded.
    """
    rounded = round_bfloat16(x)
    other = rounded.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    sign = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) & 1 == 0, -1.0, 1.0)
    return (product(rounded, cos) + product(other, sin * sign)).astype(jnp.bfloat16)


@mlir.emits(
    _rotate,
    layout=lambda _: kv_rows.VALUES,
    returns=lambda x, cos, sin, first: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
)
def _emit_rotate(x, cos, sin, first):
    kind = mlir.vector_type(8, ir.BF16Type.get())
    for register, vectors_of_8 in enumerate(zip(x.registers.flat, cos.registers.flat, sin.registers.flat, strict=True)):
        values, cosines, sines = map(mlir.values, vectors_of_8)
        words = [bfloat16_words.pack(*values[i : i + 2]) for i in range(0, 8, 2)]
        # A register of 8 values holds, over the 32 lanes of a warp, four consecutive groups of 64 channels.
        last_group = 4 * (register % (GROUPS // 4)) + 3
        if last_group >= first // GROUP:
            words = [bfloat16_words.rotate(*args) for args in zip(words, cosines[::2], sines[::2], strict=True)]
        yield vector.bitcast(kind, mlir.pack(words))
