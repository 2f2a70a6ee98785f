"""The experts' kernel against float64: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.quant import QuantizedWeight
from pallas_kernels.experts.experts import ExpertsProblem, experts
from pallas_kernels.matmul.quantized_weights import FP4
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from tests.pallas_kernels.kernels import check_repeats, registers
from tests.pallas_kernels.linear.test_quantized_linear import random_weight
from tests.pallas_kernels.stacks import LAYERS, check_kernel, check_layers


LIMIT = 7.0


def random_experts(seed, number, rows, columns, kind="FP4"):
    """Matrices as stored: "FP4" or "BF16"."""
    keys = jax.random.split(jax.random.key(seed))
    if kind == "BF16":
        return jax.random.normal(keys[0], (number, rows, columns), jnp.bfloat16) * jnp.bfloat16(2.0**-5)
    codes = jax.random.bits(keys[0], (number, rows, columns // 2), jnp.uint8)
    scale = jax.random.randint(keys[1], (number, rows, columns // 32), 118, 123).astype(jnp.uint8)
    return QuantizedWeight(codes, scale, "FP4", jnp.dtype(jnp.bfloat16))


def operands(tokens, top_k, number, depth, inner, kind="FP4", *, shared=None):
    """Arguments of `ops.experts`; every token has the expert `shared`, if there is one."""
    rng = np.random.default_rng(tokens)
    selected = np.stack([rng.permutation(number)[:top_k] for _ in range(tokens)])
    if shared is not None:
        selected[:, 0] = shared
        selected[:, 1:] = np.where(selected[:, 1:] == shared, (shared + 1) % number, selected[:, 1:])
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
    matrices = random_experts(1, number, 2 * inner, depth, kind), random_experts(2, number, depth, inner, kind)
    return x, jnp.asarray(selected, jnp.int32), weights, *matrices


def run(*args, implementation):
    call = functools.partial(ops.experts, limit=LIMIT, implementation=implementation)
    return jax.jit(call)(*args)


def rounded(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def reference(x, selected, weights, gate_up, down):
    """float64, rounded to bfloat16 where the model rounds."""
    out = np.zeros((*selected.shape, x.shape[1]))
    for expert in set(np.unique(selected)) & set(range(gate_up.shape[0])):
        t, j = np.nonzero(np.asarray(selected) == expert)
        both = rounded(np.asarray(x, np.float64)[t] @ np.asarray(gate_up[expert], np.float64).T)
        gate, up = np.split(both, 2, axis=1)
        gate = np.minimum(gate, LIMIT)
        up = np.clip(up, -LIMIT, LIMIT)
        inner = rounded(gate / (1 + np.exp(-gate)) * up * np.asarray(weights, np.float64)[t, j, None])
        out[t, j] = rounded(inner @ np.asarray(down[expert], np.float64).T)
    return out.sum(axis=1)


def check(implementation, *args, **kwargs):
    compare(implementation, *operands(*args, **kwargs))


def compare(implementation, *arrays, run=run):
    got = np.float64(run(*arrays, implementation=implementation))
    want = reference(*arrays[:5])
    # Where a sum in another order is rounded the other way, the value is off by 2**-8: few are. See also
    # `test_quantized_linear` for single sums.
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=2.0**-6 * np.abs(want).max())


def check_shared(implementation, tokens, top_k, number, depth, inner, shared, kind="FP8"):
    """Beside the others, in one launch, the expert that all tokens have."""
    arrays = operands(tokens, top_k, number, depth, inner)
    rng = np.random.default_rng(0)
    shapes = (2 * shared, depth), (depth, shared)
    gate_up, down = (random_weight(rng, *shape, (113, 118), kind) for shape in shapes)
    got = np.float64(run(*arrays, None, (gate_up[0], down[0]), implementation=implementation))
    alone = np.float64(run(*arrays, implementation=implementation))
    gate, up = np.split(rounded(np.asarray(arrays[0], np.float64) @ gate_up[1].T), 2, axis=1)
    gate = np.minimum(gate, LIMIT)
    up = np.clip(up, -LIMIT, LIMIT)
    shared_only = rounded(rounded(gate / (1 + np.exp(-gate)) * up) @ down[1].T)
    want = alone + shared_only
    # Half a unit of bfloat16 of the sum; for the shared expert's part see `compare`.
    assert np.linalg.norm(got - want) <= 2.0**-8 * np.linalg.norm(want)
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=2.0**-6 * np.abs(want).max())
    assert all(np.linalg.norm(part) > 0.1 * np.linalg.norm(want) for part in (alone, shared_only))


@pytest.mark.parametrize("blocks", [0, 1, 3, 6, 13, 48])
@pytest.mark.parametrize(("inner", "shared"), [(2048, 0), (2048, 2048), (512, 0), (512, 512)])
def test_blocks_of_threads_share_the_work(blocks, inner, shared):
    """They have every tile once, in order, and read about as much."""
    problem = ExpertsProblem(FP4, 48, 6, 256, 4096, inner, shared, LIMIT)
    for i, tiles in enumerate(problem.tiles):
        together = problem.tiles_together(i)
        worker = jnp.arange(MULTIPROCESSORS + 1)
        routed, own = problem.first_tiles(jnp.int32(blocks), i, worker, MULTIPROCESSORS)
        routed = np.asarray(routed)
        own = np.broadcast_to(own, worker.shape)
        assert (routed[0], own[0], routed[-1], own[-1]) == (0, 0, blocks * tiles, problem.shared_tiles[i])
        counts = np.diff(routed), np.diff(own)
        assert min(map(np.min, counts)) >= 0
        assert not np.any(routed % together)
        # Of FP4's tiles; one of FP8 is as large as two. In two launches the largest shares were one after the other.
        most = together * -(-blocks * tiles // together // MULTIPROCESSORS)
        has_few = blocks * tiles + 2 * problem.shared_tiles[i] < 2 * MULTIPROCESSORS
        most += (shared > 0) * max(together, 2 if has_few else 1)
        assert np.max(counts[0] + 2 * counts[1]) <= most
        spans = (routed[1:] - 1) // tiles - routed[:-1] // tiles + 1
        assert np.max(np.where(counts[0] > 0, spans, 0)) <= problem.max_groups(i, MULTIPROCESSORS)


# Down with whole rows of two stages; more pairs of an expert than fit into one block, of 256 channels, in either
# storage; rows of three stages that end in half a segment; steps of each warpgroup, the last one not whole.
@pytest.mark.parametrize(
    ("tokens", "depth", "inner", "kind"),
    [
        pytest.param(2, 512, 1024, "FP4", marks=pytest.mark.slow),
        (9, 512, 256, "FP4"),
        pytest.param(3, 512, 576, "FP4", marks=pytest.mark.slow),
        pytest.param(1, 512, 2112, "FP4", marks=pytest.mark.slow),
        pytest.param(9, 512, 256, "BF16", marks=pytest.mark.slow),
    ],
)
def test_interpreted(tokens, depth, inner, kind):
    check("interpret", tokens, 2, 3, depth, inner, kind, shared=1)


def without_some_experts(selected):
    """A pair, and all of a token's, have no expert here."""
    return selected.at[0, 1].set(-1).at[2].set(2**20)


