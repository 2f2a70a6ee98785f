"""The second launch of `hyper_connections`: computes the mixing weights, then x = norm(sum_j pre[j] * streams[j]).

The launch adds up the partial sums of the logits that the first launch wrote. A persistent grid of at most one block
per SM walks over groups of 1 or 4 tokens. A block has n + 1 warpgroups, with n = D / 1024:

    warpgroup   role               does                                                 waits for             signals
    0..n-1      collapse_streams   collapses and norms its 1024 channels of a group     pre_full, norms_full  pre_empty,
                                                                                                              norms_full
    n           compute_weights    computes `pre` and signals it, then `post` and       pre_empty             pre_full
                                   `comb` by Sinkhorn's iterations; one token per warp

In V4.1, the weights `pre` that collapse the streams come from the previous call and are read from global memory. The
warpgroups of the two roles then do not wait for each other.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS, sinkhorn
from pallas_kernels.mgpu import barriers, mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP, Scalar
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel, primitive
from pallas_kernels.runtime.layer_operands import weights_of_layer
from pallas_kernels.runtime.pytrees import pytree_dataclass


CHANNELS = 1024  # number of channels of a warpgroup
STAGES = 2  # number of groups of tokens whose `pre` shared memory holds
WARPS = THREADS // WARP
MAX_LOADS = 16  # number of vectors of 128 partial sums that fit into registers at once
_RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"


@dataclasses.dataclass(frozen=True)
class CollapseProblem:
    """Static description of a launch of `collapse`."""

    tokens: int
    width: int  # number of channels of a stream
    rows: int  # number of mixing weights of a token: 24, or 4 for the head
    slices: int  # number of slices of channels; the launch adds up the partial sums of all slices
    tokens_each: int  # number of tokens of a group, 1 or 4
    # Constants of the norm and of the mixing weights, and number of Sinkhorn iterations: see `hyper_connections`.
    norm_eps: float
    hc_eps: float
    iterations: int

    @property
    def groups(self) -> int:
        """The number of groups of tokens."""
        return -(-self.tokens // self.tokens_each)

    @property
    def workers(self) -> int:
        """The number of warpgroups that collapse."""
        return self.width // CHANNELS

    @property
    def step(self) -> int:
        """The number of tokens that a warpgroup collapses at once, 1 or 2. Registers limit this number."""
        return min(2 if self.workers <= 4 else 1, self.tokens_each)


@pytree_dataclass
class CollapseScratch:
    """Shared memory and barriers of the launch: types to allocate outside the kernel, references inside it.

    `pre_empty`, `pre_smem` and `pre_full` are None if the weights `pre` of the previous call collapse the streams.
    """

    pre_empty: Any  # one barrier for each stage of `pre_smem`
    # [2, step, warps] float32, for each token of a turn the sum of squares of each collapsing warp's channels. The two
    # buffers on axis 0 alternate.
    norms_smem: Any
    norms_full: Any  # barrier at which the warpgroups that collapse meet
    pre_smem: Any  # [STAGES, 128] float32; the first 4 of each 32 are the weights `pre` of a warp's token
    exchange_smem: Any  # [128] float32, scratch of `vectors.butterfly`
    pre_full: Any  # one barrier for each stage of `pre_smem`


def collapse(p: CollapseProblem, streams, partials, weights, layer, pre=None, *, interpret: bool):
    """Computes the normed input of the next block and the mixing weights, see `hyper_connections`.

    Args:
      p: description of the launch.
      streams: [T, 4, D] bfloat16 new streams.
      partials: partial sums of the first launch, float32: [T, slices * 32] if a group has one token, otherwise [slices,
        N * 32] with N = T rounded up to a multiple of 4.
      weights: (base, scale, weight) as in `hyper_connections`.
      layer: [1] int32 index of this layer if the weights have a leading axis of layers, else None.
      pre: [T, 24] float32 mixing weights of the previous call, of which the first 4 collapse the streams. None: the
        streams are collapsed by weights that this launch computes.
      interpret: whether to interpret the kernel.

    Returns:
      (x [T, D] bfloat16, mixing [T, 24] float32 or, for the head, None).
    """
    mixing_type = jax.ShapeDtypeStruct((p.tokens, p.rows), jnp.float32) if p.rows > STREAMS else None
    computes_pre = pre is None
    scratch = CollapseScratch(
        pre_empty=plgpu.Barrier(num_arrivals=p.workers, num_barriers=STAGES) if computes_pre else None,
        norms_smem=plgpu.SMEM((2, p.step, p.workers * WARPS), jnp.float32),
        norms_full=plgpu.Barrier(num_arrivals=p.workers),
        pre_smem=plgpu.SMEM((STAGES, THREADS), jnp.float32) if computes_pre else None,
        exchange_smem=plgpu.SMEM((THREADS,), jnp.float32),
        pre_full=plgpu.Barrier(num_barriers=STAGES) if computes_pre else None,
    )
    launch = kernel(
        functools.partial(_body, p),
        out_type=(jax.ShapeDtypeStruct((p.tokens, p.width), jnp.bfloat16), mixing_type),
        kernel_name="hyper_connections_collapse",
        grid={"block": min(3 if interpret else MULTIPROCESSORS, p.groups)},
        num_threads=p.workers + 1,
        scratch_types={"scratch": scratch},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return launch(streams, pre, partials, weights, layer)


def _body(p, streams_gmem, pre_gmem, partials_gmem, weights_gmem, layer_gmem, x_gmem, mixing_gmem, scratch):
    base_gmem, scale_gmem, weight_gmem = weights_of_layer(weights_gmem, layer_gmem)
    block = lax.axis_index("block")
    blocks = lax.axis_size("block")
    warpgroup = lax.axis_index("warpgroup")
    groups = block, blocks, lax.div(p.groups - block + blocks - 1, blocks)

    refs = streams_gmem, pre_gmem, weight_gmem, x_gmem
    collapse = functools.partial(_collapse_streams, p, groups, warpgroup, *refs, scratch)
    compute = functools.partial(_compute_weights, p, groups, partials_gmem, base_gmem, scale_gmem, mixing_gmem, scratch)
    pl.when(warpgroup < p.workers)(jax.named_scope("collapse_streams")(collapse))
    pl.when(warpgroup == p.workers)(jax.named_scope("compute_weights")(compute))


def _collapse_streams(p, groups, warpgroup, streams_gmem, pre_gmem, weight_gmem, x_gmem, scratch):
    """Collapses and norms the warpgroup's 1024 channels for all groups of tokens that the block has.

    The warpgroup visits a group of tokens in one or more turns, with `p.step` tokens in each turn.

    Args:
      p: description of the launch.
      groups: (index of the block, number of blocks, number of groups that this block has). The block's i-th group has
        the index `block + i * blocks` among all groups.
      warpgroup: int32 scalar, index of the warpgroup.
      streams_gmem, pre_gmem, weight_gmem, x_gmem: references to the operands and the result of `collapse`; `pre_gmem`
        is None if `compute_weights` computes the weights `pre`.
      scratch: references to the `CollapseScratch`.
    """
    block, blocks, count = groups
    own_channels = pl.ds(warpgroup * CHANNELS, CHANNELS)
    layout = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=8)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)
    norm_weight = load(weight_gmem.at[own_channels])
    turns = p.tokens_each // p.step

    def token_of(i, turn, n):
        return (block + i * blocks) * p.tokens_each + turn * p.step + n

    def load_tokens(i, turn):
        """Returns a list of (streams, pre), for the tokens of turn `turn` of the block's i-th group.

        `streams` and `pre` are lists of this warpgroup's channels and of the weight `pre` of each stream. `pre` is None
        if `compute_weights` computes these weights.
        """
        loaded = []
        for token in [jnp.minimum(token_of(i, turn, n), p.tokens - 1) for n in range(p.step)]:
            streams = [load(streams_gmem.at[token, j, own_channels]) for j in range(STREAMS)]
            loaded.append((streams, None if pre_gmem is None else [pre_gmem[token, j] for j in range(STREAMS)]))
        return loaded

    def collapse_token(stage, parity, turn, n, streams, pre):
        """Collapses token n of a turn, and writes each warp's sum of the squares to `norms_smem[parity, n]`.

        `stage` is the stage of `pre_smem` with the group's weights; `streams` and `pre` are results of `load_tokens`.
        Returns [1024] float32, rounded to bfloat16.
        """
        first_lane = (turn * p.step + n) * WARP  # first lane of the warp that has computed the token's weights
        terms = [
            row.astype(jnp.float32) * (scratch.pre_smem[stage, first_lane + j] if pre is None else pre[j])
            for j, row in enumerate(streams)
        ]
        value = round_bfloat16(functools.reduce(jnp.add, terms))
        warp_sums(value * value, scratch.norms_smem.at[parity, n, pl.ds(warpgroup * WARPS, WARPS)])
        return value

    def collapse_group(i, ahead):
        """Computes and stores x for the block's i-th group of tokens, turn by turn.

        Args:
          i: int32 scalar, index of the group among the block's groups.
          ahead: the tokens of the group's first turn, loaded ahead of time by `load_tokens`.

        Returns:
          The tokens of the next group's first turn, from `load_tokens`; unspecified if no block has a second group.
        """
        stage = lax.rem(i, STAGES)
        if pre_gmem is None:
            plgpu.barrier_wait(scratch.pre_full.at[stage])
        for turn in range(turns):
            # The two buffers of `norms_smem` alternate, because other warpgroups may still read the sums of the
            # previous turn.
            parity = lax.rem(i * turns + turn, 2)
            values = [collapse_token(stage, parity, turn, n, *loaded) for n, loaded in enumerate(ahead)]
            if turn + 1 < turns:
                ahead = load_tokens(i, turn + 1)
            elif p.groups > blocks:
                ahead = load_tokens(i + 1, 0)
            barriers.meet(scratch.norms_full)
            for n, value in enumerate(values):
                squares = [scratch.norms_smem[parity, n, j] for j in range(p.workers * WARPS)]
                scale = lax.rsqrt(_pairwise_sum(squares) * (1 / p.width) + p.norm_eps)
                token = token_of(i, turn, n)
                value = (norm_weight * (value * scale)).astype(jnp.bfloat16)

                @pl.when(token < p.tokens)
                def _(token=token, value=value):
                    x_gmem[token, own_channels] = value

        if pre_gmem is None:
            plgpu.barrier_arrive(scratch.pre_empty.at[stage])
        return ahead

    lax.fori_loop(0, count, collapse_group, load_tokens(jnp.int32(0), 0))


def _compute_weights(p, groups, partials_gmem, base_gmem, scale_gmem, mixing_gmem, scratch):
    """Computes the mixing weights for all groups of tokens that the block has, see `_collapse_streams` for `groups`."""
    block, blocks, count = groups
    lane = vectors.thread() & (WARP - 1)  # lane r of a warp computes logit r of the warp's token
    bias = vectors.take(base_gmem, jnp.where(lane < p.rows, lane, -1))
    factors = vectors.take(scale_gmem, jnp.minimum(lane >> 2, scale_gmem.shape[0] - 1))

    def add_slices(group):
        """Adds up a group's partial sums over all slices. Returns [128] float32: 32 sums for the token of each warp.

        A chunk of 128 partial sums belongs to four slices of one token, or to one slice of four tokens.
        """
        totals = []
        chunks = range(p.slices * p.tokens_each // WARPS)
        for begin in chunks[::MAX_LOADS]:
            loaded_chunks = chunks[begin : begin + MAX_LOADS]
            places = [(group, chunk) if p.tokens_each == 1 else (chunk, group) for chunk in loaded_chunks]
            loaded = [vectors.load(partials_gmem.at[row, pl.ds(i * THREADS, THREADS)]) for row, i in places]
            totals.append(_pairwise_sum(loaded))
        sums = _pairwise_sum(totals)
        if p.tokens_each == 1:
            sums = vectors.butterfly(jnp.add, sums, 2 * WARP, WARP, scratch.exchange_smem)
        return sums

    def visit_group(i):
        stage = lax.rem(i, STAGES)
        group = block + i * blocks
        sums = add_slices(group)
        mean = from_lane(sums, SQUARES) * (1 / (STREAMS * p.width))
        logits = sums * lax.rsqrt(mean + p.norm_eps) * factors + bias
        gates = reciprocal(1.0 + jnp.exp(-logits))
        weights = jnp.where(lane < STREAMS, gates + p.hc_eps, 2.0 * gates)
        if scratch.pre_smem is not None:
            barriers.wait_empty(scratch.pre_empty, i)
            scratch.pre_smem[stage] = weights
            plgpu.barrier_arrive(scratch.pre_full.at[stage])
        if mixing_gmem is not None:
            comb = mixing_matrix(logits, iterations=p.iterations, eps=p.hc_eps)
            weights = jnp.where(lane < 2 * STREAMS, weights, comb)
            put_rows(mixing_gmem, weights, group * p.tokens_each, rows=p.tokens_each)

    pl.loop(0, count)(visit_group)
    if scratch.pre_smem is not None:
        barriers.wait_for_last(scratch.pre_empty, count)


def _pairwise_sum(terms):
    """Adds neighbouring terms, then neighbouring sums, until a single sum is left."""
    while len(terms) > 1:
        terms = [*map(operator.add, terms[::2], terms[1::2]), *terms[len(terms) & ~1 :]]
    return terms[0]


@primitive
def mixing_matrix(logits: jax.Array, *, iterations: int, eps: float) -> jax.Array:
    """Computes `comb` of each warp's token from its logits.

    The steps are the softmax of each row, the addition of eps, and `sinkhorn`.

    Args:
      logits: [128] float32. Lane 8 + 4 * j + k of a warp holds the logit of comb[j, k].
      iterations: number of Sinkhorn iterations, at least 1.
      eps: constant added to the softmax and to the sums.

    Returns:
      [128] float32 with comb[j, k] in lane 8 + 4 * j + k of each warp. Other lanes are unspecified.
    """
    lanes = slice(2 * STREAMS, (2 + STREAMS) * STREAMS)
    comb = logits.reshape(WARPS, WARP)[:, lanes].reshape(WARPS, STREAMS, STREAMS)
    comb = sinkhorn(jax.nn.softmax(comb, axis=2) + eps, iterations, eps)
    return logits.reshape(WARPS, WARP).at[:, lanes].set(comb.reshape(WARPS, -1)).reshape(-1)


@vectors.emits(mixing_matrix, returns=lambda logits, **_: logits)
def _emit_mixing_matrix(logits, iterations, eps):
    # Every lane computes the whole matrix, and keeps one entry at the end.
    indices = range(STREAMS)

    def reduce_four(terms, combine=operator.add):
        return combine(combine(*terms[:2]), combine(*terms[2:]))

    def softmax(row):
        top = reduce_four(row, Scalar.maximum)
        scaled = [(x - top) * math.log2(math.e) for x in row]
        powers = [_approximate("ex2.approx.ftz.f32 $0, $1;", x) for x in scaled]
        factor = _approximate(_RECIPROCAL, reduce_four(powers))
        return [thread_ops.fma(x, factor, Scalar(eps)) for x in powers]

    def normalize_rows(comb):
        factors = [_approximate(_RECIPROCAL, reduce_four(row) + eps) for row in comb]
        return [[x * factor for x in row] for row, factor in zip(comb, factors, strict=True)]

    def normalize_columns(comb):
        return list(zip(*normalize_rows([*zip(*comb, strict=True)]), strict=True))

    def iterate(_, *entries):
        entries = [x.as_float() for x in entries]
        comb = normalize_columns(normalize_rows([entries[STREAMS * j : STREAMS * (j + 1)] for j in indices]))
        return [x.bits() for row in comb for x in row]

    comb = [softmax([_emit_from_lane(logits, (2 + j) * STREAMS + k)[0] for k in indices]) for j in indices]
    entries = [x.bits() for row in normalize_columns(comb) for x in row]
    own_entry = entries[0]
    lane = thread_ops.lane()
    for entry_lane, x in enumerate(thread_ops.loop(iterations - 1, iterate, *entries), 2 * STREAMS):
        own_entry = lane.equals(entry_lane).where(x, own_entry)
    return [own_entry.as_float()]


@primitive
def reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x, with an error of at most one unit in the last place. x is [128] float32."""
    return 1.0 / x


