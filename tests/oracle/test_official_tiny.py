"""bfloat16 parity with the released code (see the oracle's README): format "v4", per layer, the golden's own inputs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config.layer_spec import CSA, SLIDING
from tests.oracle.layers import entries, reader, run_layer
from tests.paths import DATA, TINY


RUNS = {"prefill": [75], "decode21": [21] + [1] * 54}
WINDOW = 8


@pytest.fixture(scope="module")
def golden():
    return np.load(DATA / "official_tiny" / "golden.npz")


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(TINY, dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def outcome(model, golden):
    """Layers by (run, layer), run once each."""
    done = {}

    def of(run, layer):
        if (run, layer) not in done:
            given = golden[f"{run}_topk_{layer}"] if f"{run}_topk_{layer}" in golden else None
            done[run, layer] = run_layer(
                model, layer, golden[f"{run}_attn_in_{layer}"], RUNS[run],
                kv_format="v4", dtype=jnp.bfloat16, given=given,
            )  # fmt: skip
        return done[run, layer]

    return of


# The other run begins with a prefill too, of 21 tokens.
CASES = [pytest.param(run, i, marks=[pytest.mark.slow] * (run == "prefill")) for run in RUNS for i in range(5)]
cases = pytest.mark.parametrize(("run", "layer"), CASES)


def almost_equal(got, want, step):
    """At least 99.9 % of the values equal, the rest one step of the grid apart (a product on a rounding border)."""
    got = np.asarray(got, np.float32)
    want = np.asarray(want, np.float32)
    differ = got != want
    assert differ.mean() <= 1e-3, f"{differ.mean():.2%} differ"
    assert (np.abs(got - want) <= step(np.maximum(np.abs(got), np.abs(want)))).all()


def fp8_step(magnitude):
    """One e4m3 step relative to the value, or one of the subnormal steps of a block whose largest value is 448."""
    return np.maximum(magnitude * 2.0**-3, 2.0**-9)


def bf16_step(magnitude):
    return magnitude * 2.0**-7


@cases
def test_ring(model, golden, outcome, run, layer):
    cache = outcome(run, layer)[2]
    rows = jax.tree.map(lambda x: x[layer], cache.swa)
    got = np.asarray(cache.schema.window_codec.decode(rows, jnp.bfloat16), np.float32)
    want = golden[f"{run}_kv_cache_{layer}"][:, :WINDOW]
    almost_equal(got[..., :64], want[..., :64], fp8_step)
    almost_equal(got[..., 64:], want[..., 64:], bf16_step)


@cases
def test_entries_and_keys(model, golden, outcome, run, layer):
    kind = model.config.layer_types[layer]
    if kind == SLIDING:
        return
    handle = reader(outcome(run, layer)[2], layer)
    view = handle.read_classical_view()
    count = 75 // model.config.compress_rate(layer)
    want = golden[f"{run}_kv_cache_{layer}"][:, WINDOW : WINDOW + count]
    got = np.asarray(view.codec.decode(entries(view, count), jnp.bfloat16), np.float32)
    almost_equal(got[..., :64], want[..., :64], fp8_step)
    almost_equal(got[..., 64:], want[..., 64:], bf16_step)
    if kind == CSA:
        view = handle.read_indexer_view()
        keys = view.codec.decode(entries(view, count))
        # One step of the e2m1 grid: 0.5 of a scale where a third of the block's largest value is 2 at least.
        almost_equal(keys, golden[f"{run}_index_kv_cache_{layer}"][:, :count], lambda m: np.maximum(m, 0.5))


@cases
def test_states(model, golden, outcome, run, layer):
    """Only rows that a later window reads mean anything; the golden keeps them at fixed rows, we by position."""
    kind = model.config.layer_types[layer]
    cache = outcome(run, layer)[2]
    if kind == SLIDING:
        return
    rate = model.config.compress_rate(layer)
    opened = 75 // rate * rate
    spec = cache.schema.layers[layer]
    index = spec.index
    group = cache.groups[spec.group]
    for prefix, state in {"": group.state, "index_": group.key_state}.items():
        if state is None:
            continue
        for name, array in ((f"{prefix}kv_state", state.kv), (f"{prefix}score_state", state.gate)):
            array = np.asarray(array[index])
            want = golden[f"{run}_{name}_{layer}"]
            ring = array.shape[1]
            for p in range(opened, 75):
                row = (rate if kind == CSA else 0) + p % rate
                chex.assert_trees_all_close(array[:, p % ring], want[:, row], rtol=0, atol=5e-6)
            if kind == CSA:
                half = array.shape[2] // 2
                for p in range(opened - rate, opened):
                    got = array[:, p % ring, :half]
                    chex.assert_trees_all_close(got, want[:, p % rate, :half], rtol=0, atol=5e-6)


@cases
def test_selection_follows_the_band_rule(model, golden, outcome, run, layer):
    if model.config.layer_types[layer] != CSA:
        return
    selected = outcome(run, layer)[1]["topk"]
    scores = golden[f"{run}_index_score_{layer}"]
    k = model.config.index_topk
    for row in range(2):
        for t in range(75):
            visible = (t + 1) // 4
            mine = set(selected[row, t][selected[row, t] >= 0])
            assert len(mine) == min(k, visible) and all(s < visible for s in mine)
            if visible <= k:
                continue
            theta = np.sort(scores[row, t, :visible])[-k]
            tolerance = 2.0**-6 * 2.0 ** np.floor(np.log2(max(abs(theta), 1e-30)))
            must = set(np.flatnonzero(scores[row, t, :visible] > theta + tolerance))
            may = set(np.flatnonzero(scores[row, t, :visible] >= theta - tolerance))
            assert must <= mine <= may


@cases
def test_attention_output(model, golden, outcome, run, layer):
    """With the golden's selection. The q norm is in float32, rounded once: two bf16 steps at values of 2 to 4."""
    difference = np.abs(outcome(run, layer)[0] - golden[f"{run}_attn_out_{layer}"])
    assert difference.max() <= 3.2e-2
    assert difference.mean() <= 3e-3
