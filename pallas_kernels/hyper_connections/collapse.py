"""Second launch: mixing weights from the sums of logits, and the collapsed, normed input of the next block.

A block of threads takes groups of 1 or 4 tokens. Every warpgroup but the last has 1024 channels; the last computes the
weights, one token a warp, and goes on with Sinkhorn's iterations while the others collapse the streams.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS
from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel, primitive


CHANNELS = 1024  # of a warpgroup
AHEAD = 2  # groups of tokens whose weights are there before they are collapsed
WARPS = THREADS // WARP
_RECIPROCAL = "rcp.approx.ftz.f32 $0, $1;"
_FROM_LANE = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"


@dataclasses.dataclass(frozen=True)
class CollapseProblem:
    """What is static: sizes, `tokens_each` of a group, and constants."""

    tokens: int
    width: int
    rows: int
    slices: int
    tokens_each: int
    norm_eps: float
    hc_eps: float
    iterations: int

    @property
    def groups(self) -> int:
        """Of `tokens_each` tokens."""
        return -(-self.tokens // self.tokens_each)

    @property
    def step(self) -> int:
        """Tokens that are collapsed together: as many as a thread's registers hold."""
        return min(2 if self.workers <= 4 else 1, self.tokens_each)

    @property
    def workers(self) -> int:
        """Warpgroups that collapse."""
        return self.width // CHANNELS


def collapse(p: CollapseProblem, streams, partials, base, scale, weight, *, interpret: bool):
    """(x [T, D] bfloat16, mixing [T, 24] float32 or None) from partial sums, see `hyper_connections`.

    partials: [T, slices * 32] float32 where a group has one token, otherwise [slices, T * 32].
    """
    out_type = [jax.ShapeDtypeStruct((p.tokens, p.width), jnp.bfloat16)]
    if p.rows > STREAMS:
        out_type.append(jax.ShapeDtypeStruct((p.tokens, p.rows), jnp.float32))
    run = kernel(
        functools.partial(_body, p),
        out_type=out_type,
        kernel_name="hyper_connections_collapse",
        grid=(min(3 if interpret else MULTIPROCESSORS, p.groups),),
        grid_names=("block",),
        num_threads=p.workers + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            pre=plgpu.SMEM((AHEAD, THREADS), jnp.float32),
            norms=plgpu.SMEM((2, p.step, p.workers * WARPS), jnp.float32),
            scratch=plgpu.SMEM((THREADS,), jnp.float32),
            weighed=plgpu.Barrier(num_barriers=AHEAD),
            free=plgpu.Barrier(num_arrivals=p.workers, num_barriers=AHEAD),
            normed=plgpu.Barrier(num_arrivals=p.workers),
        ),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    x, *mixing = run(streams, partials, base, scale, weight)
    return x, mixing[0] if mixing else None


