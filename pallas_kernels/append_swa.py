"""Quantised append into ring buffers: one launch, in place."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.formats.row_encoder import store_quantised
from pallas_kernels.runtime.checks import check_array
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace("layout", writes=True)
def append_swa(
    kv: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    scale: jax.Array,
    *,
    layout: RowLayout,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises rows and stores each at row `position % ring` of its slot's ring.

    The pools are written in place when the caller donates them.

    Args:
      kv: [T, 512] bfloat16; the last `rope_dim` values are stored as they are, the others as E4M3.
      slots: [T] int32; -1 = padding. Tokens of one slot stand together and in order.
      positions: [T] int32; -1 = padding. Padding writes nothing; of more than `ring` tokens of a slot the last `ring`
        are written.
      layer: int32 scalar, index on axis 0 of the pools.
      nope: [layers, slots, ring, nope_dim] uint8.
      rope: [layers, slots, ring, rope_dim] bfloat16.
      scale: [layers, slots, ring, scale_width] uint8, E8M0 bits, or float32, inverse scales.
      layout: of the rows: 512 values, multiples of 64 with and without RoPE, scale blocks of 64 or None.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (nope, rope, scale) updated.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these.
    """
    kv_rows.check_row_pools(layout, nope, rope, scale)
    tokens = kv.shape[0]
    check_array("kv", kv, jnp.bfloat16, tokens, kv_rows.ROW_DIM)
    check_array("slots", slots, jnp.int32, tokens)
    check_array("positions", positions, jnp.int32, tokens)
    if tokens == 0:
        return nope, rope, scale

    def body(kv_ref, slots_ref, positions_ref, layer_ref, *pool_refs):
        token = lax.axis_index("block") * kv_rows.WARPS + kv_rows.iota((kv_rows.WARPS,), 0)
        row = kv_rows.ring_rows(token, slots_ref, positions_ref, layer_ref, nope.shape)
        shape = kv_rows.WARPS, kv_rows.GROUPS, kv_rows.GROUP
        x = kv_rows.load_rows(kv_ref, jnp.minimum(token, tokens - 1), shape)
        store_quantised(x.astype(jnp.float32), pool_refs, row, layout)

    run = kernel(
        body,
        out_type=(),
        kernel_name="append_swa",
        grid=(-(-tokens // kv_rows.WARPS),),
        grid_names=("block",),
        interpret=interpret,
    )
    pools = [nope, rope, scale]
    refs = [jax.new_ref(pool.reshape(-1, pool.shape[-1])) for pool in pools]
    run(kv, slots, positions, layer.reshape(1), *refs)
    nope, rope, scale = (jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(refs, pools, strict=True))
    return nope, rope, scale
