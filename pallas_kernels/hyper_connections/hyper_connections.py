"""The two launches: new streams with partial sums of logits, then weights, collapse and norm."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hyper_connections import collapse, few_tokens, many_tokens, token_tiles
from pallas_kernels.hyper_connections.mixing import STREAMS, SUMS
from pallas_kernels.mgpu import barriers, mailbox, vectors
from pallas_kernels.mgpu.bfloat16_words import PARTS
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


WIDEST = 7 * collapse.CHANNELS  # with one more warpgroup, 1024 threads
MANY = 256  # tokens, from which on `many_tokens` is faster


@cached_trace("norm_eps", "hc_eps", "iterations")
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
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Adds a block's output to the streams, and collapses them to the normed input of the next block.

    Args:
      streams: [T, 4, D] bfloat16, D a multiple of 1024 up to 7168.
      fn: [24, 4 * D] float32, or [4, 4 * D] of the head.
      base: [24] or [4] float32.
      scale: [3] or [1] float32.
      weight: [D] float32, of the norm.
      y: [T, D] bfloat16, what the block before returned; None: the streams stay as they are.
      mixing: [T, 24] float32, the weights with which that block was entered; with y.
      table: as for `mailbox.check_table`, with y, of up to 4 tokens: y is the sum of what these GPUs give, as
        `all_reduce` adds it up. None: y is whole.
      norm_eps: added to mean squares, of the streams and of the collapsed ones.
      hc_eps: added to `pre`, to comb's softmax and to its sums.
      iterations: of Sinkhorn, at least 1.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      The streams [T, 4, D] after that block; x [T, D] bfloat16; mixing [T, 24] float32 for the next call: 4 of `pre`, 4
      of `post`, 16 of `comb`, or None of the head.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    check_array("streams", streams, jnp.bfloat16, None, STREAMS, None)
    tokens, _, width = streams.shape
    mixed = STREAMS * (2 + STREAMS)
    check_array("fn", fn, jnp.float32, None, STREAMS * width)
    rows = fn.shape[0]
    check_array("base", base, jnp.float32, rows)
    check_array("scale", scale, jnp.float32, 3 if rows == mixed else 1)
    check_array("weight", weight, jnp.float32, width)
    if y is not None or mixing is not None:
        check_array("y", y, jnp.bfloat16, tokens, width)
        check_array("mixing", mixing, jnp.float32, tokens, mixed)
    check_rules(
        {
            f"{mixed} or {STREAMS} rows of fn, got {rows}": rows in (mixed, STREAMS),
            f"1024, 2048, .. or {WIDEST} channels, got {width}": 0 < width <= WIDEST and width % collapse.CHANNELS == 0,
            f"1 to {(1 << 31) // (STREAMS * width) - 1} tokens of {width} channels, got {tokens}": (
                0 < STREAMS * width * tokens < 1 << 31
            ),
        }
    )
    if table is not None and y is not None:
        mailbox.check_table(table, interpret=interpret)
        check_rules({f"parts of up to 4 tokens and 4096 channels, got {y.shape}": fuses_all_reduce(*streams.shape)})
    added = () if y is None or mixing is None else tuple(x for x in (y, mixing, table) if x is not None)
    few = tokens < (many_tokens.TOKENS if interpret else MANY)
    new, partials = (_few if few else _many)(streams, fn, *added, interpret=interpret)
    slices, each = (width // few_tokens.CHANNELS, 1) if few else (width // many_tokens.CHANNELS, collapse.WARPS)
    problem = collapse.CollapseProblem(tokens, width, rows, slices, each, norm_eps, hc_eps, iterations)
    x, mixing = collapse.collapse(problem, new, partials, base, scale, weight, interpret=interpret)
    return new, x, mixing


def fuses_all_reduce(tokens: int, _: int, width: int) -> bool:
    """Whether y may be a part of a sum, for streams [tokens, 4, width]: each block of threads needs a counter."""
    return tokens <= few_tokens.MAX_TOKENS and width <= few_tokens.CHANNELS * mailbox.BLOCKS


def _few(streams, fn, *added, interpret):
    tokens, _, width = streams.shape
    slices = width // few_tokens.CHANNELS
    tiles = -(-tokens // token_tiles.TOKENS) if tokens > few_tokens.MAX_TOKENS else 0

    def body(streams, fn, *refs, **scratch):
        *outs, partials = refs[len(added) :]
        new = outs[0] if outs else None
        arrays: dict[str, Any] = dict(streams=streams, fn=fn, new=new, partials=partials)
        arrays |= dict(zip(("y", "mixing", "table"), refs[: len(added)], strict=False))
        part = lax.axis_index("slice")
        if tiles:
            token_tiles.add_tile(part, lax.axis_index("tile"), **arrays, **scratch)
        else:
            few_tokens.add_slice(part, **arrays, **scratch)

    if tiles:
        scratch_types = dict(
            tile_values=plgpu.SMEM((STREAMS * token_tiles.TOKENS, token_tiles.CHANNELS), jnp.bfloat16),
            sums=plgpu.SMEM((STREAMS * 2 * -(-fn.shape[0] // 8) * vectors.THREADS,), jnp.float32),
        )
    else:
        scratch_types = dict(inbox=plgpu.SMEM((tokens * STREAMS * SUMS,), jnp.float32))
        if len(added) > 2:
            scratch_types["total"] = plgpu.SMEM((tokens * few_tokens.CHANNELS // 2,), jnp.uint32)
    partials = jax.ShapeDtypeStruct((tokens, slices * SUMS), jnp.float32)
    new = [jax.ShapeDtypeStruct(streams.shape, streams.dtype)] if added else []
    run = kernel(
        body,
        out_type=[*new, partials],
        kernel_name="hyper_connections_few",
        grid=(slices, tiles or 1),
        grid_names=("slice", "tile"),
        scratch_types=scratch_types,
        interpret=interpret,
    )
    *new, partials = run(streams, fn, *added)
    return new[0] if new else streams, partials


def _many(streams, fn, *added, interpret):
    tokens, _, width = streams.shape
    slices, tiles = width // many_tokens.CHANNELS, -(-tokens // many_tokens.TOKENS)
    rows = -(-fn.shape[0] // 8) * 8
    groups = min(max((3 if interpret else MULTIPROCESSORS) // slices, 1), tiles)
    columns, warpgroups = PARTS * rows, 1 if interpret else many_tokens.WARPGROUPS

    def body(streams, fn, *refs, weights, operand, met):
        *added, partials = refs
        y, mixing, new = added or (None, None, None)
        part, group, warpgroup = (lax.axis_index(name) for name in ("slice", "group", "warpgroup"))
        many_tokens.split_weight(weights, fn, part, warpgroup)
        barriers.sync_block(met)
        share = groups * warpgroups
        own = warpgroup * groups + group

        def chunk_at(i, chunk):
            """(first token, first channel); what follows the last chunk of a tile is the next tile's first."""
            i, chunk = i + lax.div(chunk, jnp.int32(many_tokens.CHUNKS)), lax.rem(chunk, jnp.int32(many_tokens.CHUNKS))
            # The last tile begins earlier where it would be cut: the same values are written twice.
            start = jnp.minimum((own + i * share) * many_tokens.TOKENS, tokens - many_tokens.TOKENS)
            return start, part * many_tokens.CHANNELS + chunk * many_tokens.CHUNK

        def visit(i, ahead):
            def add(chunk, carry):
                acc, squares, ahead = carry
                mine = operand.at[many_tokens.again(warpgroup)]
                places = chunk_at(i, chunk), chunk_at(i, chunk + 1)
                found, ahead = many_tokens.mix_chunk(mine, ahead, *places, streams, new, y, mixing)
                return many_tokens.multiply_add(acc, mine, weights, chunk), squares + found, ahead

            acc = plgpu.layout_cast(jnp.zeros((many_tokens.TOKENS, columns), jnp.float32), plgpu.Layout.WGMMA)
            squares = plgpu.layout_cast(jnp.zeros((vectors.THREADS,), jnp.float32), vectors.layout(vectors.THREADS))
            acc, squares, ahead = lax.fori_loop(0, many_tokens.CHUNKS, add, (acc, squares, ahead))
            many_tokens.store_sums(partials.at[part], chunk_at(i, jnp.int32(0))[0], acc, squares)
            return ahead

        first = many_tokens.load_rows(*chunk_at(jnp.int32(0), jnp.int32(0)), streams, y)
        lax.fori_loop(0, lax.div(tiles - own + share - 1, jnp.int32(share)), visit, first)

    # Room for whole groups of four tokens, the last of which are never written.
    padded = -(-tokens // collapse.WARPS) * collapse.WARPS
    new = [jax.ShapeDtypeStruct(streams.shape, streams.dtype)] if added else []
    run = kernel(
        body,
        out_type=[*new, jax.ShapeDtypeStruct((slices, padded, SUMS), jnp.float32)],
        kernel_name="hyper_connections_many",
        grid=(slices, groups),
        grid_names=("slice", "group"),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=dict(
            weights=plgpu.SMEM(
                (many_tokens.CHUNKS * STREAMS, columns, many_tokens.CHUNK), jnp.bfloat16, transforms=TRANSFORMS
            ),
            operand=plgpu.SMEM(
                (warpgroups, STREAMS, many_tokens.TOKENS, many_tokens.CHUNK), jnp.bfloat16, transforms=TRANSFORMS
            ),
            met=plgpu.Barrier(num_arrivals=warpgroups),
        ),
        interpret=interpret,
    )
    *new, partials = run(streams, fn, *added)
    return new[0] if new else streams, partials.reshape(slices, -1)
