"""Scores of a tile of 64 indexer keys for a token: products on the tensor cores, and weighted sums over heads."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm, math, vector

from pallas_kernels.formats.exact_math import power_of_two
from pallas_kernels.indexer_scores import key_tiles
from pallas_kernels.indexer_scores.key_tiles import DIM, KEYS, NEAR, PER_HALF, PER_WARP, TOP, WARP_KEYS
from pallas_kernels.mgpu import bfloat16_words, mlir, thread_ops
from pallas_kernels.mgpu.bfloat16_words import decode_e4m3, e2m1_pairs, e4m3_pairs, halves, multiply
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.mgpu.wgmma import transforms
from pallas_kernels.runtime.launch import primitive


# Largest number of binades (factors of 2) from a scale up to the key's largest scale. A smaller scale is replaced by
# the largest scale times 2**-MAX_BELOW, so that the quotient of the two scales is a normal float32.
MAX_BELOW = 126


@primitive
def score(
    keys: tuple[jax.Array, jax.Array], *, queries, weights, token, tokens: int, out, row, first, block, factor: float
) -> None:
    """Stores out[row, first + s] = factor * sum_h weights[token, h] * relu(queries[token, h] . keys[s]) for a tile.

    With `tokens` > 1, the scores of `tokens` adjacent tokens are stored in adjacent rows. E4M3 keys are in units of the
    key's largest scale, so their scores are also multiplied by this scale.

    Args:
      keys: the tile's 64 keys: both results of `unpack_bfloat16`, or `values` and `largest` of `unpack_e4m3`.
      queries: [n * heads, 128] queries of the chunk's n tokens, of the dtype of the keys, with `transforms`, in shared
        memory.
      weights: [n, heads] float32 head weights of the chunk's tokens, in shared memory.
      token: int32 scalar, index of the first token in the chunk.
      tokens: number of tokens to score. They have at most 64 heads in all.
      out: [T, E] float32 in global memory; nothing is written past column E - 1.
      row: int32 scalar, row of `out` for the first token.
      first: int32 scalar, column of `out` for the tile's first key.
      block: [4] int32 in layout PER_WARP, an element for each warp's 16 keys. Or [4, 2] int32 in layout PER_HALF, an
        element for the first 8 and one for the last 8 keys of each warp. Only the sign of an element is used: if it is
        negative, the keys do not exist, and their scores are -inf.
      factor: positive factor of all scores.
    """
    if queries.dtype == jnp.float8_e4m3fn:
        tile = decode_e4m3(keys[0]).reshape(KEYS, DIM)
        largest = keys[1]
    else:
        tile = jnp.concatenate(keys, axis=1).astype(jnp.float32)
        largest = None
    for i in range(tokens):
        _put(_totals(tile, largest, queries, weights, token + i) * factor, out, row + i, first, block)


@score.mosaic
def _score_mosaic(keys, *, queries, weights, token, tokens, out, row, first, block, factor):
    # `keys` are the two results of `unpack_e4m3` (values, largest) or of `unpack_bfloat16` (low, high).
    fp8 = queries.dtype == jnp.float8_e4m3fn
    layouts = (key_tiles.E4M3_KEYS, key_tiles.SCALES) if fp8 else (key_tiles.BF16_KEYS, key_tiles.BF16_KEYS)

    def emit(values_or_low, largest_or_high, queries, weights, token, out, row, first, block):
        if fp8:
            registers = mlir.values(values_or_low)
            largest = mlir.values(largest_or_high)
        else:
            registers = [*values_or_low.registers.flat, *largest_or_high.registers.flat]
            largest = None
        heads = weights.type.shape[1]
        dots = _dots(registers, queries, token, heads, tokens, "e4m3" if fp8 else "bf16")

        def store_token(dots, token, row):
            sums = _add_up(dots, weights, token * heads, [Scalar(0.0)] * 2)
            _store(sums, largest, out, row, first, block, factor)

        per_token = len(dots) // tokens
        store_token(dots[:per_token], token, row)
        for i in range(1, tokens):
            store_token(dots[i * per_token : (i + 1) * per_token], token + i, row + i)

    keys_with_layouts = ((x, kind.layout) for x, kind in zip(keys, layouts, strict=True))
    queries_with_type = queries, plgpu.RefType(transforms(queries.dtype))
    block_with_layout = block, PER_WARP if block.ndim == 1 else PER_HALF
    mlir.inline(emit, *keys_with_layouts, queries_with_type, weights, token, out, row, first, block_with_layout)


@primitive
def score_far(tile: tuple[jax.Array, jax.Array], *, queries, weights, tokens, out, row, first, block, factor) -> None:
    """Scores MXFP4 keys again if their scales are far apart. Multiplies them as bfloat16 with float32 sums.

    If a key of a warp has scales more than NEAR binades apart, all 16 keys of the warp are scored, for all tokens of
    the chunk.

    Args:
      tile: result of `load_tile`.
      tokens: int32 scalar, number of tokens in the chunk.
      row: int32 scalar, row of `out` for the first token; the rows of the other tokens follow.
      queries, weights, out, first, block, factor: as in `score`.
    """
    words, scales = tile
    largest = jnp.max(scales, axis=1, keepdims=True)
    below = power_of_two(127 - jnp.minimum(largest - scales, MAX_BELOW))
    keys = (key_tiles.code_values(words) * below[:, :, None]).reshape(KEYS, DIM)
    keys = key_tiles.permute_dims(keys, jnp.float8_e4m3fn)
    far = jnp.any((largest - scales > NEAR).reshape(KEYS // WARP_KEYS, -1), axis=1)

    @pl.loop(0, tokens)
    def _(j):
        total = _totals(keys, largest, queries, weights, j) * (factor * 2.0**TOP)
        _put(total, out, row + j, first, block, only=far)


# Layouts of the operands of `score_far`, in the order of the flattened pytree: the tile's words and scales, then the
# keyword arguments `block`, `first` and `out`. The next operand, `queries`, has the layout `_FAR_QUERIES`. The operands
# after it have no layout.
_FAR_LAYOUTS = key_tiles.CODES.layout, key_tiles.SCALES.layout, PER_WARP, None, None
_FAR_QUERIES = plgpu.RefType(transforms(jnp.float8_e4m3fn))


@mlir.emits(score_far, *_FAR_LAYOUTS, _FAR_QUERIES)
def _emit_score_far(tile, *, queries, weights, tokens, out, row, first, block, factor):
    words, scales = map(mlir.values, tile)
    largest = key_tiles.largest_scales(scales)
    below = [(top - x).minimum(MAX_BELOW) for top, x in zip(largest, scales, strict=True)]
    code = "{ .reg .pred p; setp.gt.u32 p, $1, $2; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
    far = thread_ops.ptx(code, below[0].maximum(below[1]), NEAR)

    def score_token(j):
        sums = _far_sums(keys, queries, weights, j)
        _store(sums, largest, out, row + j, first, block, factor * 2.0**TOP)

    with thread_ops.when(far > 0):
        # A factor is the quotient of a scale and the key's largest scale, times 2**126, because `e2m1_pairs` returns
        # the codes' values times 2**-126.
        factors = [(127 + 126 - x) * 0x00800080 for x in below]
        keys = [[multiply(x, factors[i // 4]) for x in e2m1_pairs(word)] for i, word in enumerate(words)]
        thread_ops.loop(tokens, score_token)


def _totals(tile, largest, queries, weights, token):
    """Returns the scores [64] float32 of a tile for a token, without the factor; for interpreted kernels.

    Args:
      tile: [64, 128] float32 keys in the order of `permute_dims`.
      largest: [64, 4] int32, E8M0 bits of the scale by which each key's score is multiplied; None for no scale.
      queries, weights, token: as in `score`.
    """
    heads = weights.shape[1]
    q = queries[pl.ds(token * heads, heads)].astype(jnp.float32)
    dots = jnp.dot(tile, q.T, precision="highest")
    total = jnp.dot(jnp.maximum(dots, 0.0), weights[token], precision="highest")
    return total if largest is None else total * power_of_two(largest[:, 0])


def _put(total, out, row, first, block, only=None):
    """Stores the scores `total` [64] of a tile for one token, see `score`; for interpreted kernels.

    `only` is [4] bool: whether to store the 16 scores of each warp. None stores all.
    """
    total = jnp.where(jnp.repeat(block.reshape(-1) < 0, KEYS // block.size), -jnp.inf, total)
    for start in range(0, KEYS, WARP_KEYS):

        @pl.when((first + start < out.shape[1]) & (True if only is None else only[start // WARP_KEYS]))
        def _(start=start):
            out[row, pl.ds(first + start, WARP_KEYS)] = total[start : start + WARP_KEYS]


def _far_sums(keys, queries, weights, token):
    """Emits products by `mma` in bfloat16 and their weighted sum over heads, for a thread's two keys.

    Args:
      keys: 8 lists, 4 for the first key, then 4 for the second key. A list holds the 8 values of one word of codes, in
        four words of two bfloat16, as `e2m1_pairs` orders them.
      queries, weights: as in `score`.
      token: index of the token in the chunk.

    Returns:
      The two sums of `_add_up`, for the first and for the second key, as MLIR float32.
    """
    heads = weights.type.shape[1]
    lane = thread_ops.lane()
    zero = Scalar(0.0)
    head = lane >> 2
    first_query = thread_ops.shared(queries) + token * (heads * DIM) + head * DIM + ((lane & 3) << 2)

    def add_heads(i, *sums):
        dots = [zero] * 4
        for word in range(4):
            # The 128-byte swizzle of the queries XORs the index of a piece of 16 bytes of a head with the head's index
            # modulo 8.
            places = [first_query + i * (8 * DIM) + ((head ^ (2 * word + half)) << 4) for half in range(2)]
            first_four, last_four = (thread_ops.ptx("ld.shared.b32 $0, [$1];", place) for place in places)
            # Converts 8 values of a query to pairs of values i and i + 4, as `e2m1_pairs` does for keys. `e4m3_pairs`
            # returns values times 2**-120, and the product removes this factor.
            q = [multiply(x, 0x7B807B80) for high in range(2) for x in e4m3_pairs(halves(first_four, last_four, high))]
            for pair in (0, 2):
                a = [keys[word + 4 * key][pair + j] for j in range(2) for key in range(2)]
                dots = bfloat16_words.multiply_add(dots, a, q[pair : pair + 2])
        return _add_up(dots, weights, token * heads + i * 8, sums)

    # The instruction hides the number of iterations from the compiler, which then does not unroll the loop. So the
    # operands fit into registers.
    count = thread_ops.ptx("mov.b32 $0, $1;", heads // 8)
    return thread_ops.loop(count, add_heads, zero, zero)


def _add_up(dots, weights, head, sums):
    """Emits code that adds 2 * relu(dot) * head weight, for each of a thread's heads, to the sums of its two keys.

    Args:
      dots: float32 values of a thread in the layout of `wgmma` accumulators [64 keys, heads]: for every 8 heads, two
        values of the first key, then two values of the second key.
      weights: float32 head weights in shared memory.
      head: index of the weight of the first head.
      sums: float32 sums of the first and of the second key so far.

    Returns:
      The two new sums, as a list. They are twice the sums of relu(dot) * head weight, and `_store` halves them.
    """
    weight_index = head + ((thread_ops.lane() & 3) << 1)
    sums = list(sums)
    pointer = mlir.at(mlir.shared_pointer(weights), weight_index, mlir.f32_type())
    for i in range(len(dots) // 4):
        pair = mlir.at(pointer, 8 * i, mlir.f32_type())
        pair = llvm.load(mlir.vector_type(2, mlir.f32_type()), pair, alignment=8)
        for j in range(2):
            for half in range(2):
                x = dots[4 * i + 2 * half + j]
                # 2 * relu(x) = x + |x|. Hopper computes additions at twice the rate of maxima.
                weight = vector.extract(pair, [], [j])
                sums[half] = thread_ops.fma(weight, x + math.absf(x), sums[half])
    return sums


def _store(sums, largest, out, row, first, block, factor):
    """Emits code that adds up `sums` over the four lanes that share two keys, and stores them times `factor / 2`.

    `sums` are from `_add_up`. `largest` is None, or for each of the thread's two keys the E8M0 bits of the key's
    largest scale, by which its score is also multiplied. The other arguments are as in `score`.
    """
    lane = thread_ops.lane()
    total = _add_quads(sums, lane) * (0.5 * factor)
    if largest is not None:
        even, odd = largest
        scale = (lane & 1).equals(1).where(odd, even) << 23
        total = total * scale.as_float()
    first_half, *second_half = mlir.values(block)
    block = (lane & 1).equals(0).where(first_half, *second_half) if second_half else first_half
    missing = block.is_below(0)
    total = missing.where(-np.inf, total)
    warp_column = (mlir.thread() >> 5) * WARP_KEYS + first
    with thread_ops.when(warp_column.is_below(out.type.shape[1]) & (lane & 2).equals(0)):
        key = (lane & 1) * 8 + (lane >> 2)
        offset = mlir.to_i64(row) * out.type.shape[1] + mlir.to_i64(warp_column + key)
        llvm.store(total, mlir.at(mlir.global_pointer(out), offset, mlir.f32_type()))


def _add_quads(sums, lane):
    """Emits code that adds up the sums of the four lanes that share two keys.

    `sums` are this lane's sums of the first and of the second key. Even lanes get the total of the first key, and odd
    lanes the total of the second key.
    """
    odd = (lane & 1) > 0
    first_key, second_key = sums
    kept = odd.where(second_key, first_key)
    sent = odd.where(first_key, second_key)
    total = kept + thread_ops.shuffle_xor(sent, 1)
    return total + thread_ops.shuffle_xor(total, 2)


def _dots(registers, queries, token, heads, tokens, kind):
    """Emits the `wgmma` products of a tile and queries, [64 keys, tokens * heads] float32.

    Args:
      registers: a thread's part of the keys, the left operand, as MLIR values of 32 bits.
      queries: memref of the chunk's queries in shared memory.
      token: index of the first token in the chunk.
      heads: number of heads of a query.
      tokens: number of tokens.
      kind: PTX type of keys and queries, "e4m3" or "bf16".

    Returns:
      This thread's products, 1/128 of all, as MLIR float32 in the order of a `wgmma` accumulator's registers.
    """
    size = {"e4m3": 1, "bf16": 2}[kind]
    registers = [mgpu.utils.bitcast(register, mlir.int_type()) for register in registers]
    # `low` is the lower half of the matrix descriptor of the queries: their address in units of 16 bytes. Bit 16 sets a
    # stride that is not used with this swizzle.
    low = (((thread_ops.shared(queries) & 0x3FFFF) >> 4) | (1 << 16)) + token * ((heads * DIM * size) >> 4)
    columns = tokens * heads
    count = columns // 2  # number of sums of a thread
    steps = len(registers) // 4
    # The operands of the PTX code are the sums, then `registers`, then `low`.
    sums = ", ".join(f"${i}" for i in range(count))
    low_operand = f"${count + len(registers)}"
    # `high` is the upper half of the descriptor: the stride between groups of 8 heads in units of 16 bytes, and the bit
    # of the 128-byte swizzle.
    high = (1 << 30) | ((1024 * size) >> 4)
    # The predicate p says whether a product is added to the sums. The first product replaces them.
    lines = ["{ .reg .pred p; .reg .b32 l; .reg .b64 d; setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned;"]
    for step in range(steps):
        a = ", ".join(f"${count + 4 * step + i}" for i in range(4))
        # A step reads 32 bytes of each head. After 4 steps, the next 128 bytes of a head begin 1024 bytes further on,
        # because groups of 8 heads are stored together.
        offset = (step // 4) * 1024 + (step % 4) * 32
        lines += [
            f"add.u32 l, {low_operand}, {offset >> 4}; mov.b64 d, {{l, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k{32 // size}.f32.{kind}.{kind} {{{sums}}}, {{{a}}}, d, p, 1, 1"
            + (", 0;" if kind == "bf16" else ";"),
        ]
        if step == 0:
            lines.append("setp.eq.b32 p, 0, 0;")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    return mlir.ptx("\n".join(lines), *registers, low, results=[mlir.f32_type()] * count)
