"""Small models and one geometry for all decode tests: programs compile once per process."""

import functools

import pytest

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import BlockAllocator, KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.paths import TINY
from tests.v41 import v41_config


@functools.cache
def small_model(name):
    """(model, configuration): one layer of each kind and random weights; programs of the engine compile in seconds."""
    config = DSV4Config.from_hf(TINY).first_layers(3) if name == "v4" else v41_config(drafts=name == "v41 drafts")
    return CompiledModel(DeepseekV4ForCausalLM(config)), config


@pytest.fixture(scope="session")
def small(request):
    """The small model like V4, or in tests with the marks below the one like V4.1, too."""
    return small_model(getattr(request, "param", "v4"))


EVERY_MODEL = pytest.mark.parametrize("small", ["v4", "v41"], indirect=True, scope="session")
EVERY_MODEL_SLOWLY = pytest.mark.parametrize(
    "small", ["v4", pytest.param("v41", marks=pytest.mark.slow)], indirect=True, scope="session"
)


@pytest.fixture(scope="session")
def model(small):
    return small[0].module


@pytest.fixture(scope="session")
def one_layer():
    """For tests of what surrounds the layers."""
    return DeepseekV4ForCausalLM(DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()]))


@pytest.fixture
def manager(model):
    return make_manager(model.config)


def make_manager(config):
    return KVCacheManager(config, num_blocks=12, max_requests=3, max_context=96, block_tokens=16)


@pytest.fixture(scope="session")
def wide(small):
    """wide() -> a manager in whose cache three requests have all the blocks they can use, and drafts spare rows.

    wide(n) has n blocks to give: the geometry, and so the compiled programs, are the same.
    """

    def make(free=36):
        sizes = dict(max_requests=3, max_context=192, block_tokens=16, max_query_tokens=4)
        manager = KVCacheManager(small[1], num_blocks=36, **sizes)
        manager.requests.allocator = BlockAllocator(free)
        return manager

    return make


@pytest.fixture
def roomy(wide):
    return wide()


@pytest.fixture
def tight(wide):
    """Blocks for little more than one long request."""
    return wide(13)
