"""Models whose layers have sizes of their own, or a selection of another layer."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax import DeepseekV4ForCausalLM, DSV4Config, KVCacheManager, decode_step
from dsv4_jax.config import LayerSpec


LAYERS = LayerSpec(), LayerSpec.csa(2)


@functools.cache
def logits(*specs, sliding_window=16, index_topk=16, chunks=(21, 22, 23)):
    """[4, vocab] float32 after each chunk of 24 tokens, which ends before these and the last one."""
    config = DSV4Config.small(specs, sliding_window=sliding_window, index_topk=index_topk)
    model = DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0))
    sizes = dict(num_blocks=2, max_requests=1, max_context=32, block_tokens=16, kv_format="plain", dtype=jnp.float32)
    manager = KVCacheManager(config, **sizes)
    rows = []
    cache = manager.init_cache()
    slot = manager.admit()
    for part in np.split(np.random.default_rng(0).integers(0, 200, 24), chunks):
        row, cache = decode_step(model, cache, manager.prepare_forward({slot: part}, prefill_size=21))
        rows.append(np.asarray(row[slot]))
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "index_topk"), [(5, None), (24, None), (None, 3)], ids=["shorter", "longer", "topk"]
)
def test_layers_with_sizes_of_their_own_compute_what_a_model_of_these_sizes_does(window, index_topk):
    specs = LayerSpec(window=window), LayerSpec.csa(2, window=window, index_topk=index_topk)
    sizes = dict(index_topk=index_topk) if window is None else dict(sliding_window=window)
    np.testing.assert_array_equal(logits(*specs), logits(*LAYERS, **sizes))
    assert np.abs(logits(*specs) - logits(*LAYERS)).max() > 0.01


@pytest.mark.slow
def test_layers_of_one_model_may_have_different_windows():
    others = [logits(*LAYERS), logits(*LAYERS, sliding_window=5)]
    mixed = logits(LayerSpec(window=5), LAYERS[1])
    assert min(np.abs(mixed - other).max() for other in others) > 0.01


@pytest.mark.slow
def test_an_entry_may_have_one_token():
    """Such a layer keeps no window of a compressor open; a prompt and single tokens store the same entries."""
    rows = [logits(LayerSpec.hca(1), LayerSpec.csa(1), chunks=chunks)[-1] for chunks in ((21, 22, 23), (3, 4, 5))]
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-4)  # float32 sums of programs of different shapes


@pytest.mark.parametrize(
    "spec", [LayerSpec.hca(1), LayerSpec.csa(1), LayerSpec.csa(1, overlap=False)], ids=["hca", "csa", "no overlap"]
)
def test_entries_of_one_token_in_bfloat16(spec):
    """Those that overlap pool two tokens, so they have a gate."""
    config = DSV4Config.small([spec])
    model = DeepseekV4ForCausalLM(config)
    gates = {name for name in model.model.layers[0].self_attn.input_projections.projections if "gate" in name}
    assert bool(gates) == spec.overlap
    manager = KVCacheManager(config, num_blocks=2, max_requests=1, max_context=32, block_tokens=16, kv_format="plain")
    slot = manager.admit()
    row, _ = decode_step(model, manager.init_cache(), manager.prepare_forward({slot: [1, 2, 3]}))
    assert np.isfinite(np.asarray(row[slot])).all()


@pytest.mark.parametrize("group", ["csa4", pytest.param("other", marks=pytest.mark.slow)])
def test_a_selection_of_another_layer_never_reads_what_an_earlier_request_left(group):
    """Entries of one rate exist at the same time, in whichever group: a used cache gives a clean one's logits."""
    config = DSV4Config.small([LayerSpec.csa(), LayerSpec.csa(group=group, selection=0)], index_topk=8)
    model = DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0))
    ids = np.random.default_rng(1).integers(0, 100, 20)
    rows = []
    for earlier in ([], [np.arange(64)]):
        sizes = dict(num_blocks=4, max_requests=2, max_context=128, block_tokens=32, dtype=jnp.float32)
        manager = KVCacheManager(config, **sizes)
        cache = manager.init_cache()
        for prompt in [*earlier, ids]:
            slot = manager.admit()
            row, cache = decode_step(model, cache, manager.prepare_forward({slot: prompt}, prefill_size=64))
            manager.release(slot)
        rows.append(np.asarray(row[slot]))
    np.testing.assert_array_equal(*rows)
