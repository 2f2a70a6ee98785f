"""A forward pass takes recorded experts and selections instead of making its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import Decisions, decision_types, decode_ids, encode_ids
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.quant import FakeQuantFormat, V4Format
from tests.v41 import v41_config


# A loop of two layers between single ones. Selections have two widths, and the last layer takes an earlier one's.
SPECS = [LayerSpec.csa(), *[LayerSpec.csa(index_topk=3)] * 2, LayerSpec.csa(selection=2)]
CONFIGS = {
    "v4": DSV4Config.small(SPECS, index_topk=5, mlp_layer_types=("hash_moe", "moe", "moe", "moe")),
    "v41": v41_config(),
}
LENGTHS = 41, 23
LONGEST = max(LENGTHS)
NAMES = "experts", "selection"


@pytest.fixture(scope="module", params=["v4", pytest.param("v41", marks=pytest.mark.slow)])
def model(request):
    return DeepseekV4ForCausalLM(CONFIGS[request.param], jnp.float32, rngs=nnx.Rngs(0))


def perturbed(model, scale=0.1):
    """Returns the model with other weights, which decide otherwise for some tokens."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [x * (1 + scale * jax.random.normal(key, x.shape, x.dtype)) for x, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(structure, noisy), rest)


def sequences(config):
    rng = np.random.default_rng(0)
    return [rng.integers(config.vocab_size - 1, size=length) for length in LENGTHS]


def make_manager(config, **options):
    sizes = {"num_blocks": 8, "max_requests": 2, "max_context": 64, "block_tokens": 16, "dtype": jnp.float32}
    return KVCacheManager(config, **sizes | options)


@jax.jit
def step(model, cache, batch):
    hidden, _, decisions, cache = model.forward_decisions(cache, batch)
    return hidden, decisions, cache


def run(model, chunk=LONGEST, given=None, **options):
    """Runs both sequences in chunks.

    Args:
      model: the model.
      chunk: maximum number of tokens of a sequence in a call.
      given: Decisions [2, N, ...] to take; None = the model's own.
      options: of the manager.

    Returns:
      (hidden states of the last call's tokens, Decisions [2, N, ...] that were taken, the cache).
    """
    manager = make_manager(model.config, **options)
    cache = manager.init_cache()
    slots = [manager.admit() for _ in LENGTHS]
    made = [[] for _ in LENGTHS]
    for start in range(0, LONGEST, chunk):
        parts = [ids[start : start + chunk] for ids in sequences(model.config)]
        tokens = {slot: ids for slot, ids in zip(slots, parts, strict=True) if len(ids)}
        batch = manager.prepare_forward(tokens, prefill_size=sum(min(chunk, n) for n in LENGTHS), decode_size=0)
        batch = batch if given is None else batch.with_decisions(given)
        hidden, decisions, cache = step(model, cache, batch)
        for slot, items in zip(slots, made, strict=True):
            items.append(jax.tree.map(np.asarray, decisions)[np.asarray(batch.slots) == slot])
    whole = [jax.tree.map(lambda *parts: np.concatenate(parts), *items) for items in made]
    return hidden[batch.slots >= 0], Decisions.padded(whole, LONGEST), cache


def assert_equal(x, y):
    jax.tree.map(np.testing.assert_array_equal, x, y)


def differ(x, y, name):
    return (getattr(x, name) != getattr(y, name)).any()


@pytest.fixture(scope="module")
def rollout(model):
    """Decisions [2, N, ...] of the model, made in chunks."""
    return run(model, chunk=7)[1]


def test_codes_are_what_the_layers_record(model, rollout):
    """Also in the order of the layers, and for each layer that selects entries."""
    manager = make_manager(model.config)
    (ids, _) = sequences(model.config)
    batch = manager.prepare_forward({manager.admit(): ids}, prefill_size=len(ids))
    _, recorded, _ = jax.jit(lambda *args: model.record(*args, NAMES))(manager.init_cache(), batch)
    selecting = [spec.layer for spec in model.config.layers if spec.selects]
    for name, layers in {"experts": range(model.config.num_hidden_layers), "selection": selecting}.items():
        ids = decode_ids(getattr(rollout, name)[0])
        assert ids.shape[1] == len(layers) and sorted(recorded[name]) == sorted(layers)
        for row, layer in enumerate(layers):
            values = np.asarray(recorded[name][layer])
            np.testing.assert_array_equal(ids[:, row, : values.shape[1]], values)
            assert (ids[:, row, values.shape[1] :] == -1).all()
    assert (rollout.experts[1, LENGTHS[1] :] == 0).all() and (rollout.selection[1, LENGTHS[1] :] == 0).all()


