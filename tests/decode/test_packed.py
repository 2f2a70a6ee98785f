"""A packed model is the model, in a form that calls take apart quickly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.decode import decode_step, pack
from dsv4_jax.decode.packed import unpack
from dsv4_jax.nn.linear import JoinedWeight, Linear


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


def check_joined(model, manager, atol):
    """Logits within +-4: a product's float32 sum may run in another order and then round the other way to bfloat16."""
    slots = [manager.admit() for _ in range(3)]
    for tokens in ([5, 6, 7, 8, 9], [1]):
        batch = manager.prepare_forward({slot: tokens for slot in slots})
        expected, _ = decode_step(model, manager.init_cache(), batch)
        got, _ = decode_step(pack(model, join=True), manager.init_cache(), batch)
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_a_joined_model_takes_the_same_step(model, manager):
    # Equal on the CPU where this was written; a unit in the last place elsewhere.
    check_joined(model, manager, 2**-6)


@pytest.mark.gpu
def test_a_joined_model_takes_the_same_step_on_the_gpu(model, manager):
    # Other tiles, so that many sums differ, and the layers behind carry it on.
    check_joined(model, manager, 0.1)


def test_joining_moves_every_row_to_its_place(model):
    plain, joined = pack(model), pack(model, join=True)
    assert len(joined.leaves) < len(plain.leaves)
    assert sum(leaf.nbytes for leaf in joined.leaves) == sum(leaf.nbytes for leaf in plain.leaves)
    found = 0
    for part, whole in zip(jax.tree.leaves(unpack(joined), is_leaf=_is_joined), plain.leaves, strict=True):
        found += isinstance(part, JoinedWeight)
        np.testing.assert_array_equal(_rows(part), whole)
    # Per layer: hidden (two, four or seven maps), latent (one, or two with an indexer), the shared expert's two.
    attentions = [layer.self_attn for layer in model.model.layers]
    sizes = [len(group) for attention in attentions for group in attention.same_input() if len(group) > 1]
    assert found == sum(sizes) + 2 * len(attentions)


def _is_joined(x):
    return isinstance(x, JoinedWeight)


def _rows(weight):
    if not _is_joined(weight):
        return weight
    sizes = [size for size, _ in weight.parts]
    return jnp.split(weight.matrix, np.cumsum(sizes)[:-1])[weight.index]


class Pair(nnx.Module):
    def __init__(self, first, second):
        self.maps = nnx.List([Linear(8, 4, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in (first, second)])

    def same_input(self):
        return [[*self.maps]]


def test_only_matrices_of_one_dtype_are_joined():
    assert len(pack(Pair(jnp.float32, jnp.float32), join=True).leaves) == 1
    assert len(pack(Pair(jnp.float32, jnp.bfloat16), join=True).leaves) == 2


def both(packed, x):
    return [linear(x) for linear in unpack(packed).maps]


def test_a_joined_product_is_written_once():
    """All maps of one input multiply with one and the same matrix: XLA computes equal products once."""
    packed = pack(Pair(jnp.float32, jnp.float32), join=True)
    text = jax.jit(both).lower(packed, jnp.ones((3, 8))).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") == 1, text


def test_rows_are_read_whole():
    with pytest.raises(TypeError, match=r"parameter\[...\], not parameter\[0\]"):
        JoinedWeight(jnp.ones((4, 8)), ((2, True), (2, True)), 0)[0]
