"""The experts' kernel for many tokens against float64: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.experts.grouped_experts import Config, grouped_experts
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import check_kernel
from tests.pallas_kernels.test_experts import LIMIT, check, compare, layers_of, operands, stored, without_some_experts


def run(x, selected, weights, gate_up, down, *, implementation, config=None):
    """The kernel alone, also for few tokens, and the sum over each token's experts."""
    matrices = [stored(weight) for weight in (gate_up, down)]
    options = dict(limit=LIMIT, config=config, interpret=implementation == "interpret")
    y = grouped_experts(x, selected, weights, *matrices, **options)
    here = (selected >= 0) & (selected < gate_up.shape[0])
    return jnp.sum(jnp.where(here[..., None], y.astype(jnp.float32), 0.0), axis=1)


@pytest.mark.parametrize(
    ("inner", "kind", "tile_pairs"),
    # Codes of two steps travel together where a tile of four warpgroups has more than 64 pairs.
    [
        pytest.param(512, "FP4", 16, marks=pytest.mark.slow),
        (256, "FP4", 16),
        (256, "BF16", 16),
        pytest.param(256, "FP4", 96, marks=pytest.mark.slow),
        # All scales of a tile travel together; the last warpgroups of gate and up have no channels.
        (192, "FP4", 16),
        pytest.param(768, "FP4", 96, marks=pytest.mark.slow),
    ],
)
def test_interpreted(inner, kind, tile_pairs):
    x, _, *others = operands(18, 1, 3, 512, inner, kind)
    # One expert has more pairs than a tile, and one none.
    selected = jnp.asarray([[1]] * 17 + [[2]], jnp.int32)
    config = Config(tile_pairs, warpgroups=4)
    compare("interpret", x, selected, *others, run=functools.partial(run, config=config))


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_pairs_without_an_expert_here_add_nothing(implementation):
    x, selected, *others = operands(4, 2, 2, 512, 512)
    compare(implementation, x, without_some_experts(selected), *others, run=run)


def test_tiles_are_for_the_pairs_that_have_an_expert_here(monkeypatch):
    """Of 4 tokens' 8 pairs, the 2 experts of this device get a quarter, if there are 8 experts."""
    chosen = []
    monkeypatch.setattr(Config, "heuristic", lambda *sizes: chosen.append(sizes) or Config(16, warpgroups=4))
    x, selected, weights, *matrices = operands(4, 2, 2, 512, 512)
    call = functools.partial(grouped_experts, x, selected, weights, *map(stored, matrices[:2]), limit=LIMIT)
    for total in (None, 8):
        jax.eval_shape(functools.partial(call, total_experts=total, interpret=True))
    assert chosen == [(8, 2), (8, 8)]


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["FP4", pytest.param("BF16", marks=pytest.mark.slow)])
def test_one_layer_of_a_stack(implementation, kind):
    x, selected, weights, *_ = operands(2, 1, 3, 512, 256)

    def run(matrices, **layer):
        gate_up, down = map(stored, matrices[0])
        options = dict(limit=LIMIT, config=Config(16, warpgroups=4), interpret=implementation == "interpret")
        return grouped_experts(x, selected, weights, gate_up, down, **layer, **options)

    check_kernel(run, list(layers_of(3, 512, 256, kind)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
@pytest.mark.parametrize("tokens", [9, 100])
def test_on_gpu(tokens, kind):
    compare("mosaic_gpu", *operands(tokens, 6, 32, 1024, 512, kind, shared=5), run=run)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
@pytest.mark.parametrize("tokens", [480, 700, 3000])
def test_the_op_takes_it_for_many_pairs_on_gpu(tokens, kind):
    check("mosaic_gpu", tokens, 6, 32, 1024, 512, kind, shared=5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
def test_an_eighth_of_each_expert_on_gpu(kind):
    compare("mosaic_gpu", *operands(300, 6, 32, 1024, 256, kind), run=run)


# Experts of V4.1-Flash, whole, and shared by two and four devices; tiles of all three widths of a step.
@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2304, 1152, 576])
@pytest.mark.parametrize("tokens", [100, 400, 1200])
def test_channels_in_no_multiples_of_512_on_gpu(tokens, inner):
    compare("mosaic_gpu", *operands(tokens, 6, 32, 1024, inner), run=run)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
def test_the_same_bits_every_time_on_gpu(kind):
    arrays = operands(500, 6, 32, 1024, 512, kind)
    first, second = (run(*arrays, implementation="mosaic_gpu") for _ in range(2))
    chex.assert_trees_all_equal(first, second)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import grouped_experts
S, pairs = jax.ShapeDtypeStruct, lambda rows, columns: tuple(S((256, rows, columns // n), jnp.uint8) for n in (2, 32))
for tokens in 64, 2048, 4096, 8192:
    args = S((tokens, 4096), jnp.bfloat16), S((tokens, 6), jnp.int32), S((tokens, 6), jnp.float32)
    run = functools.partial(grouped_experts, limit=7.0)
    compile_for_h100(f"experts{tokens}", run, *args, pairs(4096, 4096), pairs(4096, 2048))
    if tokens in (2048, 8192):
        weights = S((256, 4096, 4096), jnp.bfloat16), S((256, 4096, 2048), jnp.bfloat16)
        compile_for_h100(f"bf16_experts{tokens}", run, *args, *weights)
# V4.1-Flash, whole and a fourth of its experts.
for tokens, inner in (64, 576), (4096, 2304), (16384, 576):
    pairs = lambda rows, columns: tuple(S((384, rows, columns // n), jnp.uint8) for n in (2, 32))
    args = S((tokens, 5120), jnp.bfloat16), S((tokens, 6), jnp.int32), S((tokens, 6), jnp.float32)
    run = functools.partial(grouped_experts, limit=7.0)
    compile_for_h100(f"experts{tokens}x{inner}", run, *args, pairs(2 * inner, 5120), pairs(5120, inner))
""")
    # Five or three warpgroups start with as many registers each, and may not hold more together.
    assert used == {
        "experts64": 96,
        "experts2048": 96,
        "experts4096": 96,
        "experts8192": 168,
        "bf16_experts2048": 96,
        "bf16_experts8192": 168,
        "experts64x576": 96,
        "experts4096x2304": 96,
        "experts16384x576": 168,
    }, used
