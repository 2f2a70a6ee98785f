"""Linear maps of few tokens: y[t, r] = sum_k W[r, k] * x[t, k], with W in FP8 or bfloat16, or SwiGLU of two such maps.

The kernel is bound by the bandwidth of reading W once. Each cluster of a persistent grid multiplies a range of
consecutive tiles of 64 rows. The blocks of a cluster split the columns of a tile, so that each block's inputs fit
into shared memory, see `Config.choose`. The warpgroups have the roles of `skinny_gemm`. If a cluster has several
blocks, their epilogues send the sums of a tile to one of the blocks, which adds up the sums at the end
(`sum_exchange`).
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, Outputs, checked_outputs, out_types, store_tile
from pallas_kernels.linear.sum_exchange import SumExchange
from pallas_kernels.matmul import epilogue, skinny_gemm
from pallas_kernels.matmul.quantized_weights import BF16, HALF, ROWS, SCALED, SHIFT, WeightLayout
from pallas_kernels.matmul.skinny_gemm import EPILOGUE, LOAD, Product, SkinnyGemm
from pallas_kernels.matmul.skinny_mma import COLUMNS, MULTIPLIERS
from pallas_kernels.mgpu import barriers
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import CLUSTERS_AT_ONCE, MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel, wait_for_inputs
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TOKENS = 32
MAX_NORMED_TOKENS = 16  # maximum number of tokens with a norm; registers do not suffice for more
FEW_TOKENS = 16  # number of tokens for which `Config.choose` chooses the number of blocks of a cluster
MIN_STAGES = 8  # smallest number of stages: two for each warpgroup that multiplies
SPLITS = (1, 2, 4)  # numbers of blocks that a cluster can have
OTHER_BYTES = 2048  # bytes of shared memory that neither `SkinnyGemm.stages` nor `SumExchange.num_bytes` counts


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of a launch's work among blocks. `SkinnyGemm` describes `segments`, `places` and `max_stages`."""

    tokens: int = COLUMNS  # largest number of tokens of a launch, a multiple of 8; more tokens take several launches
    splits: int = 1  # number of blocks of a cluster, which split the columns of a tile
    workers: int = MULTIPROCESSORS  # number of clusters
    segments: int = 1
    places: int = MULTIPLIERS
    max_stages: int = skinny_gemm.MAX_STAGES

    @classmethod
    def choose(cls, p: "QuantizedLinearProblem", *, interpret: bool) -> "Config | None":
        """Chooses the division of the work, with stages as large as possible.

        `splits` decides the order in which products are added, so it does not depend on the number of tokens. The value
        is the smallest element of `SPLITS` that meets these conditions:

          1. Each block gets a multiple of `min_columns` columns.
          2. 16 tokens fit into shared memory, with a place for the partial sums of each warpgroup.
          3. More than half of the multiprocessors have work. This is not required if the kernel is interpreted.

        If no element meets all conditions, `splits` is the largest one that meets the first two.

        Args:
          p: description of the launch; `p.config` is not used.
          interpret: whether the kernel is interpreted. If so, there are at most two clusters of at most two blocks.

        Returns:
          The config for all tokens of `p` or, if they do not fit, the config for 16 tokens. None if no element of
          `SPLITS` meets the first two conditions.
        """
        chosen = None
        tokens = -(-p.tokens // COLUMNS) * COLUMNS
        for splits in SPLITS:
            if p.depth % (min_columns(p.matrices) * splits) or (interpret and splits > 2):
                continue
            workers = min(p.tiles, 2 if interpret else CLUSTERS_AT_ONCE[splits])
            for_few_tokens = next(_configs_with_room(p, FEW_TOKENS, splits, workers), None)
            if for_few_tokens is None or for_few_tokens.places == 1:
                continue
            chosen = next(_configs_with_room(p, tokens, splits, workers), for_few_tokens)
            if interpret or 2 * workers * splits > MULTIPROCESSORS:
                break
        return chosen


def _configs_with_room(p, tokens, splits, workers) -> Iterator[Config]:
    """Yields the configs with which at least `MIN_STAGES` stages fit into shared memory.

    All configs have the given `tokens`, `splits` and `workers`. Configs in which each warpgroup has a place for its
    partial sums come first. Then come configs in which all warpgroups add to one place. Both kinds are ordered from
    large stages to small stages.
    """
    matrices = tuple((layout, p.depth // splits) for layout, _ in p.matrices)
    fewest = max(layout.min_segments for layout, _ in matrices)
    max_segments = skinny_gemm.most_segments(*matrices)
    for places, segments in itertools.product((MULTIPLIERS, 1), (4, 2, 1)):
        if fewest <= segments <= max_segments:
            config = Config(tokens, splits, workers, segments, places)
            candidate = dataclasses.replace(p, config=config)
            if candidate.gemm.stages(candidate.other_bytes) >= MIN_STAGES:
                yield config


def min_columns(matrices: tuple[tuple[WeightLayout, int], ...]) -> int:
    """Returns the smallest number of columns that a block can multiply.

    This is one smallest step for each of four warpgroups. With FP8 in blocks of 32 x 32 values, it is a single step.

    Args:
      matrices: a pair for each matrix, whose first element is the layout. The second element is not used.
    """
    layouts = [layout for layout, _ in matrices]
    step = max(layout.segment for layout in layouts) * max(layout.min_segments for layout in layouts)
    return step if any(layout.has_small_blocks for layout in layouts) else MULTIPLIERS * step


@cached_trace("spec", "swiglu_limit", "eps", "scale_block", "config")
def quantized_linear(
    x: jax.Array,
    weights: tuple[jax.Array | tuple[jax.Array, jax.Array], ...],
    norm: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    spec: LinearSpec,
    swiglu_limit: float | None = None,
    eps: float = 0.0,
    scale_block: int = SCALED,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs, or computes SwiGLU of its two outputs.

    Args:
      x: [T, num_groups * K] bfloat16 activations, T up to 32, or up to 16 with a norm.
      weights: matrices whose rows, one matrix after the other, form the weight. Each is [M, K] bfloat16, or a pair of
        E4M3 codes [M, K] uint8 and E8M0 scales [ceil(M / scale_block), ceil(K / scale_block)] uint8, one for each block
        of codes. K is a multiple of 256, or of 64 if all matrices have codes and `scale_block` is 32. If there are both
        codes and bfloat16 weights, K is a multiple of 512, or of 128 if `scale_block` is 32.
      norm: [K] float32 weight of an RMS norm, or None. If given, each row of x is normalized and rounded first, and
        `spec.num_groups` is 1.
      layer: [] int32 index of this layer if all weights and the norm have a leading axis of layers, else None.
      spec: outputs in float32 or bfloat16, whose sizes are multiples of 64. The last one may have 32 rows if the last
        matrix is bfloat16. Each output takes rows of one matrix only. With several groups, there is one matrix, and a
        group has a multiple of 128 rows.
      swiglu_limit: clipping limit of SwiGLU, or None. If given, the spec has two bfloat16 outputs, the gate and the up
        projection, whose sizes are equal and multiples of 128, or if `scale_block` is 32, of 64.
      eps: constant that the norm adds to the mean square.
      scale_block: number of rows and of columns of a block of codes with one scale, 128 or 32.
      config: the division of the launch's work; None to choose it.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output. Sums are computed in float32. The order in which a sum's products are added depends on
      the weights' shapes and storage alone. With a limit, there is one output, [T, size] bfloat16: `silu(min(gate,
      limit)) * clip(up, -limit, limit)`.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    pairs = tuple(weight if isinstance(weight, tuple) else (weight, None) for weight in weights)
    p = _problem(x, pairs, norm, layer, spec, swiglu_limit, eps, WeightLayout(8, scale_block))
    config = config or Config.choose(p, interpret=interpret)
    if config is None:
        raise NotImplementedError(f"the kernel takes fewer columns, got {p.depth}")
    if p.tokens > config.tokens:
        options = {"layer": layer, "spec": spec, "swiglu_limit": swiglu_limit, "eps": eps, "interpret": interpret}
        options["scale_block"] = scale_block
        chunks = jnp.split(x, list(range(config.tokens, p.tokens, config.tokens)))
        products = [quantized_linear(chunk, weights, norm, **options) for chunk in chunks]
        return tuple(jnp.concatenate(outs) for outs in zip(*products, strict=True))
    return _launch(dataclasses.replace(p, config=config), x, pairs, norm, layer, interpret)


def _problem(x, pairs, norm, layer, spec, swiglu_limit, eps, fp8):
    """Checks the arguments of `quantized_linear` and returns the static description of its problem."""
    tokens = x.shape[0]
    groups = spec.num_groups
    depth = x.shape[1] // groups
    check_array("x", x, jnp.bfloat16, None, groups * depth)
    for codes, scales in pairs:
        if scales is None:
            check_weight("weight", codes, layer, jnp.bfloat16, None, depth)
        else:
            check_weight("codes", codes, layer, jnp.uint8, None, depth)
            blocks = -(-codes.shape[-2] // fp8.block), -(-depth // fp8.block)
            check_weight("scales", scales, layer, jnp.uint8, *blocks)
    matrices = tuple((BF16 if scales is None else fp8, -(-codes.shape[-2] // ROWS)) for codes, scales in pairs)
    rows = sum(codes.shape[-2] for codes, _ in pairs)
    columns = min_columns(matrices)
    multiples = {"gate_multiple": max(fp8.block, ROWS), "min_last": HALF if pairs[-1][1] is None else ROWS}
    outputs = checked_outputs(spec, rows, swiglu_limit, **multiples)
    max_tokens = MAX_TOKENS if norm is None else MAX_NORMED_TOKENS
    rule = f"1 to {max_tokens} tokens{'' if norm is None else ' with a norm'}, got {tokens}"
    check_rules(
        {f"columns in multiples of {columns}, got {depth}": depth % columns == 0, rule: 0 < tokens <= max_tokens}
    )
    if norm is not None:
        check_weight("norm", norm, layer, jnp.float32, depth)
    assert groups == 1 or (len(pairs) == 1 and norm is None)
    return QuantizedLinearProblem(matrices, depth, tokens, groups, outputs, swiglu_limit, eps)


@dataclasses.dataclass(frozen=True)
class QuantizedLinearProblem:
    """Static description of a launch of `quantized_linear`."""

    matrices: tuple[tuple[WeightLayout, int], ...]  # (layout, number of tiles) of each matrix
    depth: int  # number of columns of the matrices
    tokens: int
    num_groups: int  # number of groups of tiles; each group multiplies different input channels
    outputs: Outputs
    limit: float | None  # clipping limit of SwiGLU
    eps: float
    config: Config = Config()

    @property
    def gemm(self) -> SkinnyGemm:
        """The GEMM of a block."""
        config = self.config
        matrices = tuple((layout, self.depth // config.splits) for layout, _ in self.matrices)
        segments = config.segments, skinny_gemm.most_segments(*matrices)
        return SkinnyGemm(matrices, config.tokens, *segments, config.places, config.max_stages)

    @property
    def tiles(self) -> int:
        return sum(tiles for _, tiles in self.matrices)

    @property
    def exchange(self) -> SumExchange:
        """The `SumExchange` that adds up the sums of a cluster's blocks."""
        ranges = itertools.pairwise(self.first_tile(worker) for worker in range(self.config.workers + 1))
        tiles = max(end - begin for begin, end in ranges)
        return SumExchange(self.config.splits, int(tiles), (ROWS, self.config.tokens))

    @property
    def other_bytes(self) -> int:
        """The number of bytes of shared memory that a block needs beside the memory of its `gemm`."""
        return OTHER_BYTES + self.exchange.num_bytes

    def first_tile(self, worker):
        """Returns the index of the first tile of cluster `worker`. Takes and returns an int or an int32 scalar.

        Tiles are divided so that all clusters read about the same number of bytes of weights.
        """
        clip, divide = (jnp.clip, lax.div) if isinstance(worker, jax.Array) else (np.clip, operator.floordiv)
        bits = [layout.bits * tiles for layout, tiles in self.matrices]
        # The total size of the tiles of all preceding clusters, in units of a tile with one bit per weight.
        begin = divide(worker * sum(bits), np.int32(self.config.workers))
        tile = 0
        for (layout, tiles), size in zip(self.matrices, bits, strict=True):
            tile += clip(divide(begin, np.int32(layout.bits)), 0, tiles)
            begin -= size
        return tile


def _launch(p, x, pairs, norm, layer, interpret):
    config = p.config
    outputs = p.outputs if p.limit is None else p.outputs[:1]
    inbox_out, inbox = p.exchange.types(config.workers, interpret=interpret)
    launch = kernel(
        functools.partial(_body, p),
        out_type=out_types(outputs, p.tokens) + inbox_out,
        kernel_name="quantized_linear",
        grid={"worker": config.workers},
        cluster={"split": config.splits},
        num_threads=skinny_gemm.WARPGROUPS,
        scratch_types={
            "factors_smem": None if norm is None else plgpu.SMEM((config.tokens,), jnp.float32),
            "inbox": inbox,
            "skinny": p.gemm.scratch(p.other_bytes, interpret=interpret),
        },
        waits_in_body=True,
        interpret=interpret,
    )
    return tuple(launch(x, pairs, norm, layer_operand(layer))[: len(outputs)])


def _body(p, x_gmem, weights_gmem, norm_gmem, layer_gmem, *outs_gmem, factors_smem, inbox, skinny):
    worker, split, warpgroup = axis_indices("worker", "split", "warpgroup")
    first_tile = p.first_tile(worker)
    end_tile = p.first_tile(worker + 1)
    if layer_gmem is None:
        # No kernel writes the weights, so the loading warpgroup starts while the previous kernel ends.
        pl.when(warpgroup != LOAD)(wait_for_inputs)
    else:
        # The kernel that writes the layer's index may still run, even if it is not the previous kernel. With
        # programmatic dependent launch, each kernel lets the next one start before it waits for its own inputs.
        wait_for_inputs()
    weights_gmem, norm_gmem = weights_of_layer((weights_gmem, norm_gmem), layer_gmem)
    store = functools.partial(_store, p, outs_gmem)
    exchange = None if inbox is None else p.exchange.start(inbox, outs_gmem)
    group_tiles = p.tiles // p.num_groups
    norm = () if norm_gmem is None else (norm_gmem, factors_smem)

    def load_inputs(tile, load):
        @pl.when((tile == first_tile) | (lax.rem(tile, group_tiles) == 0))
        def _():
            group = lax.div(tile, group_tiles)
            load(x_gmem, p.tokens, column=group * p.depth, norm=norm, eps=p.eps)

    def finish(tile, sums):
        if exchange is None:
            store(tile, sums)
        else:
            exchange.send(tile - first_tile, sums)

    products = []
    above = 0
    for weight_gmem, (layout, tiles) in zip(weights_gmem, p.matrices, strict=True):
        begin = jnp.clip(first_tile - above, 0, tiles)
        end = jnp.clip(end_tile - above, 0, tiles)
        products.append(_product(p, (layout, *weight_gmem), (above, tiles), (begin, end), split, load_inputs, finish))
        above += tiles
    p.gemm.run(warpgroup, products, skinny)
    if exchange is None:
        return

    pl.when(warpgroup != EPILOGUE)(lambda: barriers.wait_cluster(None))

    @pl.when(warpgroup == EPILOGUE)
    def _():
        with jax.named_scope("add_splits"):
            exchange.add_up(end_tile - first_tile, lambda n, total: store(first_tile + n, total))


def _product(p, weight, matrix_tiles, block_tiles, split, load_inputs, finish):
    """Returns the `Product` that describes a block's tiles of one matrix.

    Args:
      p: description of the launch.
      weight: (layout, codes or weights, scales or None) of the matrix.
      matrix_tiles: (number of tiles of the preceding matrices, number of tiles of this matrix).
      block_tiles: (index of the block's first tile in this matrix, index after its last one).
      split: index of the block in its cluster, which selects the block's columns.
      load_inputs, finish: as in `Product`, but with the index of a tile among the tiles of all matrices.
    """
    layout, codes_gmem, scales_gmem = weight
    gated = p.limit is not None
    depth = p.depth // p.config.splits
    tiles_above, tiles = matrix_tiles
    begin, end = block_tiles

    def rows_of(n):
        # Blocks without a tile of this matrix call this function, too. The minimum keeps their rows inside the matrix.
        row = jnp.minimum(begin + n, tiles - 1) * (HALF if gated else ROWS)
        return row, row + (p.outputs[0][0] if gated else HALF)

    return Product(
        layout=layout,
        codes_gmem=codes_gmem,
        scales_gmem=scales_gmem,
        tiles=end - begin,
        depth=depth,
        first_column=split * depth,
        gated=gated,
        rows_of=rows_of,
        load_inputs=lambda n, load: load_inputs(tiles_above + (begin + n), load),
        finish=lambda n, sums: finish(tiles_above + (begin + n), sums),
    )


def _store(p, outs_gmem, tile, sums):
    """Writes a tile of 64 rows of the product to the output that contains these rows.

    With a limit, writes SwiGLU of the tile's 32 gate rows and 32 up rows instead. `sums` [64, tokens] float32 are
    2**-32 times the tile.
    """
    if p.limit is not None:
        epilogue.store_few(outs_gmem[0], sums, tile, limit=p.limit)
    else:
        store_tile(outs_gmem, p.outputs, tile, sums * 2.0**SHIFT)
