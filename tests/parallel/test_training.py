"""Gradients through a step on a mesh are those of one device."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import sharded_step
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from dsv4_jax.ops import all_reduce
from dsv4_jax.parallel.mesh import make_mesh
from pallas_kernels.all_reduce import MAX_VALUES


CONFIG = DSV4Config.small([LayerSpec.csa(4)])
TEXTS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, 12), dtype=np.int32)


@sharded_step
def token_losses(model, cache, batch):
    hidden, cache = model(cache, batch)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden[:-1]), batch.token_ids[1:])
    has_next = (batch.slots[1:] == batch.slots[:-1]) & (batch.slots[1:] >= 0)
    return jnp.pad(jnp.where(has_next, losses, 0.0), (0, 1)), cache


def loss_and_gradient(mesh, rows):
    """The mean loss of the texts, and its gradient, in a batch of `rows` tokens in each shard."""
    model = DeepseekV4ForCausalLM(CONFIG, jnp.float32, rngs=nnx.Rngs(0))
    model = model if mesh is None else jax.device_put(model, shardings(model, mesh))
    sizes = dict(num_blocks=2, max_requests=2, max_context=128)
    manager = KVCacheManager(CONFIG, **sizes, kv_format="plain", dtype=jnp.float32, mesh=mesh)
    cache = manager.init_cache()
    batch = manager.prepare_forward({manager.admit(): t for t in TEXTS}, prefill_size=rows)
    graph, floats, others = nnx.split(model, lambda _, value: value.get_value().dtype == jnp.float32, ...)

    @jax.jit
    @jax.value_and_grad
    def train(floats):
        return token_losses(nnx.merge(graph, floats, others), cache, batch)[0].sum() / (TEXTS.size - len(TEXTS))

    loss, gradient = train(floats)
    return jax.device_get((loss, gradient))


@pytest.mark.slow
def test_the_gradient_is_that_of_one_device(monkeypatch):
    """Two texts in one batch; over two shards of requests, each with padding, and two of the model.

    Also where the tokens of a shard are divided among the devices of the model.
    """
    one = loss_and_gradient(None, 24)
    assert max(np.abs(x).max() for x in jax.tree.leaves(one[1])) > 0.05
    for max_values in (MAX_VALUES, 0):
        monkeypatch.setattr(sys.modules[all_reduce.__module__], "MAX_VALUES", max_values)
        sharded = loss_and_gradient(make_mesh(dict(data=2, model=2)), 16)
        # Sums over devices have another order.
        chex.assert_trees_all_close(sharded, one, rtol=1e-4, atol=1e-5)
