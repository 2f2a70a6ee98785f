"""Hyper-connections between two blocks of a model (attention or experts), in two launches.

The post-mapping of a block adds the block's output y [D] to the 4 residual streams of a token. The pre-mapping of the
next block collapses the streams to that block's normed input x [D]:

    new[k] = post[k] * y + sum_j comb[j, k] * streams[j]
    x = norm(sum_j pre[j] * new[j])

The mixing weights of a token are `pre` [4], `post` [4] and `comb` [4, 4]. A call computes `pre` for itself, and `post`
and `comb` for the next call, from logits = fn @ new / rms(new), where new is flattened to [4 * D]. The first launch
writes the new streams. Each of its thread blocks also writes partial sums of the logits over a slice of channels. The
second launch, `collapse`, adds up the slices and computes x and the mixing weights. In V4.1 (`delays_pre`), a call also
computes `pre` for the next call, and collapses with the `pre` of the previous call. There are three kernels for the
first launch:

    kernel            tokens      multiplies fn with the new streams by
    streams_fma       1 .. 4      float32 FMAs; it can also sum y over GPUs
    streams_mma       5 .. 256    `mma` of tiles of 32 tokens and 32 channels
    streams_wgmma     from 257    `wgmma` of tiles of 64 tokens, with fn's columns kept in shared memory
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hyper_connections import collapse, streams_fma, streams_mma, streams_wgmma
from pallas_kernels.hyper_connections.mixing import MIXING, STREAMS, SUMS, StreamRefs
from pallas_kernels.mgpu import mailbox
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace


# A block of `collapse` has a warpgroup for every 1024 channels, and one more. A block can have at most 8 warpgroups.
MAX_WIDTH = 7 * collapse.CHANNELS
# Both launches together take on an H100: for 256 tokens, 19.0 us with `mma` and 22.0 us with `wgmma`; for 512 tokens,
# 36.9 us with `mma` and 29.5 us with `wgmma`.
MAX_MMA_TOKENS = 256


@cached_trace("norm_eps", "hc_eps", "iterations", "delays_pre")
def hyper_connections(
    streams: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    weight: jax.Array,
    y: jax.Array | None = None,
    mixing: jax.Array | None = None,
    table: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    delays_pre: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Adds a block's output to the streams and collapses them to the normed input of the next block.

    Args:
      streams: [T, 4, D] bfloat16 old streams; D is a multiple of 1024 up to 7168.
      fn: [24, 4 * D] float32 projection to logits; [4, 4 * D] for the model's head, which needs only `pre`.
      base: [24] or [4] float32 bias of the logits.
      scale: [3] or [1] float32 factors of the logits of `pre`, `post` and `comb`.
      weight: [D] float32 weight of the norm.
      y: [T, D] bfloat16 output of the block; None: the streams stay as they are.
      mixing: [T, 24] float32 mixing weights that the previous call returned; required with y or delays_pre.
      table: table of mailboxes, see `mailbox.check_table`, for at most 4 tokens. If given, y is first summed over GPUs,
        as `all_reduce` does. None: y is complete.
      layer: [] int32 index of this layer if fn, base, scale and weight have a leading axis of layers, else None.
      norm_eps: constant added to the mean square of the streams, and to the mean square of the collapsed stream.
      hc_eps: constant added to `pre`, to the softmax of `comb`, and to each sum of a Sinkhorn iteration.
      iterations: number of Sinkhorn iterations, at least 1.
      delays_pre: whether the `pre` of `mixing`, instead of a new `pre`, collapses the streams.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      streams: [T, 4, D] bfloat16 new streams; the argument if y is None.
      x: [T, D] bfloat16 normed input of the next block.
      mixing: [T, 24] float32: 4 of `pre`, 4 of `post`, 16 of `comb`; None for the head.

    Raises:
      NotImplementedError: the kernels do not take these shapes or dtypes.
    """
    _check_operands(streams, fn, base, scale, weight, layer, y, mixing)
    check_rules({"mixing if delays_pre is True": mixing is not None or not delays_pre})
    layer_number = layer_operand(layer)
    tokens, _, width = streams.shape
    if table is not None and y is not None:
        mailbox.check_table(table, interpret=interpret)
        check_rules({f"parts of up to 4 tokens, got {y.shape}": fuses_all_reduce(tokens)})
    added = (None, None, None)
    new_type = None
    if y is not None:
        added = (y, mixing, table)
        new_type = jax.ShapeDtypeStruct(streams.shape, streams.dtype)
    # Interpreted, `streams_wgmma` runs from 64 tokens on, its minimum, so that tests need few tokens.
    max_mma_tokens = streams_wgmma.TOKENS - 1 if interpret else MAX_MMA_TOKENS
    if tokens <= max_mma_tokens:
        launch = _launch_slices
        channels = streams_fma.CHANNELS
        group = 1
    else:
        launch = streams_wgmma.launch
        channels = streams_wgmma.CHANNELS
        group = collapse.WARPS
    new, partials = launch(streams, fn, layer_number, added, new_type, interpret)
    new = streams if y is None else new
    slices = width // channels
    problem = collapse.CollapseProblem(tokens, width, fn.shape[-2], slices, group, norm_eps, hc_eps, iterations)
    weights = base, scale, weight
    pre = mixing if delays_pre else None
    x, mixing = collapse.collapse(problem, new, partials, weights, layer_number, pre, interpret=interpret)
    return new, x, mixing


