"""The router's kernel against jnp: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from pallas_kernels import router
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import LAYERS, check_layers


TOP_K = 6


def operands(tokens, depth, experts, *, hashed=False):
    """Arguments of `ops.router`: logits of about one unit, ids on either side of the table, every third is padding."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((experts, depth)) * depth**-0.5, jnp.float32)
    slots = jnp.where(jnp.arange(tokens) % 3 == 2, -1, 0).astype(jnp.int32)
    if not hashed:
        return x, weight, jnp.asarray(rng.standard_normal(experts) * 0.1, jnp.float32), None, None, slots
    table = np.stack([rng.permutation(experts)[:TOP_K] for _ in range(50)])
    ids = np.where(np.arange(tokens) == 0, -1, rng.integers(0, 60, tokens))
    return x, weight, None, jnp.asarray(table, jnp.int32), jnp.asarray(ids, jnp.int32), slots


def run(implementation, *arrays):
    call = functools.partial(ops.router, top_k=TOP_K, scaling_factor=1.5, implementation=implementation)
    return jax.jit(call)(*arrays)


def check_groups(experts, table, counts):
    """Blocks of up to 8 pairs, ascending by expert and pair, and cleared counts."""
    pairs = np.asarray(experts).reshape(-1)
    chosen = np.unique(pairs[pairs >= 0])
    want = [(e, *np.flatnonzero(pairs == e)[i : i + 8]) for e in chosen for i in range(0, sum(pairs == e), 8)]
    assert counts[0] == len(want) and not np.any(counts[1:])
    rows = np.asarray(table).reshape(-1, 16)[: len(want)]
    for (expert, *mine), row in zip(want, rows, strict=True):
        assert row[0] == expert
        chex.assert_trees_all_equal(row[8:], np.array(mine + [-1] * (8 - len(mine))))


def check(implementation, *arrays):
    experts, weights, permutation = run(implementation, *arrays)
    wanted, expected, _ = run("xla", *arrays)
    assert (permutation is None) == (experts.shape[0] > 8)
    if permutation is not None:
        check_groups(experts, *permutation)
    assert (experts.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    is_token = np.asarray(arrays[-1]) >= 0
    assert (np.asarray(experts)[~is_token] == -1).all() and not np.asarray(weights)[~is_token].any()
    experts, weights, wanted, expected = (np.asarray(a)[is_token] for a in (experts, weights, wanted, expected))
    # Sums of float32 in another order: scores agree to 1e-5, and so the order of two that are further apart.
    x, weight, bias, *_ = arrays
    scores = np.sqrt(np.logaddexp(0, np.float64(x)[is_token] @ np.float64(weight).T))
    rank = scores if bias is None else scores + np.float64(bias)
    mine, other = (np.take_along_axis(rank, np.asarray(e), axis=1) for e in (experts, wanted))
    chex.assert_trees_all_close(mine, other, rtol=1e-5)
    assert all(len(set(row)) == TOP_K for row in np.asarray(experts))
    if bias is None:
        chex.assert_trees_all_equal(experts, wanted)
    own = np.take_along_axis(scores, np.asarray(experts), axis=1)
    chex.assert_trees_all_close(weights, 1.5 * own / own.sum(axis=1, keepdims=True), rtol=1e-5)
    # Of many tokens, some select another of two experts whose scores agree to 1e-5.
    same = (experts == wanted).all(axis=1)
    assert same.mean() > 0.99
    chex.assert_trees_all_close(weights[same], expected[same], rtol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts", "hashed"), [(1, 256, False), (3, 128, True), (33, 384, False), (300, 384, False)]
)
def test_interpreted(tokens, experts, hashed):
    check("interpret", *operands(tokens, 512, experts, hashed=hashed))


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_of_equal_scores_the_first_experts_are_selected(implementation):
    x, weight, bias, *_ = operands(2, 512, 128)
    bias = jnp.zeros_like(bias).at[jnp.array([7, 100])].set(-1.0).at[jnp.array([90, 31])].set(1.0)
    experts, weights, _ = run(implementation, x, jnp.zeros_like(weight), bias)
    chex.assert_trees_all_equal(experts, np.array([[31, 90, 0, 1, 2, 3]] * 2))
    chex.assert_trees_all_close(weights, np.full((2, TOP_K), 0.25), rtol=1e-6)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_scores_of_large_and_small_logits(implementation):
    """softplus where exp overflows, and where 1 + exp(x) is 1."""
    logits = np.array([-30.0, -80.0, -17.0, -1e-3, 1e-3, 0.5, 20.0, 200.0, 3e4])
    weight = np.zeros((128, 512), np.float32)
    weight[: len(logits), 0] = logits
    table = jnp.asarray(np.arange(6)[None, :] + np.arange(4)[:, None], jnp.int32)
    x = jnp.zeros((4, 512), jnp.bfloat16).at[:, 0].set(1.0)
    ids = jnp.arange(4, dtype=jnp.int32)
    _, weights, _ = run(implementation, x, jnp.asarray(weight), None, table, ids)
    scores = np.sqrt(np.logaddexp(0, logits))[np.asarray(table)]
    chex.assert_trees_all_close(weights, 1.5 * scores / scores.sum(axis=1, keepdims=True), rtol=3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "depth", "experts"),
    [
        (1, 4096, 256),
        (7, 4096, 256),
        (17, 4096, 256),
        (256, 7168, 384),
        (8, 5120, 384),
        (1, 5120, 128),
        (8192, 4096, 256),
    ],
)
def test_on_gpu(tokens, depth, experts, hashed):
    check("mosaic_gpu", *operands(tokens, depth, experts, hashed=hashed))


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "hashed"), [(2, False), (2, True), (9, False), (300, True)])
def test_layers_of_a_stack(implementation, tokens, hashed):
    x, weight, bias, table, ids, slots = operands(tokens, 512, 128, hashed=hashed)
    given = weight, bias, table

    def draw(layer):
        return jax.tree.map(lambda array: jnp.roll(array, layer, axis=0), given)

    def call(weights, carry, implementation):
        return carry, run(implementation, x, *weights, ids, slots)

    # The kernel is for up to 256 tokens. For more, XLA multiplies with the layer's values.
    check_layers(implementation, call, [draw(layer) for layer in range(LAYERS)], poison=tokens <= 256)


