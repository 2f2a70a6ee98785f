"""A packed model is the model, in a form that calls take apart quickly."""

import jax
import numpy as np

from dsv4_jax.decode import decode_step, pack


def test_a_packed_model_takes_the_same_step(model, manager):
    slot = manager.admit()
    batch = manager.prepare_forward({slot: [5]})
    expected, _ = decode_step(model, manager.init_cache(), batch)
    got, _ = decode_step(pack(model), manager.init_cache(), batch)
    np.testing.assert_array_equal(got, expected)


def test_packing_copies_nothing_and_twice_is_once(model):
    packed = pack(model)
    assert pack(packed) is packed
    assert all(a is b for a, b in zip(packed.leaves, jax.tree.leaves(model), strict=True))
    # Equal structures: models of one shape share compiled programs.
    assert jax.tree.structure(pack(model)) == jax.tree.structure(packed)