# XLA sorts pairs where there are as many as experts.
@pytest.mark.parametrize(
    ("implementation", "number"),
    [("xla", 3), ("xla", 9), ("interpret", 3), pytest.param("mosaic_gpu", 3, marks=pytest.mark.gpu)],
)
def test_pairs_without_an_expert_here_add_nothing(implementation, number):
    x, selected, *others = operands(3, 2, number, 512, 256)
    compare(implementation, x, without_some_experts(selected), *others)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_the_shared_expert_is_one_more(implementation):
    check_shared(implementation, 2, 1, 3, 512, 512, 256)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_a_shared_expert_in_blocks_of_32(implementation):
    check_shared(implementation, 2, 1, 2, 512, 192, 64, "FP8_32")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_pairs_grouped_by_the_router(implementation):
    x, _, _, *matrices = operands(2, 1, 128, 512, 256)
    keys = jax.random.split(jax.random.key(0))
    weight = jax.random.normal(keys[0], (128, 512))
    bias = jax.random.normal(keys[1], (128,))
    routing = ops.router(x, weight, bias, top_k=1, scaling_factor=1.0, implementation=implementation)
    assert routing.permutation is not None
    arrays = x, routing.experts, routing.weights, *matrices
    compare(implementation, *arrays, routing.permutation)
    # Not grouped once more: the table counts.
    table, counts = routing.permutation
    other = table.at[0].set((table[0] + 1) % 128), counts
    with pytest.raises(AssertionError):
        compare(implementation, *arrays, other)


