"""Equal layers in a loop give what the same layers give one by one, and their parameters keep names of their own."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

from dsv4_jax.cache import CacheSchema, init_cache
from dsv4_jax.checkpoint.random_weights import abstract_model, random_model
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.config.layer_spec import CSA, HCA
from dsv4_jax.nn import (
    RECORDED,
    DeepseekV4ForCausalLM,
    ResidualStreams,
    StepCarry,
    parameter_views,
    stack_modules,
)
from dsv4_jax.nn.layer_runs import find_runs
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.quant import QuantizedWeight
from tests.nn.test_model import step_batch


def runs(stack):
    """Returns (period, repeats) of each loop, which follow one another."""
    numbers = [loop.run.start for loop in stack.loops]
    stops = [loop.run.stop for loop in stack.loops]
    assert [*numbers, stack.start + len(stack)] == [stack.start, *stops]
    return [(loop.run.period, loop.run.repeats) for loop in stack.loops]


def selects_every(count, layers):
    """Returns CSA layers of which every `count`-th selects entries, and those up to the next read its selection."""
    return [LayerSpec.csa(selection=layer - layer % count) for layer in range(layers)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DSV4Config.v4_flash(), [(1, 2), (1, 1), (2, 20)]),
        (DSV4Config.v4_pro(), [(1, 2), (1, 1), (2, 29)]),
        # Layers that read a layer's selection in their own period differ by the distance to it.
        (DSV4Config.small(selects_every(6, 24)), [(6, 4)]),
        # Those that read that of a layer before them all are equal.
        (DSV4Config.small(selects_every(6, 6)), [(1, 1), (1, 5)]),
        (DSV4Config.small([LayerSpec(), LayerSpec.csa(), LayerSpec.hca(), LayerSpec.csa(8)]), [(1, 1)] * 4),
    ],
    ids=["flash", "pro", "a selection in each period", "an earlier selection", "no repetition"],
)
def test_layers_are_divided_into_the_fewest_loops(config, expected):
    assert runs(DeepseekV4ForCausalLM(config, rngs=ABSTRACT).model.layers) == expected


def test_draft_layers_are_one_loop():
    model = DeepseekV4ForCausalLM(DSV4Config.v4_flash_0731(), rngs=ABSTRACT)
    assert runs(model.drafts.layers) == [(1, 3)] and model.drafts.layers.start == 43


def test_layers_that_read_another_distance_are_no_repeats():
    """The last layer reads the selection that the first made, where a repeat would read that of the third."""
    forms = [("selects", (None,)), ("reads", (0,)), ("selects", (None,)), ("reads", (0,))]
    assert [(run.period, run.repeats) for run in find_runs(forms)] == [(1, 1)] * 4
    forms[3] = ("reads", (2,))
    assert [(run.period, run.repeats) for run in find_runs(forms)] == [(2, 2)]


@given(st.text("abc", max_size=14), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_runs_cover_all_layers_with_equal_ones(forms, start):
    found = find_runs([(form, ()) for form in forms], start)
    numbers = [layer for run in found for layer in range(run.start, run.stop)]
    assert numbers == [*range(start, start + len(forms))]
    for run in found:
        for position in range(run.period):
            assert len({forms[layer - start] for layer in run.layers(position)}) == 1
    assert sum(run.period for run in found) >= len(set(forms))


def test_few_arrays_for_a_released_model():
    config = DSV4Config.v4_flash()
    assert len(jax.tree.leaves(abstract_model(config))) <= 150


@pytest.fixture(scope="module")
def repeating(config):
    """Five layers in two loops; the last one repeats, with a period of two."""
    csa = config.specs[config.layer_types.index(CSA)]
    hca = config.specs[config.layer_types.index(HCA)]
    layers = [LayerSpec(), *[LayerSpec.hca(hca.compress_rate), LayerSpec.csa(csa.compress_rate)] * 2]
    return config.with_layers(layers, ["hash_moe"] + ["moe"] * 4)


@pytest.fixture(scope="module")
def model(repeating):
    model = DeepseekV4ForCausalLM(repeating)
    assert runs(model.model.layers) == [(1, 1), (2, 2)]
    return model


def fresh_cache(config, **options):
    return init_cache(CacheSchema(config, num_blocks=2, max_requests=2, max_context=64, block_tokens=32, **options))


BATCHES = step_batch(0, 21, -1, [(0, 0, 1)]), step_batch(21, 1, -1)


record = jax.jit(DeepseekV4ForCausalLM.record, static_argnames=("names", "layers"))


@jax.jit
def run_layer(layer, residual, cache, batch, carry):
    return layer(residual, cache, batch, carry, record=RECORDED)


def one_by_one(model, cache, batch, layers, run=run_layer):
    """Does `model.record` with layers that have parameters of their own, each called by itself."""
    cache = cache.begin_step(batch)
    x = model.embed(batch)
    residual = ResidualStreams.begin(jnp.broadcast_to(x[:, None, :], (len(x), model.config.hc_mult, x.shape[1])))
    carry = StepCarry()
    recorded = {name: {} for name in RECORDED}
    for number, layer in enumerate(layers):
        residual, carry, cache = run(layer, residual, cache, batch, carry)
        for name, value in carry.recorded.items():
            recorded[name][number] = value
    hidden, _ = model.model.hc_head.pre(residual, model.model.norm)
    return hidden, recorded, cache


def assert_equal_steps(model, layers, batches=BATCHES):
    """Compares bits of hidden states, recorded values and caches."""
    cache = expected_cache = fresh_cache(model.config)
    for batch in batches:
        hidden, recorded, cache = record(model, cache, batch)
        expected, expected_recorded, expected_cache = one_by_one(model, expected_cache, batch, layers)
        assert {name: set(values) for name, values in recorded.items()} == {
            name: set(values) for name, values in expected_recorded.items()
        }
        chex.assert_trees_all_equal(recorded, expected_recorded)
        chex.assert_trees_all_equal(hidden, expected)
        chex.assert_trees_all_equal(cache, expected_cache)


@pytest.mark.slow
def test_a_loop_gives_what_its_layers_give_one_by_one(model):
    assert_equal_steps(model, list(model.model.layers))


@pytest.mark.slow
def test_chosen_values_of_chosen_layers(model):
    cache = fresh_cache(model.config)
    _, everything, _ = record(model, cache, BATCHES[0])
    _, chosen, _ = record(model, cache, BATCHES[0], names=("streams", "selection"), layers=(1, 4))
    assert {name: set(values) for name, values in chosen.items()} == {"streams": {1, 4}, "selection": {4}}
    for name, values in chosen.items():
        for layer, value in values.items():
            chex.assert_trees_all_equal(value, everything[name][layer])
    with pytest.raises(ValueError, match=r"names=\['logits'\] are not recorded; known: streams, attention_in"):
        model.record(cache, BATCHES[0], ["logits"])
    with pytest.raises(ValueError, match=r"layers=\[-1, 7\] must be from 0 to 4"):
        model.record(cache, BATCHES[0], layers=[7, 0, -1])


def copy(model):
    """Returns a model with arrays of its own, since views donate what they write to."""
    return jax.tree.map(jnp.copy, model)


def values(model):
    return {path: view.get_value() for path, view in parameter_views(model).items()}


def assert_writes_alone(model, path, new):
    """Writes a parameter, and compares all parameters with what they were."""
    before = values(model)
    parameter_views(model)[path].set_value(new)
    chex.assert_trees_all_equal(values(model), before | {path: new})


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.mlp.gate.tid2eid",
        "model.layers.2.attn_hc.scale",
        "model.layers.3.self_attn.o_b_proj.weight",
        "model.layers.4.self_attn.input_projections.weights.indexer_gate_proj",
        "model.layers.1.self_attn.input_projections.weights.q_a_proj",
        "model.layers.4.mlp.shared_experts.gate_up_proj.weights.up_proj",
        "model.layers.2.mlp.experts.gate_up_proj",
        "lm_head.weight",
    ],
)
def test_a_view_writes_one_layer_and_one_map(model, path):
    model = copy(model)
    old = parameter_views(model)[path].read()
    assert_writes_alone(model, path, old + jnp.ones((), old.dtype))
    if path.startswith("model.layers.3"):
        weight = model.model.layers[3].self_attn.o_b_proj.weight
        chex.assert_trees_all_equal(weight[...], old + jnp.ones((), old.dtype))


def test_views_write_codes_and_scales():
    config = DSV4Config.small([LayerSpec.hca()] * 3, q_lora_rank=128)
    model = random_model(config)
    assert runs(model.model.layers) == [(1, 3)]
    assert "q_a_proj+kv_proj" in model.model.layers[1].self_attn.input_projections.weights
    rng = np.random.default_rng(0)
    for name, kind in {
        "self_attn.input_projections.weights.q_a_proj": "FP8",
        "self_attn.input_projections.weights.kv_proj": "FP8",
        "self_attn.o_b_proj.weight": "FP8",
        "mlp.experts.down_proj": "FP4",
    }.items():
        path = f"model.layers.1.{name}"
        old = parameter_views(model)[path].get_value()
        assert isinstance(old, QuantizedWeight) and old.kind == kind
        codes = jnp.asarray(rng.integers(0, 100, old.codes.shape), jnp.uint8)
        scale = jnp.asarray(rng.integers(118, 122, old.scale.shape), jnp.uint8)
        assert_writes_alone(model, path, QuantizedWeight(codes, scale, kind, old.dtype))
    with pytest.raises(ValueError, match="must be stored like the old one"):
        parameter_views(model)[path].set_value(jnp.zeros(old.shape))
    view = parameter_views(model)["model.layers.1.self_attn.o_b_proj.weight"]
    before = view.read()
    for kind in ("FP4", "FP8_32", "FP8_ROWS"):
        with pytest.raises(ValueError, match=rf"with shape \(64, 32\) as FP8; got \(64, 32\) as {kind}"):
            view.set_value(QuantizedWeight.encode(before + 1, kind))
    chex.assert_trees_all_equal(view.read(), before)


@pytest.mark.slow
def test_gradients_are_those_of_separate_layers(repeating):
    """Kept values of the forward pass and values that the backward pass computes again have the same gradients."""
    model = DeepseekV4ForCausalLM(repeating, jnp.float32)
    cache = fresh_cache(repeating, kv_format="plain", dtype=jnp.float32)
    batch = BATCHES[0]
    direction = jax.random.normal(jax.random.key(0), (len(batch.token_ids), repeating.hidden_size))
    valid = (batch.positions >= 0)[:, None]

    def loss(hidden):
        return jnp.sum(jnp.where(valid, hidden * direction, 0))

    def gradient(function, module):
        """Returns the module with gradients in place of its floating parameters."""
        graph, parameters, rest = nnx.split(module, nnx.Param, ...)
        return nnx.merge(
            graph, jax.jit(jax.grad(lambda p: loss(function(nnx.merge(graph, p, rest)))))(parameters), rest
        )

    layers = nnx.List(list(model.model.layers))
    expected = gradient(
        lambda layers: one_by_one(model, cache, batch, layers, lambda layer, *args: layer(*args))[0], layers
    )
    expected = {path: np.asarray(view.read()) for path, view in parameter_views(expected).items()}
    expected = {f"model.layers.{path}": value for path, value in expected.items() if "tid2eid" not in path}
    assert sum(value.any() for value in expected.values()) > 80
    for remat in (False, True):
        model.model.layers.remat = remat
        found = parameter_views(gradient(lambda model: model(cache, batch)[0], model))
        for path, want in expected.items():
            # Float32 sums in another order.
            limit = 1e-4 * np.abs(want).max()
            chex.assert_trees_all_close(found[path].read(), want, rtol=1e-3, atol=limit, custom_message=path)


class LowRank(nnx.Module):
    """A linear map plus one of rank 2."""

    def __init__(self, base, rngs):
        self.base = base
        rows, columns = base.weight.shape
        self.down = nnx.Param(jax.random.normal(rngs.params(), (2, columns), base.weight.dtype))
        self.up = nnx.Param(jax.random.normal(rngs.params(), (rows, 2), base.weight.dtype))

    def __call__(self, x):
        y = self.base(x)
        return y + ((x @ self.down[...].T) @ self.up[...].T).astype(y.dtype)


def replace_down_projections(model, make):
    """Puts `make(layer number, down_proj)` in the place of the shared expert's last map of the last loop's layers."""
    layers = list(model.model.layers)
    loop = model.model.layers.loops[-1]
    for position, layer in enumerate(loop.layers):
        modules = []
        for number in loop.run.layers(position):
            modules.append(make(number, layers[number].mlp.shared_experts.down_proj))
            layers[number].mlp.shared_experts.down_proj = modules[-1]
        layer.mlp.shared_experts.down_proj = stack_modules(modules)
    return layers


@pytest.mark.slow
def test_modules_of_users_in_a_loop(model):
    model = copy(model)
    layers = replace_down_projections(model, lambda number, base: LowRank(base, nnx.Rngs(number)))
    assert_equal_steps(model, layers, BATCHES[:1])


class Wrapped(nnx.Module):
    """A module whose attribute `layer` is not the number of a layer."""

    def __init__(self, layer):
        self.layer = layer


def test_a_copy_of_a_layer_keeps_submodules_of_users(model):
    model = copy(model)
    layers = replace_down_projections(model, lambda number, base: Wrapped(base))
    copied = model.model.layers[-1].mlp.shared_experts.down_proj.layer.weight
    chex.assert_trees_all_equal(copied[...], layers[-1].mlp.shared_experts.down_proj.layer.weight[...])


def test_stacked_modules_have_the_same_options():
    with pytest.raises(ValueError, match=r"modules\[2\] differ from modules\[0\] in more than the values"):
        stack_modules([nnx.Dropout(rate) for rate in (0.1, 0.1, 0.2)])


def test_a_head_of_users(model):
    model = copy(model)
    hidden = jax.random.normal(jax.random.key(0), (3, model.config.hidden_size), jnp.bfloat16)
    plain = model.logits(hidden)
    head = LowRank(model.lm_head, nnx.Rngs(0))
    model.lm_head = head
    logits = jax.jit(lambda model, hidden: model.logits(hidden))(model, hidden)
    chex.assert_trees_all_equal(logits, jax.jit(lambda head, hidden: head(hidden))(head, hidden))
    assert (logits != plain).any()


class Watched(nnx.Module):
    """A linear map that keeps the largest value of its input, and drops a half of the output."""

    def __init__(self, base, rngs):
        self.base = base
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "largest", jnp.max(jnp.abs(x)))
        return self.dropout(self.base(x))


@pytest.mark.slow
def test_state_of_modules_in_a_loop_is_kept_by_layer(model):
    """Values that a module sows, and the counters of its random numbers."""
    model = copy(model)
    layers = replace_down_projections(model, lambda number, base: Watched(base, nnx.Rngs(number)))
    cache = fresh_cache(model.config)

    @nnx.jit
    def run(model, cache, batch):
        return nnx.capture(lambda model: model(cache, batch)[0], nnx.Intermediate)(model)

    @nnx.jit
    def run_alone(model, layers, cache, batch):
        sown = {}

        def run(layer, *args):
            outputs, sown[layer.layer] = nnx.capture(lambda layer: layer(*args), nnx.Intermediate)(layer)
            return jax.lax.optimization_barrier(outputs)  # rounded after every layer, as the carry of a loop is

        return one_by_one(model, cache, batch, layers, run)[0], sown

    hidden, intermediates = run(model, cache, BATCHES[0])
    expected, sown = run_alone(model, nnx.List(layers), cache, BATCHES[0])
    chex.assert_trees_all_equal(hidden, expected)
    number = len(model.model.layers.loops) - 1
    loop = model.model.layers.loops[number]
    stacked = intermediates["model"]["layers"]["loops"][number]["layers"]
    for position, layer in enumerate(loop.layers):
        (largest,) = stacked[position]["mlp"]["shared_experts"]["down_proj"]["largest"].get_value()
        count = layer.mlp.shared_experts.down_proj.dropout.rngs.count
        for repeat, layer_number in enumerate(loop.run.layers(position)):
            own = sown[layer_number]["mlp"]["shared_experts"]["down_proj"]["largest"].get_value()
            chex.assert_trees_all_equal(largest[repeat], *own)
            alone = layers[layer_number].mlp.shared_experts.down_proj.dropout.rngs.count
            assert count[...][repeat] == alone[...] == 1