def test_another_forward_takes_what_was_recorded(model, rollout):
    """Weights are others, so that experts and selections would be others, too, if they were not given.

    What is not given is None in one model, and codes of nothing in the other.
    """
    pupil = perturbed(model)
    hidden, own, _ = run(pupil)
    assert differ(own, rollout, "experts") and differ(own, rollout, "selection")
    replayed, taken, _ = run(pupil, given=rollout)
    assert_equal(taken, rollout)
    assert_equal(run(pupil, chunk=7, given=rollout)[1], rollout)
    for name, other in (NAMES, NAMES[::-1]):
        nothing = None if model.config == CONFIGS["v4"] else np.zeros_like(getattr(rollout, other))
        outputs, taken, _ = run(pupil, given=dataclasses.replace(rollout, **{other: nothing}))
        np.testing.assert_array_equal(getattr(taken, name), getattr(rollout, name))
        assert differ(taken, rollout, other)
        assert (outputs != replayed).any() and (outputs != hidden).any()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v4"], indirect=True)
def test_a_forward_in_bfloat16_takes_what_was_recorded_in_float32(model, rollout):
    rounded = DeepseekV4ForCausalLM(model.config, jnp.bfloat16, rngs=nnx.Rngs(0))
    options = {"kv_format": "plain", "dtype": jnp.bfloat16}
    own = run(rounded, **options)[1]
    assert differ(own, rollout, "experts") and differ(own, rollout, "selection")
    assert_equal(run(rounded, given=rollout, **options)[1], rollout)


def test_tokens_without_recorded_decisions_make_their_own(model, rollout):
    """Some of them, as after a prefix hit; or all of them, which changes no bit."""
    pupil = perturbed(model)
    hidden, own, cache = run(pupil)
    nothing = jax.tree.map(np.zeros_like, rollout)
    assert_equal(run(pupil, given=nothing), (hidden, own, cache))

    short = jax.tree.map(np.copy, rollout[:, :30])  # tokens behind it have no row
    for codes in jax.tree.leaves(short):
        codes[:, :10] = 0
    _, taken, _ = run(pupil, given=short)
    for name in NAMES:
        mixed, recorded, plain = (getattr(x, name) for x in (taken, rollout, own))
        np.testing.assert_array_equal(mixed[:, 10:30], recorded[:, 10:30])
        np.testing.assert_array_equal(mixed[:, :10], plain[:, :10])  # they see only tokens without recorded ones
        assert (mixed[0, 30:] != recorded[0, 30:]).any()


def test_a_models_own_decisions_change_no_bit(model, rollout):
    """Not of hidden states, nor of the cache."""
    hidden, own, cache = run(model, chunk=7)
    assert_equal(own, rollout)
    assert_equal(run(model, chunk=7, given=rollout), (hidden, own, cache))


@pytest.mark.slow
def test_gradients_are_those_of_the_same_decisions():
    """Routers have gradients through the weights of the experts that are given."""
    config = DSV4Config.small([LayerSpec.csa()] * 2, index_topk=5)
    model = DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0))
    manager = make_manager(config, kv_format=FakeQuantFormat(V4Format()))
    batch = manager.prepare_forward({manager.admit(): ids for ids in sequences(config)})
    cache = manager.init_cache()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    direction = jax.random.normal(jax.random.key(1), (len(batch.positions), config.hidden_size))
    direction = jnp.where((batch.slots >= 0)[:, None], direction, 0)

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            hidden, _, decisions, _ = nnx.merge(graph, params, rest).forward_decisions(cache, batch)
            return jnp.sum(hidden * direction), decisions

        return jax.grad(loss, has_aux=True)(params)

    expected, decisions = gradient(params, batch)
    found, _ = gradient(params, dataclasses.replace(batch, decisions=decisions))
    # The two programs may fuse, and so add, in other orders.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max()), found, expected)
    routers = [x for path, x in nnx.to_flat_state(found) if path[-2:] == ("gate", "weight")]
    assert routers and all((x.get_value() != 0).any() for x in routers)
    others = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), decisions)
    changed, _ = gradient(params, dataclasses.replace(batch, decisions=others))
    assert any((x != y).any() for x, y in zip(*map(jax.tree.leaves, (changed, found)), strict=True))


