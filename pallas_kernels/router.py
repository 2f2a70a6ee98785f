"""Router of a mixture of experts: scores = sqrt(softplus(x @ weight.T)), from which each token's experts are selected.

There are two launches, for up to 256 tokens. `router_products` has blocks of one warpgroup. Each block writes partial
sums of the logits of 32 tokens and 32 experts over a slice of 128 channels. `router_select` has a block for each token:

    warpgroup      role             does                                              waits for         signals
    0..3           add_slices       adds up a quarter of the slices                                     partials_full
    0              select_experts   adds up the quarters, computes scores, selects    partials_full     selection_ready
    0 of token 0   group_pairs      groups the (token, expert) pairs of all tokens    selection_ready
                                    by expert, if there are up to 8 tokens

With up to 8 tokens, the blocks of `router_select` form one cluster. The kernel `experts` takes the groups as an
argument, so that it needs no separate launch to group the pairs.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.matmul.routing import GROUP_WORDS, counts_size, group_pairs, max_groups, scratch_words
from pallas_kernels.mgpu import barriers, bfloat16_words as words, mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP, Scalar
from pallas_kernels.runtime.checks import check_array, check_rules, check_tokens
from pallas_kernels.runtime.launch import axis_indices, kernel, primitive
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TOKENS = 256
# Maximum number of tokens whose pairs are grouped. Each token has a block, and all blocks form one cluster. Every
# Hopper GPU supports clusters of 8 blocks.
MAX_GROUPED_TOKENS = 8
SLICE = 4 * WARP  # number of channels of a slice
STEP = 16  # number of channels that an `mma` multiplies
WARP_EXPERTS = 8  # number of experts of a warp of `router_products`
BLOCK_EXPERTS = WARP_EXPERTS * THREADS // WARP  # number of experts of a block of `router_products`
BLOCK_TOKENS = 32  # number of tokens of a block of `router_products`
ADDERS = 4  # number of warpgroups of a block of `router_select`


@cached_trace("top_k", "scaling_factor")
def router(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    table: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    slots: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    top_k: int,
    scaling_factor: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Selects the experts of each token by score, or by token id.

    The scores are `sqrt(softplus(x @ weight.T))`. With a bias, the experts with the `top_k` largest `score + bias` are
    selected; of equal sums, those with the lowest indices. Without a bias, `table[token_id]` lists the experts.

    Args:
      x: [T, D] bfloat16 activations, T from 1 to 256, D a multiple of 512.
      weight: [E, D] float32, E a multiple of 128 up to 1024.
      bias: [E] float32, or None to select by token id.
      table: [V, top_k] int32 experts of each token id; required without a bias.
      token_ids: [T] int32, clipped to [0, V); required without a bias.
      slots: [T] int32 slot of each token's request; -1 = padding. A padding token gets experts -1 and weights 0. None:
        there is no padding.
      layer: [] int32 index of this layer if weight, bias and table have a leading axis of layers, else None.
      top_k: number of experts of a token, at most min(32, E).
      scaling_factor: sum of a token's routing weights.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (experts, weights, permutation). `experts` is [T, top_k] int32. `weights` [T, top_k] float32 are the scores of
      these experts without the bias, scaled to the sum `scaling_factor`. `permutation` is the table and the counts of
      the groups of (token, expert) pairs, see `matmul.routing.group_pairs`, or None for more than 8 tokens.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    check_array("x", x, jnp.bfloat16, None, None)
    tokens, depth = x.shape
    check_weight("weight", weight, layer, jnp.float32, None, depth)
    experts = weight.shape[-2]
    multiple = ADDERS * SLICE
    if bias is not None:
        check_weight("bias", bias, layer, jnp.float32, experts)
    else:
        check_weight("table", table, layer, jnp.int32, None, top_k)
        check_array("token_ids", token_ids, jnp.int32, tokens)
    if slots is not None:
        check_tokens(tokens, slots=slots)
    check_rules(
        {
            f"1 to {MAX_TOKENS} tokens, got {tokens}": 0 < tokens <= MAX_TOKENS,
            f"channels in multiples of {multiple}, got {depth}": depth > 0 and depth % multiple == 0,
            f"128, 256, .. or 1024 experts, got {experts}": 0 < experts <= 1024 and experts % THREADS == 0,
            f"up to {WARP} experts of a token, got {top_k}": 0 < top_k <= min(WARP, experts),
        }
    )
    layer_number = layer_operand(layer)

    def multiply_block(x_gmem, weight_gmem, layer_gmem, out_gmem):
        part, group, tile = axis_indices("slice", "rows", "tile")
        multiply_slice(part, group, tile, x_gmem, weights_of_layer(weight_gmem, layer_gmem), out_gmem)

    products = kernel(
        multiply_block,
        out_type=jax.ShapeDtypeStruct((depth // SLICE, tokens, experts), jnp.float32),
        kernel_name="router_products",
        grid={"slice": depth // SLICE, "rows": experts // BLOCK_EXPERTS, "tile": -(-tokens // BLOCK_TOKENS)},
        interpret=interpret,
    )
    weights = {"bias": bias, "table": table}
    token_arrays = {"token_ids": token_ids, "slots": slots}
    logits = products(x, weight, layer_number)
    return _select_experts(logits, weights, token_arrays, layer_number, top_k, scaling_factor, interpret)


def _select_experts(products, weights, token_arrays, layer, top_k, scaling_factor, interpret):
    """Runs the second launch, and returns the results of `router`.

    Args:
      products: [slices, T, E] float32 partial sums of the logits.
      weights: dict of "bias" and "table", each an array or None.
      token_arrays: dict of "token_ids" and "slots", each an array or None.
      layer: [1] int32 index of the layer, or None.
      top_k, scaling_factor, interpret: as in `router`.
    """
    slices, tokens, experts = products.shape
    outs = [jax.ShapeDtypeStruct((tokens * top_k,), dtype) for dtype in (jnp.int32, jnp.float32)]
    scratch: dict[str, Any] = {
        "partials_smem": plgpu.SMEM((ADDERS, experts), jnp.float32),
        "scores_smem": plgpu.SMEM((experts,), jnp.float32),
        "biased_smem": plgpu.SMEM((experts,), jnp.float32),
        "partials_full": plgpu.Barrier(num_arrivals=ADDERS),
    }
    one_cluster = tokens <= MAX_GROUPED_TOKENS
    if one_cluster:
        groups = max_groups(tokens * top_k, experts)
        sizes = groups * GROUP_WORDS, counts_size(groups, slices * SLICE)
        outs += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
        barrier = plgpu.ClusterBarrier(collective_axes=("token",), num_arrivals=1) if interpret else None
        scratch |= {"sort_smem": plgpu.SMEM((scratch_words(experts),), jnp.int32), "selection_ready": barrier}
    launch = kernel(
        functools.partial(_select_body, top_k, scaling_factor),
        out_type=outs,
        kernel_name="router_select",
        grid={"group": 1 if one_cluster else tokens},
        # The size is a power of two, because a cluster of three blocks takes longer to start than one of four.
        cluster={"token": 1 << (tokens - 1).bit_length() if one_cluster else 1},
        num_threads=ADDERS,
        scratch_types=scratch,
        interpret=interpret,
    )
    selected, weights, *permutation = launch(products, weights, token_arrays, layer)
    return selected.reshape(tokens, top_k), weights.reshape(tokens, top_k), tuple(permutation) or None


@primitive
def multiply_slice(part: jax.Array, group: jax.Array, tile: jax.Array, x_gmem, weight_gmem, out_gmem) -> None:
    """Writes partial sums of logits, `out[part, t, e]`, for the tokens t and experts e of a block.

    On a GPU, a warp multiplies the weights of 8 experts by `mma`. Each float32 weight is split into a sum of three
    bfloat16 numbers, so that products are as exact as float32 products.

    Args:
      part: int32 scalar, index of the slice of 128 channels to sum over.
      group: int32 scalar, index of the group of 32 experts.
      tile: int32 scalar, index of the tile of 32 tokens.
      x_gmem: [T, D] bfloat16.
      weight_gmem: [E, D] float32.
      out_gmem: [slices, T, E] float32 to write.
    """
    columns = pl.ds(part * SLICE, SLICE)
    rows = pl.ds(group * BLOCK_EXPERTS, BLOCK_EXPERTS)

    @pl.when(tile == 0)
    def _():  # the interpreter computes all tiles at once, since tests have few tokens
        weight = weight_gmem[rows, columns]
        out_gmem[part, :, rows] = jnp.dot(x_gmem[:, columns].astype(jnp.float32), weight.T, precision="highest")


@mlir.emits(multiply_slice)
def _emit_multiply_slice(part, group, tile, x_gmem, weight_gmem, out_gmem):
    tokens, depth = x_gmem.type.shape
    experts = weight_gmem.type.shape[0]
    halves = 1 if tokens <= 16 else 2
    steps = range(SLICE // STEP)
    thread = mlir.thread()
    lane = thread & 31
    first_token = tile * BLOCK_TOKENS
    # In each step, a lane loads four adjacent channels of an expert and of several tokens. `mma` expects other channels
    # in this lane, but the order of channels does not matter to a sum if both operands have the same order.
    row = lane >> 2
    column = part * SLICE + ((lane & 3) << 2)
    first_expert = group * BLOCK_EXPERTS + (thread >> 5) * WARP_EXPERTS
    weight_address = mlir.element(weight_gmem, (first_expert + row) * depth + column, 4)
    weights = [words.load_four(mlir.at(weight_address, 4 * STEP * step)) for step in steps]
    # Indices of tokens past the end are clamped. The sums of these tokens are not stored.
    clamped = [(first_token + row + 8 * i).minimum(tokens - 1) for i in range(2 * halves)]
    x_addresses = [mlir.element(x_gmem, token * depth + column, 2) for token in clamped]
    inputs = [[words.load_pair(mlir.at(address, 2 * STEP * step)) for address in x_addresses] for step in steps]
    # The high, middle and low terms of the weights have separate sums, so their products do not wait for each other.
    sums = [[[Scalar(0.0)] * 4 for _ in range(words.PARTS)] for _ in range(halves)]
    for step_weights, step_inputs in zip(weights, inputs, strict=True):
        for i, term in enumerate(words.split(step_weights)):
            for half, half_sums in enumerate(sums):
                upper, lower = step_inputs[2 * half : 2 * half + 2]
                fragment = [upper[0], lower[0], upper[1], lower[1]]
                half_sums[i] = words.multiply_add(half_sums[i], fragment, term)
    for half, half_sums in enumerate(sums):
        totals = [low + middle + high for high, middle, low in zip(*half_sums, strict=True)]
        for i in range(2):
            token = first_token + row + (16 * half + 8 * i)
            with thread_ops.when(token < tokens):
                index = (part * tokens + token) * experts + first_expert + ((lane & 3) << 1)
                pair = mlir.pack(totals[2 * i : 2 * i + 2])
                llvm.store(pair, mlir.element(out_gmem, index, 4), alignment=8)


def _select_body(
    top_k,
    factor,
    products_gmem,
    weights,
    token_arrays,
    layer_gmem,
    *outs,
    partials_smem,
    scores_smem,
    biased_smem,
    partials_full,
    **sort,
):
    experts_gmem, weights_gmem, *permutation = outs
    arrays = token_arrays | weights_of_layer(weights, layer_gmem)
    selection = {name: ref for name, ref in arrays.items() if ref is not None}
    token = lax.axis_index("group") * lax.axis_size("token") + lax.axis_index("token")
    warpgroup = lax.axis_index("warpgroup")
    slices, tokens, experts = products_gmem.shape
    tiles = [pl.ds(start, THREADS) for start in range(0, experts, THREADS)]

    def add_slices():
        own_slices = [warpgroup * (slices // ADDERS) + i for i in range(slices // ADDERS)]
        loaded = [[vectors.load(products_gmem.at[i, token, tile]) for i in own_slices] for tile in tiles]
        for tile, terms in zip(tiles, loaded, strict=True):
            partials_smem[warpgroup, tile] = functools.reduce(jnp.add, terms)
        plgpu.barrier_arrive(partials_full)

    def select_experts():
        plgpu.barrier_wait(partials_full)
        for tile in tiles:
            logits = functools.reduce(jnp.add, [vectors.load(partials_smem.at[i, tile]) for i in range(ADDERS)])
            score = jnp.sqrt(_softplus(logits))
            scores_smem[tile] = score
            if "bias" in selection:
                biased_smem[tile] = score + vectors.load(selection["bias"].at[tile])
        select(experts_gmem, weights_gmem, token, scores_smem, biased_smem, selection, top_k, factor)

    # A cluster may have more blocks than tokens, since its size is a power of two.
    @pl.when(token < tokens)
    def _():
        with jax.named_scope("add_slices"):
            add_slices()
        with jax.named_scope("select_experts"):
            pl.when(warpgroup == 0)(select_experts)

    if permutation:
        with jax.named_scope("group_pairs"):
            _group_cluster(token, warpgroup, experts, experts_gmem, *permutation, **sort)


def _group_cluster(token, warpgroup, experts, experts_gmem, groups_gmem, counts_gmem, *, sort_smem, selection_ready):
    """Groups the (token, expert) pairs of all tokens, after each block of the cluster has selected its token's experts.

    All warpgroups of all blocks call it, because it synchronizes the cluster. Warpgroup 0 of token 0 groups the pairs.
    """

    @pl.when(warpgroup > 0)
    def _():
        barriers.arrive_cluster(None)
        barriers.wait_cluster(None)

    @pl.when(warpgroup == 0)
    def _():
        barriers.arrive_cluster(selection_ready)
        barriers.wait_cluster(selection_ready)
        group = functools.partial(group_pairs, experts_gmem, groups_gmem, counts_gmem, experts, sort_smem)
        pl.when(token == 0)(group)


def _softplus(x):
    """Returns log(1 + exp(x)) to float32 accuracy.

    log(1 + exp(-|x|)) is summed as a series, because a logarithm of a number near 1 would lose accuracy.
    """
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = jnp.full_like(x, 1 / 17)
    for n in range(15, 0, -2):
        series = series * square + 1 / n
    return jnp.maximum(x, 0.0) + 2.0 * ratio * series


@primitive
def select(
    experts_gmem, weights_gmem, token: jax.Array, scores_smem, biased_smem, selection, top_k: int, scaling_factor: float
) -> None:
    """Selects a token's experts, and writes the experts and their routing weights, see `router`.

    One warpgroup runs it.

    Args:
      experts_gmem: [T * top_k] int32 to write.
      weights_gmem: [T * top_k] float32 to write.
      token: int32 scalar, index of the token.
      scores_smem: [E] float32 scores.
      biased_smem: [E] float32 scores plus bias; not used without a bias.
      selection: {name: reference} of the arrays "bias", "table", "token_ids" and "slots", without those that are None.
      top_k, scaling_factor: as in `router`.
    """
    if "bias" in selection:
        experts = lax.top_k(biased_smem[...], top_k)[1]
    else:
        table = selection["table"]
        experts = table[jnp.clip(selection["token_ids"][token], 0, table.shape[0] - 1), :]
    scores = scores_smem[...][experts]
    weights = scores / (jnp.sum(scores) + 1e-20) * scaling_factor
    places = pl.ds(token * top_k, top_k)
    is_token = selection["slots"][token] >= 0 if "slots" in selection else True
    experts_gmem[places] = jnp.where(is_token, experts, -1)
    weights_gmem[places] = jnp.where(is_token, weights, 0.0)


@mlir.emits(select)
def _emit_select(experts_gmem, weights_gmem, token, scores_smem, biased_smem, selection, top_k, scaling_factor):
    thread = mlir.thread()
    lane = thread & 31
    # Waits for the scores, which other threads of the warpgroup wrote.
    mgpu.utils.warpgroup_barrier()
    with thread_ops.when(thread < WARP):
        if "bias" in selection:
            expert = _top_k(thread_ops.shared(biased_smem), lane, scores_smem.type.shape[0], top_k)
        else:
            rows = selection["table"].type.shape[0]
            row = thread_ops.load_global(selection["token_ids"], token)
            row = row.signed_maximum(0).signed_minimum(rows - 1)
            expert = thread_ops.load_global(selection["table"], row * top_k + lane.minimum(top_k - 1))
        score = thread_ops.load(thread_ops.shared(scores_smem, expert)).as_float()
        inside = lane < top_k
        total = thread_ops.sum_lanes(inside.where(score, 0.0))
        share = score / (total + 1e-20)
        with thread_ops.when(inside):
            place = token * top_k + lane
            weight = share * scaling_factor
            if "slots" in selection:
                is_padding = thread_ops.load_global(selection["slots"], token) >> 31  # the sign bit, 1 if negative
                is_padding = is_padding.equals(1)
                expert = is_padding.where(0xFFFFFFFF, expert)
                weight = is_padding.where(0.0, weight)
            thread_ops.store_global(experts_gmem, place, expert)
            thread_ops.store_global(weights_gmem, place, weight.bits())


def _top_k(values, lane, num_values, top_k):
    """Finds the `top_k` largest values. Lane 0 gets the index of the largest one, lane 1 that of the second, and so on.

    Equal values are ordered by index. All lanes of a warp call the function.

    Args:
      values: address of `num_values` float32 values in shared memory.
      lane: index of the thread in its warp.
      num_values: number of values, a multiple of 32.
      top_k: number of indices to find, at most 32.
    """
    indices = [lane + start for start in range(0, num_values, WARP)]
    keys = []
    for index in indices:
        keys.append(thread_ops.ordered_key(thread_ops.load(values + (index << 2))))
    selected = Scalar(0)
    for i in range(top_k):
        top = thread_ops.warp_max(functools.reduce(Scalar.maximum, keys))
        candidates = [key.equals(top).where(index, num_values - 1) for key, index in zip(keys, indices, strict=True)]
        best = thread_ops.warp_min(functools.reduce(Scalar.minimum, candidates))
        selected = lane.equals(i).where(best, selected)
        keys = [index.equals(best).where(0, key) for key, index in zip(keys, indices, strict=True)]
    return selected