def layers_of(number, depth, inner, kind="FP4"):
    """The matrices of each layer: of its routed experts, and of the one that all tokens share."""
    rng = np.random.default_rng(0)
    for i in range(LAYERS):
        routed = (
            random_experts(2 * i, number, 2 * inner, depth, kind),
            random_experts(2 * i + 1, number, depth, inner, kind),
        )
        shapes = (2 * inner, depth), (depth, inner)
        yield routed, tuple(random_weight(rng, *shape, scales=(113, 118))[0] for shape in shapes)


def stored(matrix):
    """A matrix as kernels take it."""
    return (matrix.codes, matrix.scale) if isinstance(matrix, QuantizedWeight) else matrix


# Two rows of FP4's scales in 16 bytes, as in the loop below, and bfloat16.
@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        pytest.param("interpret", "BF16", marks=pytest.mark.slow),
        *(pytest.param("mosaic_gpu", kind, marks=pytest.mark.gpu) for kind in ("FP4", "BF16")),
    ],
)
def test_one_layer_of_a_stack(implementation, kind):
    x, selected, weights, *_ = operands(1, 2, 3, 512, 256)

    def run(matrices, **layer):
        routed, _ = matrices
        options = dict(limit=LIMIT, interpret=implementation == "interpret")
        return experts(x, selected, weights, *map(stored, routed), **layer, **options)

    check_kernel(run, list(layers_of(3, 512, 256, kind)))


# In one launch with the shared expert; XLA and a GPU also have it beside bfloat16. A pair has no expert here.
@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        ("xla", "FP4"),
        ("xla", "BF16"),
        pytest.param("interpret", "FP4", marks=pytest.mark.slow),
        pytest.param("mosaic_gpu", "FP4", marks=pytest.mark.gpu),
        pytest.param("mosaic_gpu", "BF16", marks=pytest.mark.gpu),
    ],
)
def test_layers_in_a_loop(implementation, kind):
    x, _, weights, *_ = operands(1, 2, 3, 512, 256)
    selected = jnp.asarray([[2, -1]], jnp.int32)

    def call(matrices, carry, implementation):
        routed, shared = matrices
        options = dict(limit=LIMIT, implementation=implementation)
        return carry, ops.experts(x, selected, weights, *routed, None, shared, **options)

    check_layers(implementation, call, list(layers_of(3, 512, 256, kind)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_on_gpu(tokens, kind):
    check("mosaic_gpu", tokens, 6, 64, 4096, 2048, kind, shared=5)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [512, 2048])
@pytest.mark.parametrize("tokens", [1, 32, 512])
def test_equal_calls_have_equal_bits_on_gpu(tokens, inner):
    check_repeats(ops.experts, *operands(tokens, 6, 64, 4096, inner), limit=LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "number", "shared"), [(1, 64, 2048), (8, 256, 2048), (3, 64, 512)])
def test_the_shared_expert_on_gpu(tokens, number, shared):
    check_shared("mosaic_gpu", tokens, 6, number, 4096, shared, shared)