@pytest.mark.parametrize(
    ("config", "max_context", "experts", "selection", "num_bytes"),
    [
        (DSV4Config.v4_flash(), 1 << 17, ((43, 6), np.uint16), ((21, 512), np.uint16), 516 + 21504),
        (DSV4Config.v4_flash(), 1 << 20, ((43, 6), np.uint16), ((21, 512), np.uint32), 516 + 43008),
        (DSV4Config.v4_pro(), 1 << 17, ((61, 6), np.uint16), ((30, 1024), np.uint16), 732 + 61440),
        (DSV4Config.v41_flash(), 65535, ((40, 6), np.uint16), ((8, 512), np.uint16), 480 + 8192),
        (DSV4Config.v41_flash(mtp=True), 65536, ((40, 6), np.uint16), ((8, 512), np.uint32), 480 + 16384),
        (CONFIGS["v4"], 1023, ((4, 2), np.uint8), ((3, 5), np.uint8), 8 + 15),
        (CONFIGS["v4"], 1024, ((4, 2), np.uint8), ((3, 5), np.uint16), 8 + 30),
        (DSV4Config.small([LayerSpec.hca()], n_routed_experts=255), 64, ((1, 2), np.uint8), None, 2),
        (DSV4Config.small([LayerSpec.hca()], n_routed_experts=256), 64, ((1, 2), np.uint16), None, 4),
    ],
)
def test_bytes_of_a_token(config, max_context, experts, selection, num_bytes):
    types = decision_types(config, max_context)
    expected = {"experts": experts} if selection is None else {"experts": experts, "selection": selection}
    assert {name: (x.shape, x.dtype) for name, x in types.items()} == expected
    assert sum(np.zeros(x.shape, x.dtype).nbytes for x in types.values()) == num_bytes


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_codes_hold_all_ids_and_none(dtype):
    top = min(np.iinfo(dtype).max, np.iinfo(np.int32).max) - 1
    ids = np.array([-1, 0, 1, top], np.int32)
    assert encode_ids(ids, dtype).dtype == dtype and encode_ids(ids, dtype)[0] == 0
    np.testing.assert_array_equal(decode_ids(encode_ids(ids, dtype)), ids)


def test_padded_codes_keep_their_values():
    """The codes of engines with a small and a large `max_context` have different dtypes."""
    codes = [Decisions(selection=np.full((1, 1, 1), code, dtype)) for code, dtype in ((5, np.uint8), (300, np.uint16))]
    assert Decisions.padded(codes, 1).selection.ravel().tolist() == [5, 300]


def test_a_slot_without_a_sequence_has_no_decisions():
    config = DSV4Config.small([LayerSpec.hca(16)])
    manager = make_manager(config, max_requests=3)
    batch = manager.prepare_forward({manager.admit(): [1, 2] for _ in range(3)})
    codes = np.arange(1, 5, dtype=np.uint8).reshape(2, 2, 1, 1)
    taken = batch.with_decisions(Decisions(experts=codes)).decisions.experts
    expected = {(0, 0): 1, (0, 1): 2, (1, 0): 3, (1, 1): 4}
    places = zip(np.asarray(batch.slots).tolist(), np.asarray(batch.positions).tolist(), strict=True)
    assert taken[:, 0, 0].tolist() == [expected.get(place, 0) for place in places]


def test_refuses_requests_without_decisions(untyped):
    recorded = Decisions(experts=np.zeros((3, 2, 2), np.uint8))
    assert Decisions.padded([recorded, recorded[:1]], 2).experts.shape == (2, 2, 2, 2)
    with pytest.raises(ValueError, match=r"sequences\[1\] are None: make the engine with record_decisions"):
        Decisions.padded([recorded, None], 2)


def test_refuses_decisions_of_another_batch_or_model():
    config = DSV4Config.small([LayerSpec.csa(), LayerSpec.csa()])
    model = DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0))
    manager = make_manager(config)
    batch = manager.prepare_forward({manager.admit(): [1, 2, 3]})
    cache = manager.init_cache()
    with pytest.raises(ValueError, match=r"names=\['expert'\] are unknown; known: experts, selection"):
        model.forward_decisions(cache, batch, ("expert",))

    def call(**fields):
        return jax.eval_shape(model, cache, dataclasses.replace(batch, decisions=Decisions(**fields)))

    with pytest.raises(ValueError, match=r"decisions.experts must be \[4, 2, 2\], got \[3, 2, 2\]"):
        call(experts=np.zeros((3, 2, 2), np.uint8))
    with pytest.raises(ValueError, match=r"decisions.selection must be \[4, 2, 16\], got \[4, 1, 16\]"):
        call(selection=np.zeros((4, 1, 16), np.uint8))
    with pytest.raises(ValueError, match="decisions.experts must be unsigned codes, got int32: encode_ids makes them"):
        call(experts=np.zeros((4, 2, 2), np.int32))
    model = DeepseekV4ForCausalLM(DSV4Config.small([LayerSpec.hca(16)]), jnp.float32, rngs=nnx.Rngs(0))
    manager = make_manager(model.config)
    batch = manager.prepare_forward({manager.admit(): [1, 2, 3]})
    cache = manager.init_cache()
    with pytest.raises(ValueError, match="decisions.selection must be None: no layer of the model selects entries"):
        call(selection=np.zeros((4, 1, 16), np.uint8))