def _body(p, streams, partials, base, scale, weight, x, *outs, pre, norms, scratch, weighed, free, normed):
    block, blocks, warpgroup = lax.axis_index("block"), lax.axis_size("block"), lax.axis_index("warpgroup")
    count = lax.div(p.groups - block + blocks - 1, jnp.int32(blocks))

    def first_of(i):
        """The first token of a block's i-th group."""
        return (block + i * blocks) * p.tokens_each

    @pl.when(warpgroup < p.workers)
    def _():
        mine = pl.ds(warpgroup * CHANNELS, CHANNELS)
        layout = plgpu.Layout.WG_STRIDED((CHANNELS,), vec_size=8)
        factors = plgpu.load(weight.at[mine], layout=layout, optimized=False)
        turns = p.tokens_each // p.step

        def load(i, turn):
            """The streams of the tokens that are collapsed together."""
            tokens = [jnp.minimum(first_of(i) + turn * p.step + n, p.tokens - 1) for n in range(p.step)]
            rows = [[streams.at[token, j, mine] for j in range(STREAMS)] for token in tokens]
            return [[plgpu.load(row, layout=layout, optimized=False) for row in four] for four in rows]

        def visit(i, ahead):
            stage = lax.rem(i, jnp.int32(AHEAD))
            plgpu.barrier_wait(weighed.at[stage])
            for turn in range(turns):
                parity, found = lax.rem(i * turns + turn, jnp.int32(2)), []
                for n, four in enumerate(ahead):
                    at = (turn * p.step + n) * WARP
                    terms = [row.astype(jnp.float32) * pre[stage, at + j] for j, row in enumerate(four)]
                    found.append(round_bfloat16(functools.reduce(jnp.add, terms)))
                    place = norms.at[parity, n, pl.ds(warpgroup * WARPS, WARPS)]
                    warp_sums(found[-1] * found[-1], place)
                if turn + 1 < turns:
                    ahead = load(i, turn + 1)
                elif p.groups > blocks:
                    ahead = load(i + 1, 0)
                plgpu.barrier_arrive(normed)
                plgpu.barrier_wait(normed)
                for n, value in enumerate(found):
                    mean = _sum([norms[parity, n, j] for j in range(p.workers * WARPS)]) * (1 / p.width)
                    value = (factors * (value * lax.rsqrt(mean + p.norm_eps))).astype(jnp.bfloat16)
                    token = first_of(i) + turn * p.step + n

                    @pl.when(token < p.tokens)
                    def _(token=token, value=value):
                        x[token, mine] = value

            plgpu.barrier_arrive(free.at[stage])
            return ahead

        lax.fori_loop(0, count, visit, load(jnp.int32(0), 0))

    @pl.when(warpgroup == p.workers)
    def _():
        # A lane has the logit of its number.
        lane = vectors.thread() & (WARP - 1)
        bias = vectors.take(base, jnp.where(lane < p.rows, lane, -1))
        factors = vectors.take(scale, jnp.minimum(lane >> 2, scale.shape[0] - 1))

        @pl.loop(0, count)
        def _(i):
            stage, group = lax.rem(i, jnp.int32(AHEAD)), block + i * blocks
            parts, chunks = [], range(p.slices * p.tokens_each // WARPS)
            for begin in chunks[::16]:  # not more than fit into registers
                places: list[Any] = [(group, pl.ds(chunk * THREADS, THREADS)) for chunk in chunks[begin : begin + 16]]
                if p.tokens_each > 1:
                    places = [(chunk, pl.ds(group * THREADS, THREADS)) for chunk in chunks[begin : begin + 16]]
                parts.append(_sum([vectors.load(partials.at[place]) for place in places]))
            sums = _sum(parts)
            if p.tokens_each == 1:
                sums = vectors.butterfly(jnp.add, sums, 2 * WARP, WARP, scratch)
            mean = from_lane(sums, SQUARES) * (1 / (STREAMS * p.width))
            logits = sums * lax.rsqrt(mean + p.norm_eps) * factors + bias
            gates = reciprocal(1.0 + jnp.exp(-logits))
            weights = jnp.where(lane < STREAMS, gates + p.hc_eps, 2.0 * gates)

            @pl.when(i >= AHEAD)
            def _():
                plgpu.barrier_wait(free.at[stage])

            pre[stage] = weights
            plgpu.barrier_arrive(weighed.at[stage])
            if outs:
                weights = jnp.where(lane < 2 * STREAMS, weights, mixing_matrix(logits, p.iterations, p.hc_eps))
                put_rows(outs[0], weights, first_of(i), p.tokens_each)

        # The interpreter wants every arrival waited for.
        @pl.loop(jnp.maximum(count - AHEAD, 0), count)
        def _(i):
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(AHEAD))])


def _sum(terms):
    """Of neighbours first."""
    while len(terms) > 1:
        terms = [*map(jnp.add, terms[::2], terms[1::2]), *terms[len(terms) & ~1 :]]
    return terms[0]