@vectors.emits(reciprocal, returns=lambda x: x)
def _(x):
    return [_approximate(_RECIPROCAL, mlir.scalar(x))]


def _approximate(code, x):
    return mlir.ptx(code, x, results=mlir.f32_type(), pure=True)


@primitive
def from_lane(x: jax.Array, lane: int) -> jax.Array:
    """Broadcasts the value of lane `lane` of each warp to all lanes of the warp. x and the result are [128] float32."""
    return jnp.repeat(x.reshape(WARPS, WARP)[:, lane], WARP)


@vectors.emits(from_lane, returns=lambda x, lane: x)
def _emit_from_lane(x, lane):
    code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
    return [thread_ops.ptx(code, mlir.scalar(x).bits(), lane).as_float()]


@primitive
def warp_sums(x: jax.Array, target) -> None:
    """Writes the sum of each warp's 256 consecutive values of x [1024] float32 to `target` [4] in shared memory."""
    target[...] = jnp.sum(x.reshape(WARPS, -1), axis=1)


@mlir.emits(warp_sums, plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=8))
def _emit_warp_sums(x, target):
    total = thread_ops.sum_lanes(_pairwise_sum(mlir.values(x)))
    thread = mlir.thread()
    with thread_ops.when((thread & (WARP - 1)).equals(0)):
        thread_ops.store(thread_ops.shared(target) + ((thread >> 5) << 2), total.bits())


@primitive
def put_rows(target, x: jax.Array, first: jax.Array, *, rows: int) -> None:
    """Writes one row for each of the first `rows` warps to `target` [T, N] in global memory.

    Row `first + i` of the target receives the first N lanes of warp i of x [128], if `first + i` is less than T.
    """
    count, width = target.shape
    for i in range(rows):

        @pl.when(first + i < count)
        def _(i=i):
            target[first + i, :] = x[i * WARP : i * WARP + width]


@vectors.emits(put_rows)
def _emit_put_rows(target, x, first, rows):
    count, width = target.type.shape
    thread = mlir.thread()
    warp = thread >> 5
    lane = thread & (WARP - 1)
    row = first + warp
    with thread_ops.when((warp < rows) & (row < count) & (lane < width)):
        llvm.store(mlir.scalar(x), mlir.element(target, row * width + lane), alignment=4)