# The widths of V4.1-Flash, and a fourth of an expert on each of four devices.
@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2304, 576])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_shared_expert_in_blocks_of_32_on_gpu(tokens, inner):
    check_shared("mosaic_gpu", tokens, 6, 64, 5120, inner, inner, "FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2304, 1152, 576])
def test_channels_in_no_multiples_of_512_on_gpu(inner):
    check("mosaic_gpu", 32, 6, 64, 5120, inner, shared=5)


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2304, 576, 512])
def test_a_token_has_the_same_bits_beside_any_others_on_gpu(inner):
    x, selected, weights, *matrices = operands(24, 6, 64, 5120, inner)
    together = run(x, selected, weights, *matrices, implementation="mosaic_gpu")
    for tokens in (1, 5):
        alone = run(x[:tokens], selected[:tokens], weights[:tokens], *matrices, implementation="mosaic_gpu")
        chex.assert_trees_all_equal(np.asarray(alone), np.asarray(together[:tokens]))


@pytest.mark.gpu
@pytest.mark.parametrize(("inner", "kind"), [(512, "FP4"), (256, "FP4"), (256, "BF16")])
def test_on_gpu_small(inner, kind):
    check("mosaic_gpu", 8, 2, 130, 512, inner, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
def test_an_eighth_of_each_expert_on_gpu(kind):
    check("mosaic_gpu", 32, 6, 64, 4096, 256, kind)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import experts
S, pairs = jax.ShapeDtypeStruct, lambda rows, columns: tuple(S((256, rows, columns // n), jnp.uint8) for n in (2, 32))
args = S((8, 4096), jnp.bfloat16), S((8, 6), jnp.int32), S((8, 6), jnp.float32)
run = functools.partial(experts, limit=7.0)
for inner in 2048, 256:
    compile_for_h100(f"experts{inner}", run, *args, pairs(2 * inner, 4096), pairs(4096, inner))
def shared(rows, columns): return S((rows, columns), jnp.uint8), S((rows // 128, columns // 128), jnp.uint8)
for inner in 2048, 512:
    given = *args, pairs(2 * inner, 4096), pairs(4096, inner), None, (shared(2 * inner, 4096), shared(4096, inner))
    compile_for_h100(f"shared{inner}", run, *given)
weights = S((256, 4096, 4096), jnp.bfloat16), S((256, 4096, 2048), jnp.bfloat16)
compile_for_h100("experts_bf16", run, *args, *weights)
# V4.1-Flash, whole and a fourth of its experts.
args = S((8, 5120), jnp.bfloat16), *args[1:]
def shared(rows, columns): return S((rows, columns), jnp.uint8), S((rows // 32, columns // 32), jnp.uint8)
for inner in 2304, 576:
    given = *args, pairs(2 * inner, 5120), pairs(5120, inner)
    compile_for_h100(f"small_blocks{inner}", run, *given)
    given = *given, None, (shared(2 * inner, 5120), shared(5120, inner))
    compile_for_h100(f"small_blocks_shared{inner}", functools.partial(run, scale_block=32), *given)
""")
    # One block of 768 threads a multiprocessor.
    assert max(used.values()) <= 80, used


def test_what_the_kernel_does_not_take_is_refused(untyped):
    x, selected, weights, gate_up, down = operands(3, 3, 4, 512, 512)
    call = functools.partial(ops.experts, limit=LIMIT, implementation="interpret")
    with pytest.raises(ValueError, match=r"must have a row for each of the 3 tokens of x"):
        call(x, selected[:2], weights[:2], gate_up, down)
    with pytest.raises(NotImplementedError, match="takes gate_up as bfloat16"):
        call(x, selected, weights, gate_up[...].astype(jnp.float32), down[...])
    with pytest.raises(NotImplementedError, match="takes x as bfloat16"):
        call(x.astype(jnp.float32), selected, weights, gate_up, down)
