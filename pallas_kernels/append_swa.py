"""The kernel that quantizes the KV rows of a call's tokens and stores them in the rings of sliding windows.

A slot has a ring of R rows. The KV row of the slot's token at position p is stored in row `p % R`. The grid has a block
of one warpgroup for every four tokens. Each warp loads, quantizes and stores the row of one token.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.pool_operands import Rings
from pallas_kernels.formats.row_encoder import store_quantized
from pallas_kernels.runtime.checks import check_array, check_tokens
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace(writes=True)
def append_swa(
    kv: jax.Array, slots: jax.Array, positions: jax.Array, rings: Rings, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Quantizes the KV rows of a call's tokens and stores them in the rings, in place if the pools are donated.

    Args:
      kv: [T, 512] bfloat16 rows. The last `rope_dim` values are stored in bfloat16, the others as E4M3 codes.
      slots: [T] int32, each token's request slot; -1 = padding. The tokens of a slot are adjacent and in order.
      positions: [T] int32, each token's position in its request; -1 = padding, which writes nothing. Positions of a
        slot are consecutive.
      rings: the rings to write to. If a slot has more tokens in the call than its ring has rows, only the tokens with
        the highest positions are stored, one in each row of the ring.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      The updated pools (nope, rope, scale) of the rings; rope is None if the layout has no RoPE values.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    rings.check()
    tokens = kv.shape[0]
    layout = rings.layout
    shape = rings.pools[0].shape
    check_array("kv", kv, jnp.bfloat16, tokens, kv_rows.ROW_DIM)
    check_tokens(tokens, slots=slots, positions=positions)
    if tokens == 0:
        return rings.pools

    def append_rows(kv_gmem, slots_gmem, positions_gmem, layer_gmem, *pools_gmem):
        token = lax.axis_index("block") * kv_rows.WARPS + kv_rows.iota((kv_rows.WARPS,), 0)
        row = kv_rows.ring_rows(token, slots_gmem, positions_gmem, layer_gmem, shape)
        dense = kv_rows.WARPS, kv_rows.GROUPS, kv_rows.GROUP
        values = kv_rows.load_rows(kv_gmem, jnp.minimum(token, tokens - 1), dense)
        store_quantized(values.astype(jnp.float32), pools_gmem, row, layout)

    launch = kernel(
        append_rows,
        out_type=(),
        kernel_name="append_swa",
        grid={"block": -(-tokens // kv_rows.WARPS)},
        interpret=interpret,
    )
    pools = rings.mutable_pools()
    launch(kv, slots, positions, rings.layer.reshape(1), *pools)
    return rings.freeze(pools)