def test_its_gradient_is_that_of_the_reference():
    arrays = operands(2, 512, 128)

    def gradient(implementation):
        def loss(x, weight):
            return jnp.sum(jnp.sin(3 * run(implementation, x, weight, *arrays[2:])[1]))

        return jax.grad(loss, argnums=(0, 1))(*arrays[:2])

    for mine, other in zip(gradient("interpret"), gradient("xla"), strict=True):
        # The cosine of weights that differ by rounding.
        chex.assert_trees_all_close(np.float32(mine), np.float32(other), rtol=1e-2, atol=1e-5)
        assert np.abs(np.float32(other)).max() > 1e-3


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import router
from tests.pallas_kernels.stacks import LAYERS, check_not_copied, looped
S, i32, f32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32
call = functools.partial(router, top_k=6, scaling_factor=1.5)
flash = 4096, 256
pro = 7168, 384
sizes = ("one", 1, *flash), ("few", 7, *flash), ("some", 32, *flash), ("pro", 256, *pro), ("v41", 8, 5120, 384)
for name, tokens, depth, experts in sizes:
    x, weight, slots = S((tokens, depth), jnp.bfloat16), S((experts, depth), f32), S((tokens,), i32)
    compile_for_h100(name, call, x, weight, S((experts,), f32), None, None, slots)
    table = S((1000, 6), i32)
    compile_for_h100(name + "_hashed", call, x, weight, None, table, S((tokens,), i32), slots)
    weight, bias, table = (S((LAYERS, *x.shape), x.dtype) for x in (weight, S((experts,), f32), table))
    def add_weights(x, layer, weight, bias=None, table=None, ids=None):
        weights = call(x, weight, bias, table, ids, layer=layer)[1]
        return x + weights[:, :1].astype(x.dtype)
    check_not_copied(compile_for_h100(name + "_stack", looped(add_weights), x, weight, bias), weight, bias)
    def add_hashed(x, layer, weight, table, ids):
        return add_weights(x, layer, weight, None, table, ids)
    hashed = compile_for_h100(name + "_hashed_stack", looped(add_hashed), x, weight, table, S((tokens,), i32))
    check_not_copied(hashed, weight, table)
""")
    # Three blocks of 128 threads a multiprocessor.
    assert max(used.values()) <= 168, used


def test_what_the_kernel_does_not_take_is_refused(untyped):
    x, weight, bias, *_ = operands(2, 512, 128)
    call = functools.partial(ops.router, top_k=TOP_K, scaling_factor=1.0, implementation="interpret")
    with pytest.raises(NotImplementedError, match="takes x as bfloat16"):
        call(x.astype(jnp.float32), weight, bias)
    with pytest.raises(NotImplementedError, match="128, 256, .. or 1024 experts, got 100"):
        call(x, weight[:100], bias[:100])
    with pytest.raises(ValueError, match="either bias, or table and token_ids must be given, got none of them"):
        call(x, weight)
    ids = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="top_k=6 must be 4, the number of experts that the table has"):
        call(x, weight, None, jnp.zeros((9, 4), jnp.int32), ids)
    options = dict(top_k=TOP_K, scaling_factor=1.0, interpret=True)
    with pytest.raises(NotImplementedError, match="1 to 256 tokens, got 258"):
        router(jnp.concatenate([x] * 129), weight, bias, **options)
    with pytest.raises(NotImplementedError, match="takes weight as float32.any, any, 512., got float32.128, 512."):
        router(x, weight, bias, layer=jnp.int32(0), **options)
    with pytest.raises(NotImplementedError, match=r"takes layer as int32.., got int32.1."):
        router(x, weight[None], bias[None], layer=jnp.zeros(1, jnp.int32), **options)