def _check_operands(streams, fn, base, scale, weight, layer, y, mixing):
    check_array("streams", streams, jnp.bfloat16, None, STREAMS, None)
    tokens, _, width = streams.shape
    check_weight("fn", fn, layer, jnp.float32, None, STREAMS * width)
    rows = fn.shape[-2]
    check_weight("base", base, layer, jnp.float32, rows)
    check_weight("scale", scale, layer, jnp.float32, 3 if rows == MIXING else 1)
    check_weight("weight", weight, layer, jnp.float32, width)
    if y is not None:
        check_array("y", y, jnp.bfloat16, tokens, width)
    if y is not None or mixing is not None:
        check_array("mixing", mixing, jnp.float32, tokens, MIXING)
    widths = range(collapse.CHANNELS, MAX_WIDTH + 1, collapse.CHANNELS)
    max_tokens = ((1 << 31) - 1) // (STREAMS * max(width, 1))
    check_rules(
        {
            f"{MIXING} or {STREAMS} rows of fn, got {rows}": rows in (MIXING, STREAMS),
            f"1024, 2048, .. or {MAX_WIDTH} channels, got {width}": width in widths,
            f"1 to {max_tokens} tokens of {width} channels, got {tokens}": 0 < tokens <= max_tokens,
        }
    )


def fuses_all_reduce(tokens: int) -> bool:
    """Returns whether `hyper_connections` takes a `table` for this number of tokens."""
    return tokens <= streams_fma.MAX_TOKENS


def _launch_slices(streams, fn, layer, added, new_type, interpret):
    """Launches the kernel of `streams_fma` for up to 4 tokens, or that of `streams_mma` for more.

    Args:
      streams: [T, 4, D] bfloat16.
      fn: [R, 4 * D] float32 weights of the logits, or with `layer` a stack of them.
      layer: [1] int32 index of the layer within fn, or None.
      added: (y, mixing, table) of `hyper_connections`.
      new_type: shape and dtype of the new streams, or None if y is None.
      interpret: whether to interpret the kernel.

    Returns:
      (new streams or None, [T, slices * 32] float32 partial sums, see `mixing.StreamRefs`).
    """
    tokens, _, width = streams.shape
    _, _, table = added
    variant = streams_fma if tokens <= streams_fma.MAX_TOKENS else streams_mma

    def body(streams_gmem, fn_gmem, layer_gmem, added_gmem, new_gmem, partials_gmem, **scratch):
        fn_gmem = weights_of_layer(fn_gmem, layer_gmem)
        refs = StreamRefs(streams_gmem, fn_gmem, partials_gmem, new_gmem, *added_gmem)
        variant.update_slice(lax.axis_index("slice"), lax.axis_index("tile"), refs, **scratch)

    slices = width // variant.CHANNELS
    launch = kernel(
        body,
        out_type=(new_type, jax.ShapeDtypeStruct((tokens, slices * SUMS), jnp.float32)),
        kernel_name="hyper_connections_few",
        grid={"slice": slices, "tile": -(-tokens // variant.TOKENS)},
        scratch_types=variant.scratch_types(tokens, rows=fn.shape[-2], fuses_all_reduce=table is not None),
        interpret=interpret,
    )
    return launch(streams, fn, layer, added)
