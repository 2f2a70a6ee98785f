"""Routed experts for few tokens: y[t, j] = down_e(w[t, j] * swiglu(gate_up_e(x[t]))) with e = selected[t, j].

The kernel is bound by the bandwidth of reading the selected experts' weights once. The router, or a separate launch,
first groups the (token, expert) pairs: a group has up to 8 pairs of one expert. A persistent grid of one block per SM
then walks over tiles of 64 weight rows: first all groups' tiles of gate_up, which compute the hidden channels, then all
groups' tiles of down. Each block multiplies a range of consecutive tiles of gate_up, and another range of down.
If rows of down are short, a block multiplies four tiles of down at a time. The warpgroups have the roles of
`skinny_gemm`. Their additional work is:

    warpgroup   role        additional work                                          waits for       signals
    0..3        multiply    loads a group's inputs before the group's first tile     hidden tiles
    4           load        none: it loads weights of down without waiting for the
                            hidden tiles
    5           epilogue    first: copies the block's groups to shared memory                        groups_ready
                            each tile: stores SwiGLU or outputs of down                              hidden tiles, terms
                            at the end, with a shared expert: computes the block's   terms
                            part of the sums over a token's pairs

All warpgroups meet at the barrier `groups_ready`. Hidden tiles and terms are counters in global memory through which
blocks wait for each other (`tile_counters`): a counter of hidden tiles for each group, and a counter of terms for each
64 output channels.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts import pair_groups, tile_counters
from pallas_kernels.experts.expert_operands import check_operands, check_shared
from pallas_kernels.matmul import epilogue, skinny_gemm
from pallas_kernels.matmul.quantized_weights import FP4, FP8, HALF, ROWS, SCALED, WeightLayout
from pallas_kernels.matmul.routing import FIRST_PAIR, GROUP_WORDS, counts_size, max_groups
from pallas_kernels.matmul.skinny_gemm import EPILOGUE, Product, SkinnyGemm
from pallas_kernels.matmul.skinny_mma import COLUMNS, MULTIPLIERS
from pallas_kernels.mgpu import barriers
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, runs_all_blocks_at_once
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_PAIRS = 1024  # maximum number of pairs of a token and an expert; one warpgroup groups them
MAX_SHARED_TOKENS = COLUMNS  # maximum number of tokens with a shared expert
MAX_SEGMENTS = 4  # largest number of segments of a stage
OTHER_BYTES = 8 << 10  # bytes of shared memory for everything but `SkinnyGemm`; enough for any number of tokens
# Indices of the linear maps of an expert.
GATE_UP = 0
DOWN = 1


@cached_trace("limit", "scale_block")
def experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    permutation: tuple[jax.Array, jax.Array] | None = None,
    shared: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
    *,
    layer: jax.Array | None = None,
    limit: float,
    scale_block: int = SCALED,
    interpret: bool = False,
) -> jax.Array:
    """Returns `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), -limit, limit))` for each token and expert.

    Here, e is an expert of the token, and w the token's routing weight of e. The outputs of each linear map and the
    input of `down` are rounded to bfloat16. The order in which a sum's products are added depends on the shapes and the
    storage of the weights alone.

    Args:
      x: [T, D] bfloat16 activations.
      selected: [T, k] int32 experts of each token, at most 1024 pairs. A pair whose expert is outside of [0, E) is not
        computed.
      weights: [T, k] float32 routing weights.
      gate_up: [E, 2 * I, D] bfloat16, the gate's rows first; or FP4 codes [E, 2 * I, D / 2] uint8, two E2M1 codes a
        byte, and E8M0 scales [E, 2 * I, D / 32] uint8. D is a multiple of 512 (bfloat16: of 256), and I of 64.
      down: [E, D, I] bfloat16; or codes [E, D, I / 2] and scales [E, D, I / 32].
      permutation: pairs grouped by expert as `router` returns them; None to group them in a separate launch.
      shared: ((codes, scales) of gate_up, (codes, scales) of down) of an FP8 expert that all tokens share, or None. The
        codes are E4M3, [2 * S, D] and [D, S] uint8. The scales are E8M0 uint8, one for each block of codes. S is a
        multiple of 256. A shared expert requires T <= 8, and FP4 experts with I a multiple of 512. If `scale_block` is
        32, S and I need only be multiples of 64.
      layer: [] int32 index of this layer if all matrices and scales have a leading axis of layers, else None.
      limit: clipping limit of SwiGLU.
      scale_block: number of rows and of columns of a block of the shared expert's codes with one scale, 128 or 32.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      Without a shared expert, [T, k, D] bfloat16, unspecified for pairs without an expert. With a shared expert, [T, D]
      bfloat16: the sum of the outputs of a token's pairs, added in order in float32, plus the shared expert's output.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens, depth = x.shape
    layout, num_experts, inner, matrices = check_operands(x, selected, weights, gate_up, down, layer)
    pairs = selected.size
    check_rules({f"1 to {MAX_PAIRS} pairs of a token and an expert, got {pairs}": 0 < pairs <= MAX_PAIRS})
    selected = selected.reshape(-1)
    weights = weights.reshape(-1)
    if shared is not None:
        check_shared(tokens, depth, inner, layout, *shared, layer, scale_block)
    shared_inner = 0 if shared is None else shared[1][0].shape[-1]
    sizes = pairs, pairs // tokens, num_experts, depth, inner, shared_inner
    p = ExpertsProblem(layout, *sizes, limit, shared_layout=WeightLayout(8, scale_block))
    groups, counts = permutation or pair_groups.group_by_expert(selected, num_experts, depth, interpret=interpret)
    check_array("groups of pairs", groups, jnp.int32, p.groups * GROUP_WORDS)
    check_array("counts of groups", counts, jnp.int32, counts_size(p.groups, depth))
    routing = RoutedPairs(selected, groups, jax.new_ref(counts), weights)
    layers = () if layer is None else (matrices[DOWN][0].shape[0] // num_experts,)
    flat = jax.tree.map(lambda array: array.reshape(*layers, -1, array.shape[-1]), matrices)
    operands = (flat, shared or ()), layer_operand(layer)
    y = _run_maps(p, x, routing, operands, interpret)
    if not shared:
        return y[0].reshape(tokens, -1, depth)
    if len(y) > 2:
        return y[2]
    # This sum has the same bits as the sum of `tile_counters.add_up_terms`.
    total = sum_of_experts(y[0].reshape(tokens, -1, depth), selected.reshape(tokens, -1), num_experts)
    return (total + y[1].astype(jnp.float32)).astype(jnp.bfloat16)


def _run_maps(p, x, routing, operands, interpret):
    """Runs both linear maps, in one launch if all blocks run at once, otherwise in two.

    Returns:
      The outputs of down, a list of up to three bfloat16 arrays:

        * [P, D], the output of each pair.
        * [T, D], the output of the shared expert, if there is one.
        * [T, D], the sum over each token's pairs and the shared expert, if there is one and one launch runs both maps.
    """

    def output_types(width, shared_width):
        """Returns the types of a map's outputs: of the routed experts, then of the shared expert if there is one."""
        types = [jax.ShapeDtypeStruct((p.pairs, width), jnp.bfloat16)]
        if p.shared:
            types.append(jax.ShapeDtypeStruct((p.tokens, shared_width), jnp.bfloat16))
        return types

    inputs = [x, x] if p.shared else [x]
    hidden_types = output_types(p.inner, p.shared)
    y_types = output_types(p.depth, p.depth)
    if not interpret and runs_all_blocks_at_once():
        if p.shared:
            y_types.append(jax.ShapeDtypeStruct((p.tokens, p.depth), jnp.bfloat16))
        _, y = _launch(p, (hidden_types, y_types), inputs, routing, operands, interpret)
        return y
    # Blocks that may run one after the other cannot wait for each other, so each map has a separate launch.
    gate_up = dataclasses.replace(p, maps=(GATE_UP,))
    down = dataclasses.replace(p, maps=(DOWN,))
    (hidden,) = _launch(gate_up, (hidden_types,), inputs, routing, operands, interpret)
    (y,) = _launch(down, (y_types,), hidden, routing, operands, interpret)
    return y


def sum_of_experts(terms: jax.Array, selected: jax.Array, experts: int) -> jax.Array:
    """Sums the outputs of each token's experts, in the order of `selected`.

    The sum consists of elementwise operations, so that XLA fuses it with the next operation.

    Args:
      terms: [T, k, D] outputs of the experts.
      selected: [T, k] int32 experts. Experts outside of [0, experts) add nothing.
      experts: number of experts.

    Returns:
      [T, D] float32 sums.
    """
    has_expert = (selected >= 0) & (selected < experts)
    terms = jnp.where(has_expert[..., None], terms.astype(jnp.float32), 0.0)
    return functools.reduce(jnp.add, [terms[:, j] for j in range(terms.shape[1])])


class RoutedPairs(NamedTuple):
    """Pairs of a token and an expert. Pair t * k + j is token t with its j-th expert."""

    selected: Any  # [P] int32, the expert of each pair
    groups: Any  # [G * GROUP_WORDS] int32, the table of groups of `routing.group_pairs`
    counts: Any  # [N] int32, the number of groups, then the counters of `tile_counters`
    weights: Any  # [P] float32 routing weights


@dataclasses.dataclass(frozen=True)
class ExpertsProblem:
    """Static description of a launch of `experts`."""

    layout: WeightLayout  # storage of the routed experts' weights
    pairs: int  # number of pairs of a token and an expert
    top_k: int  # number of pairs of a token
    experts: int  # number of experts of a layer
    depth: int  # number of channels of a token
    inner: int  # number of hidden channels, between the two maps of an expert
    shared: int  # number of hidden channels of the shared expert; 0 if there is none
    limit: float  # clipping limit of SwiGLU
    maps: tuple[int, ...] = (GATE_UP, DOWN)  # maps that the launch computes
    shared_layout: WeightLayout = FP8  # storage of the shared expert's weights

    @property
    def tokens(self) -> int:
        return self.pairs // self.top_k

    @property
    def gemm(self) -> SkinnyGemm:
        """The `SkinnyGemm` with which a block multiplies tiles of all matrices."""
        matrices = ((self.layout, self.depth),)
        if not self.has_short_rows:
            matrices += ((self.layout, self.inner),)
        if self.shared:
            matrices += (self.shared_layout, self.depth), (self.shared_layout, self.shared)
        segments = skinny_gemm.most_segments(*matrices)
        if not self.has_short_rows:
            return SkinnyGemm(matrices, COLUMNS, segments, segments)
        gemm = SkinnyGemm(matrices, COLUMNS, segments, segments, short_rows=(self.inner,))
        # Stages have four segments only if each warpgroup then has two stages: one that it multiplies, and one to which
        # the next weights are copied. Otherwise stages have two segments. Stages of one segment are slow to copy.
        if segments < MAX_SEGMENTS or gemm.stages(OTHER_BYTES) < 2 * MULTIPLIERS:
            gemm = dataclasses.replace(gemm, segments=2, step_segments=2)
        return gemm

    @property
    def has_short_rows(self) -> bool:
        """Whether weights are FP4, and rows of down have fewer than `MAX_SEGMENTS` segments for each warpgroup."""
        return self.layout == FP4 and self.inner < MULTIPLIERS * MAX_SEGMENTS * FP4.segment

    def other_bytes(self, workers: int) -> int:
        """Returns the number of bytes of shared memory that each of `workers` blocks needs beside its `gemm`."""
        return 8 * GROUP_WORDS * sum(self.max_groups(i, workers) for i in self.maps) + 2048

    @property
    def tiles(self) -> tuple[int, int]:
        """The numbers of an expert's tiles of (gate_up, down). A tile of gate_up has 32 rows of gate and 32 of up."""
        return self.inner // HALF, self.depth // ROWS

    @property
    def shared_tiles(self) -> tuple[int, int]:
        """The numbers of the shared expert's tiles of (gate_up, down)."""
        return self.shared // HALF, self.depth // ROWS if self.shared else 0

    @property
    def groups(self) -> int:
        """The maximum number of groups of pairs. As the index of a group, this number stands for the shared expert."""
        return max_groups(self.pairs, self.experts)

    @property
    def first_term(self) -> int:
        """The index of the first counter of terms, see `tile_counters`, counted from the counter of group 0."""
        return self.groups + 1

    def tiles_together(self, i: int) -> int:
        """Returns the number of consecutive tiles of map `i` that a block multiplies at a time."""
        return MULTIPLIERS if i == DOWN and self.has_short_rows else 1

    def first_tiles(self, groups, i: int, worker, workers: int) -> tuple[Any, Any]:
        """Returns the indices of the first tile of groups and of the first tile of the shared expert of a block.

        A block's tiles end where the tiles of the next block begin. The tiles of the shared expert are divided evenly
        among the blocks. The tiles of groups, which have fewer bits, are divided so that all blocks read about the same
        number of bytes.

        Args:
          groups: number of groups.
          i: index of the map, GATE_UP or DOWN.
          worker: index of the block.
          workers: number of blocks.

        Returns:
          (index among the tiles of all groups, index among the tiles of the shared expert).
        """
        workers = jnp.int32(workers)
        together = self.tiles_together(i)
        tiles = groups * (self.tiles[i] // together)
        shared = self.shared_tiles[i]
        even_first = lax.div(worker * tiles, workers)
        if not shared:
            return even_first * together, jnp.int32(0)
        # Tiles are weighed by their number of bits per weight, as if all tiles had equally many weights. `tiles` counts
        # `together` tiles of groups as one, so their bits are added.
        bits = self.layout.bits * together
        shared_bits = FP8.bits
        shared_first = lax.div(worker * shared, workers)
        total = bits * tiles + shared_bits * shared
        routed_size = lax.div(worker * total, workers) - shared_bits * shared_first + bits // 2
        # Bytes are balanced only if a block's share is at least as large as a tile of the shared expert. With smaller
        # shares, a block with a tile of the shared expert would need a negative number of tiles of groups.
        balanced = total >= shared_bits * workers
        routed_first = jnp.where(balanced, jnp.clip(lax.div(routed_size, bits), 0, tiles), even_first)
        return routed_first * together, shared_first

    def max_groups(self, i: int, workers: int) -> int:
        """Returns the maximum number of groups to which a block's tiles of map `i` belong, with `workers` blocks."""
        together = self.tiles_together(i)
        group_tiles = self.tiles[i] // together
        tiles = -(-self.groups * group_tiles // workers)
        if self.shared:
            tiles += -(-FP8.bits * self.shared_tiles[i] // (self.layout.bits * together * workers)) + 1
        return -(-tiles // group_tiles) + 1


def _launch(p, out_type, inputs, routing, operands, interpret):
    """Runs the maps `p.maps` in one launch.

    Args:
      p: description of the launch.
      out_type: for each map, the type of the routed experts' output, then that of the shared expert's output.
      inputs: the routed experts' input to the first map, then that of the shared expert if there is one.
      routing: the (token, expert) pairs, their groups and their routing weights.
      operands: (matrices of the routed experts and of the shared expert, [1] int32 index of the layer or None).
      interpret: whether to interpret the kernel.

    Returns:
      The outputs of each map.
    """
    workers = 3 if interpret else MULTIPROCESSORS
    sizes = [p.max_groups(i, workers) for i in p.maps]
    launch = kernel(
        functools.partial(_body, p),
        out_type=out_type,
        kernel_name="experts",
        grid={"worker": workers},
        num_threads=skinny_gemm.WARPGROUPS,
        scratch_types={
            "tables_smem": [plgpu.SMEM((size * GROUP_WORDS,), jnp.int32) for size in sizes],
            "factors_smem": plgpu.SMEM((sizes[0] * COLUMNS,), jnp.float32) if GATE_UP in p.maps else None,
            "groups_ready": plgpu.Barrier(num_arrivals=skinny_gemm.WARPGROUPS),
            "skinny": p.gemm.scratch(p.other_bytes(workers), interpret=interpret),
        },
        interpret=interpret,
    )
    return launch(routing, inputs, *operands)


def _body(p, routing, inputs, weights, layer_gmem, *outs, tables_smem, factors_smem, groups_ready, skinny):
    matrices, shared_matrices = weights_of_layer(weights, layer_gmem)
    worker, warpgroup = axis_indices("worker", "warpgroup")
    workers = lax.axis_size("worker")
    groups = routing.counts[0]
    routed_tiles = []  # for each map, the block's (first tile, number of tiles, first group)
    shared_tiles = []  # for each map, the block's (first tile, number of tiles) of the shared expert
    for i in p.maps:
        begin, shared_begin = p.first_tiles(groups, i, worker, workers)
        end, shared_end = p.first_tiles(groups, i, worker + 1, workers)
        first_group = lax.div(begin, p.tiles[i])
        routed_tiles.append((begin, end - begin, first_group))
        shared_tiles.append((shared_begin, shared_end - shared_begin))

    @pl.when(warpgroup == EPILOGUE)
    def _():
        for (_, _, first_group), table_smem in zip(routed_tiles, tables_smem, strict=True):
            pair_groups.load_groups(routing.groups, first_group, table_smem)

    barriers.sync_block(groups_ready)
    if factors_smem is not None:
        load_weights = functools.partial(pair_groups.load_weights, routing.weights, tables_smem[0], factors_smem)
        pl.when(warpgroup == EPILOGUE)(load_weights)

    products = []
    for n, i in enumerate(p.maps):
        sources = inputs if n == 0 else outs[0]
        tables = tables_smem[n], factors_smem, routing.counts
        products.append(_routed_product(p, i, routed_tiles[n], tables, sources[0], outs[n][0], matrices[i]))
        if p.shared:
            arrays = routing.counts, sources[1], outs[n][1], shared_matrices[i]
            products.append(_shared_product(p, i, shared_tiles[n], *arrays))
    p.gemm.run(warpgroup, products, skinny)

    if len(outs[-1]) > 2:

        @pl.when(warpgroup == EPILOGUE)
        def _():
            terms, last, total = outs[-1]
            arrays = total, terms, last, routing.selected, routing.counts
            tile_counters.add_up_terms(*arrays, p.first_term, worker, workers, p.experts)


def _wait_for_inputs(p, counts, i, group, tiles):
    """Waits until all tiles of gate_up of a group are written, if map `i` is `DOWN` and this launch writes them.

    `tiles` is (number of tiles of gate_up, number of tiles of down) of the group's expert.
    """
    if i == DOWN and GATE_UP in p.maps:
        tile_counters.wait_for_tiles(counts, group, tiles[GATE_UP])


def _signal_tile(p, counts, i, group, tile):
    """Counts a written tile of map `i` in `counts`, see `tile_counters`, if blocks of this launch wait for the tile.

    `group` is the index of the tile's group, and `tile` the index of the tile among those of its expert.
    """
    if len(p.maps) > 1 and (i == GATE_UP or p.shared):
        tile_counters.signal_tile(counts, group if i == GATE_UP else p.first_term + tile)


def _routed_product(p, i, block_tiles, tables, source_gmem, out_gmem, matrix):
    """Returns the `Product` of a block's tiles of linear map `i` of the routed experts. Tiles are ordered by group.

    Args:
      p: description of the launch.
      i: index of the map, GATE_UP or DOWN.
      block_tiles: (index of the block's first tile, number of its tiles, index of its first group).
      tables: (groups of the block, routing weights of their pairs, both in shared memory; counters in global memory).
      source_gmem: [.., channels] bfloat16 inputs of the map.
      out_gmem: [P, channels] bfloat16 outputs of the map.
      matrix: (codes, scales) of all experts.
    """
    begin, count, first_group = block_tiles
    tables_smem, factors_smem, counts = tables
    tiles = jnp.int32(p.tiles[i])
    gated = i == GATE_UP
    together = p.tiles_together(i)

    def group_of(n):
        """Returns the index in `tables_smem` of the group to which the block's n-th tile belongs."""
        return lax.div(begin + n, tiles) - first_group

    def pairs_of(n):
        return tables_smem.at[pl.ds(group_of(n) * GROUP_WORDS + FIRST_PAIR, COLUMNS)]

    def rows_of(index):
        """Returns the first weight rows of both halves of a tile, the block's tile with index `index * together`."""
        n = index * together
        expert = tables_smem[group_of(n) * GROUP_WORDS]
        tile = lax.rem(begin + n, tiles)
        if gated:
            row = expert * (2 * p.inner) + tile * HALF
            return row, row + p.inner
        row = expert * p.depth + tile * ROWS
        return row, row + HALF

    def load_inputs(index, load):
        n = index * together

        @pl.when((n == 0) | (lax.rem(begin + n, tiles) == 0))
        def _():
            _wait_for_inputs(p, counts, i, first_group + group_of(n), p.tiles)
            load(source_gmem, pairs_of(n), p.top_k if gated else 1)

    def finish(n, sums):
        tile = lax.rem(begin + n, tiles)
        weights = factors_smem.at[pl.ds(group_of(n) * COLUMNS, COLUMNS)] if gated else None
        limit = p.limit if gated else None
        epilogue.store_few(out_gmem, sums, tile, limit=limit, rows_smem=pairs_of(n), weights_smem=weights)
        _signal_tile(p, counts, i, first_group + group_of(n), tile)

    depth = p.depth if gated else p.inner
    codes, scales = matrix
    functions = rows_of, load_inputs, finish
    count = lax.div(count, together)
    return Product(p.layout, codes, scales, count, depth, 0, gated, *functions, whole_rows=together > 1)


def _shared_product(p, i, block_tiles, counts, source_gmem, out_gmem, matrix):
    """Returns the `Product` of a block's tiles of map `i` of the shared expert.

    `block_tiles` is (index of the block's first tile, number of its tiles).
    """
    begin, count = block_tiles
    gated = i == GATE_UP
    group = jnp.int32(p.groups)

    def rows_of(n):
        # Blocks without a tile call this function, too. The minimum keeps their rows inside the matrix.
        row = jnp.minimum(begin + n, p.shared_tiles[i] - 1) * (HALF if gated else ROWS)
        return row, row + (p.shared if gated else HALF)

    def load_inputs(n, load):
        @pl.when(n == 0)
        def _():
            _wait_for_inputs(p, counts, i, group, p.shared_tiles)
            load(source_gmem, p.tokens)

    def finish(n, sums):
        epilogue.store_few(out_gmem, sums, begin + n, limit=p.limit if gated else None)
        _signal_tile(p, counts, i, group, begin + n)

    depth = p.depth if gated else p.shared
    codes, scales = matrix
    return Product(p.shared_layout, codes, scales, count, depth, 0, gated, rows_of, load_inputs, finish)
