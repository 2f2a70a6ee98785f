"""The op that quantizes window rows and stores them in the ring buffers of the sliding window."""

import dataclasses

from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check_dtype
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.views import SWAView, put_in_rings
from dsv4_jax.quant import Rows
from pallas_kernels.append_swa import append_swa as append_swa_kernel


def _append_swa_kernel(view, kv, slots, positions, *, interpret):
    pools = append_swa_kernel(kv, slots, positions, view.for_kernels(), interpret=interpret)
    return dataclasses.replace(view, rows=Rows(*pools))


@with_kernel(_append_swa_kernel)
def append_swa(
    view: SWAView,
    kv: Float[Array, "T D"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> SWAView:
    """Quantizes the window rows of tokens, stores them in the rings of the tokens' slots, and returns the updated view.

    In a ring of R rows, the token at position p has row `p % R`. So the result does not depend on how tokens are split
    into calls. If a request has more than R tokens in the call, only its last R tokens are written.

    Args:
      view: the layer's rings.
      kv: [T, D] bfloat16 or float32 rows after norm and RoPE.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding, which writes nothing.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take rows in bfloat16, of 448 + 64 dims in
        the formats "v4" and "per_entry", and of 512 + 0 in "v41".

    Raises:
      TypeError: `kv` is neither bfloat16 nor float32.
    """
    check_dtype("kv", kv, "bfloat16", "float32")
    rows = put_in_rings(view.rows, view.codec.encode(kv), view.layer, slots, positions)
    return dataclasses.replace(view, rows=rows)
