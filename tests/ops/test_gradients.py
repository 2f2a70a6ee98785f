"""The first and second derivatives of every op, against central differences."""

import dataclasses
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import AttentionKV, CompressorInputs, CompressorWeights, HyperConnectionWeights, LinearSpec
from dsv4_jax.quant import FakeQuantFormat, V4Format
from tests.ops.pools import DIM, FORMATS, INDEX, ROPE, classical_view, indexer_view, ints, state_view, swa_view


PLAIN = FORMATS["plain"]
TOKENS = 9
SLOTS = ints([0] * 5 + [2] * 4)
POSITIONS = ints([*range(3, 8), *range(8, 12)])
INV_FREQ = jnp.asarray(0.3 ** np.arange(ROPE // 2), jnp.float32)
EPS = dict(eps=1e-6)
# They select, count or configure.
NO_GRADIENT = {
    "indexer_topk", "candidate_blocks", "candidate_entries", "candidate_lengths", "entries_at",
    "valid_lengths", "hash_multipliers",
    "ngram_rows", "model_index", "scatters_rows", "use_implementation", "with_mailboxes",
}  # fmt: skip
# Without a mesh they return their argument; tests/parallel sums on one.
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "local_rows"}


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def signs(*shape):
    """Rows about 1 or about -1."""
    return jnp.sign(normal(*shape[:-1], 1)) + normal(*shape, scale=0.1)


def filled(view):
    """Random rows in place of poison."""
    return dataclasses.replace(view, rows=jax.tree.map(lambda x: normal(*x.shape), view.rows))


def last_rows(view):
    """What this call wrote into the rings."""
    return ops.gather_swa_kv(view, SLOTS, POSITIONS, dtype=jnp.float32)[0][:, -1]


def norm_rope(q, kv, weight):
    return ops.norm_rope(q, kv, weight, POSITIONS, INV_FREQ, **EPS)


def append_swa(kv):
    return last_rows(ops.append_swa(swa_view(PLAIN), kv, SLOTS, POSITIONS))


def norm_rope_append(q, kv, weight):
    q, view = ops.norm_rope_append(swa_view(PLAIN), q, kv, weight, SLOTS, POSITIONS, INV_FREQ, **EPS)
    return q, last_rows(view)


def empty_state(dim):
    view = state_view(rate=4, overlap=True, dim=dim)
    return dataclasses.replace(view, kv=jnp.zeros_like(view.kv), gate=jnp.full_like(view.gate, -jnp.inf))


def flush(kv, gate, bias, weight, *, pool=None):
    """Two windows of one request, read back from the pool."""
    pool = classical_view(PLAIN) if pool is None else pool
    weights = CompressorWeights(bias, weight, INV_FREQ, 1e-6)
    inputs = CompressorInputs(empty_state(len(weight)), pool, kv, gate, weights)
    ((_, view),) = ops.flush([inputs], ints([0] * TOKENS), ints(range(TOKENS)), dtype=jnp.float32)
    rows, _ = view.read(ints([0, 0]), ints([0, 1]))
    return view.codec.decode(rows) if pool.codec.dim == INDEX else view.codec.decode(rows, jnp.float32)


def flush_keys(*arrays):
    return flush(*arrays, pool=indexer_view(PLAIN))


def pool_and_write(kv, gate, bias, weight):
    """`pool_windows` and `write_entries`, which together are `flush`."""
    weights = CompressorWeights(bias, weight, INV_FREQ, 1e-6)
    batch = ints([0] * TOKENS), ints(range(TOKENS))
    closed, _ = ops.pool_windows(empty_state(DIM), kv, gate, weights, *batch, dtype=jnp.float32)
    view = ops.write_entries(classical_view(PLAIN), closed, INV_FREQ)
    return view.codec.decode(view.read(ints([0, 0]), ints([0, 1]))[0], jnp.float32)


def windows(dim):
    return normal(TOKENS, 2 * dim), normal(TOKENS, 2 * dim, seed=3), normal(4, 2 * dim), 1 + normal(dim, scale=0.1)


ENTRIES, KEYS, RINGS = (filled(view(PLAIN)) for view in (classical_view, indexer_view, swa_view))


def gather_compressed_kv(rows):
    indices = ints(np.arange(TOKENS * 3).reshape(TOKENS, 3) % 5 - 1)
    return ops.gather_compressed_kv(dataclasses.replace(ENTRIES, rows=rows), indices, SLOTS, dtype=jnp.float32)[0]


def gather_all_compressed_kv(rows):
    view = dataclasses.replace(ENTRIES, rows=rows)
    return ops.gather_all_compressed_kv(view, SLOTS, POSITIONS, dtype=jnp.float32)[0]


def gather_swa_kv(rows, new_kv):
    view = dataclasses.replace(RINGS, rows=rows)
    return ops.gather_swa_kv(view, SLOTS, POSITIONS, new_kv=new_kv, dtype=jnp.float32)[0]


def indexer_scores(q, weights, rows):
    view = dataclasses.replace(KEYS, rows=rows)
    scores = ops.indexer_scores(view, q, weights, SLOTS, POSITIONS, inv_freq=INV_FREQ)
    return jnp.where(jnp.isfinite(scores), scores, 0.0)


def sparse_attention(q, sinks, new_kv, rings, entries, *, indices=None):
    window = dataclasses.replace(RINGS, rows=rings)
    compressed = dataclasses.replace(ENTRIES, rows=entries)
    kv = AttentionKV(window, compressed, indices, new_kv)
    return ops.sparse_attention(q, sinks, kv, SLOTS, POSITIONS, inv_freq=INV_FREQ)


def sparse_attention_of_selected(*arrays):
    return sparse_attention(*arrays, indices=ints(np.arange(TOKENS * 2).reshape(TOKENS, 2) % 3 - 1))


def sparse_attention_of_rings(q, sinks, rings, entries):
    return sparse_attention(q, sinks, None, rings, entries)


def add_adapters(y, x, down, up):
    numbers = ints([*range(-1, 2)] * 3)  # -1: none
    return ops.add_adapters([y], x, [down], [up], numbers, (0.5, 2.0))


def linear(x, weight, norm):
    return ops.linear(x, weight, LinearSpec((4, 2)), norm=(norm, 1e-6))


def grouped_linear(x, weight):
    return ops.linear(x, weight, LinearSpec(num_groups=2))


def linear_swiglu(x, weight):
    return ops.linear_swiglu(x, weight, 10.0)


def swiglu(gate, up):
    return ops.swiglu(gate, up, 10.0)


def router(x, weight):
    return ops.router(x, weight, jnp.linspace(0, 1, 5), top_k=2, scaling_factor=1.5).weights


def router_of_table(x, weight):
    table = ints([[0, 1], [3, 2]])
    ids = ints(np.arange(TOKENS) % 2)
    return ops.router(x, weight, None, table, ids, top_k=2, scaling_factor=1.5).weights


def experts(x, weights, gate_up, down, shared_gate_up, shared_down):
    selected = ints(np.stack([np.arange(TOKENS) % 3, np.full(TOKENS, 3)], axis=1))
    shared = shared_gate_up, shared_down
    return ops.experts(x, selected, weights, gate_up, down, None, shared, limit=10.0)


def hyper_connections(streams, fn, base, scale, weight, y, mixing):
    weights = HyperConnectionWeights(fn, base, scale, norm_eps=1e-6, hc_eps=1e-6, iterations=3)
    return ops.hyper_connections(streams, weights, weight, y, mixing)


def apply_rope(x):
    return ops.apply_rope(x, POSITIONS, INV_FREQ), ops.apply_rope(x, POSITIONS, INV_FREQ, inverse=True)


NORM = 1 + normal(DIM, scale=0.1)
QUERIES = normal(TOKENS, 2, DIM)
ATTENTION = QUERIES, normal(2), normal(TOKENS, DIM, seed=5), RINGS.rows, ENTRIES.rows
INPUTS = {
    apply_rope: (QUERIES,),
    norm_rope: (QUERIES, normal(TOKENS, DIM), NORM),
    append_swa: (normal(TOKENS, DIM),),
    norm_rope_append: (QUERIES, normal(TOKENS, DIM), NORM),
    flush: windows(DIM),
    flush_keys: windows(INDEX),
    pool_and_write: windows(DIM),
    gather_compressed_kv: (ENTRIES.rows,),
    gather_all_compressed_kv: (ENTRIES.rows,),
    gather_swa_kv: (RINGS.rows, normal(TOKENS, DIM)),
    # Products far from the ReLU's edge, on both sides.
    indexer_scores: (
        signs(TOKENS, 3, INDEX), normal(TOKENS, 3), jax.tree.map(lambda x: signs(*x.shape), KEYS.rows)
    ),
    sparse_attention: ATTENTION,
    sparse_attention_of_selected: ATTENTION,
    sparse_attention_of_rings: (*ATTENTION[:2], *ATTENTION[3:]),
    add_adapters: (normal(TOKENS, 6), normal(TOKENS, 8), normal(2, 3, 4), normal(6, 2, 3)),
    linear: (normal(TOKENS, 8), normal(6, 8), 1 + normal(8, scale=0.1)),
    grouped_linear: (normal(TOKENS, 8), normal(6, 4)),
    linear_swiglu: (normal(TOKENS, 8), normal(6, 8)),
    swiglu: (normal(TOKENS, 3), normal(TOKENS, 3, seed=1)),
    router: (normal(TOKENS, 8), normal(5, 8)),
    router_of_table: (normal(TOKENS, 8), normal(5, 8)),
    experts: (
        normal(TOKENS, 8), 1 + normal(TOKENS, 2, scale=0.1), normal(4, 6, 8), normal(4, 8, 3),
        normal(6, 8), normal(8, 3),
    ),
    hyper_connections: (
        normal(TOKENS, 2, 8), normal(8, 16), normal(8), 1 + normal(3, scale=0.1), 1 + normal(8, scale=0.1),
        normal(TOKENS, 8), 0.5 + normal(TOKENS, 8, scale=0.1),
    ),
}  # fmt: skip


def largest_difference(function, arrays, step=1e-2):
    """The largest relative difference of a gradient and central differences, over all arrays and three directions."""
    flat, tree = jax.tree.flatten(arrays)
    rng = np.random.default_rng(0)

    @jax.jit
    def terms(flat):
        return jnp.concatenate([x.ravel() for x in jax.tree.leaves(function(*jax.tree.unflatten(tree, flat)))])

    factors = jnp.asarray(rng.normal(size=terms(flat).shape), jnp.float32)
    gradient = jax.jit(jax.grad(lambda flat: jnp.sum(terms(flat) * factors)))(flat)
    worst = 0.0
    for i, (x, g) in enumerate(zip(flat, gradient, strict=True)):
        assert np.any(g), f"array {i} has no gradient"
        for _ in range(3):
            direction = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
            ahead, behind = (terms([*flat[:i], x + sign * step * direction, *flat[i + 1 :]]) for sign in (1, -1))
            # Summed in float64, so that only the terms' own rounding is left.
            change = np.dot(np.asarray(ahead, np.float64) - np.asarray(behind, np.float64), factors) / (2 * step)
            expected = np.vdot(np.asarray(g, np.float64), direction)
            worst = max(worst, abs(change - expected) / np.linalg.norm(g))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("function", INPUTS, ids=lambda function: function.__name__)
def test_gradients_are_those_of_finite_differences(function):
    # The step leaves third derivatives times 1e-4, and float32 divided by 1e-2.
    assert largest_difference(function, INPUTS[function]) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("function", INPUTS, ids=lambda function: function.__name__)
def test_second_derivatives_are_those_of_finite_differences(function):
    """A Hessian-vector product, forward over reverse, against central differences of the gradient."""
    flat, tree = jax.tree.flatten(INPUTS[function])
    rng = np.random.default_rng(0)
    step = 1e-2
    direction = [jnp.asarray(rng.normal(size=x.shape) / np.sqrt(x.size), jnp.float32) for x in flat]

    @jax.jit
    @jax.grad
    def gradient(flat):
        results = jax.tree.leaves(function(*jax.tree.unflatten(tree, flat)))
        return sum(jnp.sum(normal(*y.shape) * y * y) for y in results)

    product = jax.jit(lambda flat: jax.jvp(gradient, (flat,), (direction,))[1])(flat)
    ahead, behind = (gradient([x + sign * step * d for x, d in zip(flat, direction, strict=True)]) for sign in (1, -1))
    for i, (found, high, low) in enumerate(zip(product, ahead, behind, strict=True)):
        expected = (np.asarray(high, np.float64) - np.asarray(low, np.float64)) / (2 * step)
        # The step leaves third derivatives times 1e-4, and the gradient's float32 rounding divided by 1e-2.
        assert np.linalg.norm(found - expected) <= 2e-3 * np.linalg.norm(expected) + 1e-6, f"array {i}"


def test_router_weights_have_derivatives_where_softplus_underflows():
    """`softplus` of a logit below about -88 is 0 in float32, where the slope of a square root is infinite."""
    logits = np.asarray([-200.0, -95.0, -70.0, -21.0, -19.0, -1.0, 0.0, 5.0, 90.0], np.float32)

    def weight(logit):
        """The first of two experts' weight: its score over the sum of both. The other's logit is 0."""
        matrix = jnp.stack([logit, jnp.zeros_like(logit)])[:, None]
        options = dict(top_k=2, scaling_factor=1.0)
        return ops.router(jnp.ones((1, 1)), matrix, None, ints([[0, 1]]), ints([0]), **options).weights[0, 0]

    z = logits.astype(np.float64)
    score = np.sqrt(np.logaddexp(0, z))
    other = np.sqrt(np.log(2))
    sigmoid = 1 / (1 + np.exp(-z))
    slope = sigmoid / (2 * score)
    curvature = sigmoid * (1 - sigmoid) / (2 * score) - sigmoid**2 / (4 * score**3)
    total = score + other
    expected = [
        score / total,
        other * slope / total**2,
        other * (curvature * total - 2 * slope**2) / total**3,
    ]
    for function, want in zip([weight, jax.grad(weight), jax.grad(jax.grad(weight))], expected, strict=True):
        found = jax.jit(jax.vmap(function))(logits)
        # In float32 a score below the square root of the least positive number is 0, and so are its derivatives.
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-19)


def test_no_op_is_missing():
    functions = {name for name, value in vars(ops).items() if inspect.isfunction(value)}
    together = {"pool_windows", "write_entries"}  # in pool_and_write
    tested = {function.__name__ for function in INPUTS}
    assert functions - tested == NO_GRADIENT | COLLECTIVES | together


@pytest.mark.slow
def test_bytes_have_no_gradient():
    """Entries of "v4" are bytes: a gradient passes through their RoPE dims, which are bfloat16."""
    gradients = {}
    for name, fmt in dict(bytes=V4Format(), straight_through=FakeQuantFormat(), plain=PLAIN).items():

        def loss(kv, fmt=fmt):
            return jnp.sum(flush(kv, *windows(DIM)[1:], pool=classical_view(fmt)) * normal(2, DIM))

        value, gradients[name] = jax.jit(jax.value_and_grad(loss))(windows(DIM)[0])
    chex.assert_trees_all_close(gradients["straight_through"], gradients["plain"], rtol=0, atol=1e-5)
    assert np.abs(gradients["bytes"] - gradients["plain"]).max() > 1e-2