@primitive
def mixing_matrix(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Each warp's comb, from its logits: softmax of rows and Sinkhorn's iterations, see `ops.hyper_connections`.

    logits: [128] float32; entry [j, k] is that of lane `8 + 4 * j + k`, and so is comb's in the result [128].
    """
    lanes = slice(2 * STREAMS, (2 + STREAMS) * STREAMS)
    comb = logits.reshape(WARPS, WARP)[:, lanes].reshape(WARPS, STREAMS, STREAMS)
    comb = jax.nn.softmax(comb, axis=2) + eps

    def normalised(comb, axis):
        return comb / (jnp.sum(comb, axis=axis, keepdims=True) + eps)

    comb = normalised(comb, 1)
    comb = lax.fori_loop(0, iterations - 1, lambda _, comb: normalised(normalised(comb, 2), 1), comb)
    return logits.reshape(WARPS, WARP).at[:, lanes].set(comb.reshape(WARPS, -1)).reshape(-1)


@mixing_matrix.mosaic
def _(logits, iterations, eps):
    def emit(logits):
        f32, places = mlir.f32_type(), range(STREAMS)

        def from_lane(number):
            value = thread_ops.bits(mlir.scalar(logits))
            return thread_ops.as_float(thread_ops.ptx(_FROM_LANE, value, number))

        def total(terms, combine=arith.addf):
            return combine(combine(*terms[:2]), combine(*terms[2:]))

        def approximate(code, x):
            return mlir.ptx(code, x, results=f32, pure=True)

        def softmax(row):
            top = total(row, arith.maximumf)
            scaled = [arith.mulf(arith.subf(x, top), mlir.f32(math.log2(math.e))) for x in row]
            powers = [approximate("ex2.approx.ftz.f32 $0, $1;", x) for x in scaled]
            share = approximate(_RECIPROCAL, total(powers))
            return [thread_ops.fma(x, share, mlir.f32(eps)) for x in powers]

        def rows(comb):
            factors = [approximate(_RECIPROCAL, arith.addf(total(row), mlir.f32(eps))) for row in comb]
            return [[arith.mulf(x, factor) for x in row] for row, factor in zip(comb, factors, strict=True)]

        def transposed(comb):
            return [list(column) for column in zip(*comb, strict=True)]

        def columns(comb):
            return transposed(rows(transposed(comb)))

        def iterate(_, *flat):
            flat = [thread_ops.as_float(x) for x in flat]
            comb = columns(rows([flat[STREAMS * j : STREAMS * (j + 1)] for j in places]))
            return [thread_ops.bits(x) for row in comb for x in row]

        comb = [softmax([from_lane((2 + j) * STREAMS + k) for k in places]) for j in places]
        flat = [thread_ops.bits(x) for row in columns(comb) for x in row]
        found, lane = flat[0], thread_ops.lane()
        for number, x in enumerate(thread_ops.loop(iterations - 1, iterate, *flat), 2 * STREAMS):
            found = lane.equals(number).where(x, found)
        return [thread_ops.as_float(found)]

    return vectors.inline(emit, logits, returns=logits)


@primitive
def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x of float32 [128], within a unit in the last place."""
    return 1.0 / x


@reciprocal.mosaic
def _(x):
    def emit(x):
        return [mlir.ptx(_RECIPROCAL, mlir.scalar(x), results=mlir.f32_type(), pure=True)]

    return vectors.inline(emit, x, returns=x)


@primitive
def from_lane(x: jax.Array, lane: int) -> jax.Array:
    """[128] with the value of a lane of the same warp; x [128] float32."""
    return jnp.repeat(x.reshape(WARPS, WARP)[:, lane], WARP)


@from_lane.mosaic
def _(x, lane):
    def emit(x):
        value = thread_ops.bits(mlir.scalar(x))
        return [thread_ops.as_float(thread_ops.ptx(_FROM_LANE, value, lane))]

    return vectors.inline(emit, x, returns=x)


@primitive
def warp_sums(x: jax.Array, target) -> None:
    """Writes the sum of each warp's quarter of x [1024] float32 to `target` [4] in shared memory."""
    target[...] = jnp.sum(x.reshape(WARPS, -1), axis=1)


@warp_sums.mosaic
def _(x, target):
    def emit(x, target):
        terms = mlir.values(x)
        while len(terms) > 1:
            terms = [arith.addf(*pair) for pair in zip(terms[::2], terms[1::2], strict=True)]
        (total,) = terms
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        thread = U32(mlir.thread())
        with thread_ops.when((thread & (WARP - 1)).equals(0)):
            thread_ops.store(thread_ops.shared(target) + (thread >> 5 << 2), thread_ops.bits(total))

    mlir.inline(emit, x, target, layout=lambda shape: plgpu.Layout.WG_STRIDED(shape, vec_size=8))


@primitive
def put_rows(target, x: jax.Array, first: jax.Array, rows: int) -> None:
    """Writes the first lanes of each of the first `rows` warps to rows `first` .. of `target` [T, N], as far as it has
    them; x [128] float32."""
    count, width = target.shape
    for i in range(rows):

        @pl.when(first + i < count)
        def _(i=i):
            target[first + i, :] = x[i * WARP : i * WARP + width]


@put_rows.mosaic
def _(target, x, first, rows):
    count, width = target.shape

    def emit(target, x, first):
        thread = U32(mlir.thread())
        warp, lane = thread >> 5, thread & (WARP - 1)
        row = U32(mlir.scalar(first)) + warp
        inside = (warp < rows).value, (row < count).value, (lane < width).value
        with thread_ops.when(U32(functools.reduce(arith.andi, inside))):
            place = mlir.to_i64((row * width + lane).value)
            llvm.store(mlir.scalar(x), mlir.at(mlir.global_pointer(target), place, mlir.f32_type()), alignment=4)

    vectors.inline(emit, target, x, first)
