"""A hit, a fork, a cut and a restored request of the tiny model: the bytes and logits of one that ran cold."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.decode import decode_step
from dsv4_jax.host import KVCacheManager, PrefixCache, PrefixFiles, load_request, offload, resume, save_request
from dsv4_jax.host.offload import capture
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.ops.pools import same_bytes
from tests.paths import TINY
from tests.v41 import v41_config


IDS = np.random.default_rng(0).integers(0, 160, 70).tolist()
OTHER = np.random.default_rng(1).integers(0, 160, 70).tolist()


class Runs:
    """A model with a cache; every step has one shape, so that there is one program."""

    def __init__(self, model, **sizes):
        defaults = dict(num_blocks=24, max_requests=4, max_context=96, block_tokens=16, max_query_tokens=3)
        self.manager = KVCacheManager(model.config, dtype=model.lm_head.weight[...].dtype, **defaults | sizes)
        self.cache = self.manager.init_cache()
        self.model = model
        self.prefix = PrefixCache(self.manager, key="tiny", debug=True)

    def feed(self, tokens, observe=False):
        """Runs {slot: ids} side by side, one token each a step; {slot: logits [n, vocab]}."""
        logits = {slot: [] for slot in tokens}
        for i in range(max(map(len, tokens.values()))):
            now = {slot: ids[i : i + 1] for slot, ids in tokens.items() if i < len(ids)}
            out, self.cache = decode_step(self.model, self.cache, self.manager.prepare_forward(now))
            for slot in now:
                logits[slot].append(np.asarray(out[slot]))
                if observe:
                    self.prefix.observe(self.cache, slot, IDS)
        return {slot: np.stack(rows) for slot, rows in logits.items()}

    def admit(self, ids):
        slot, hit, self.cache = self.prefix.admit(self.cache, ids)
        return slot, hit

    def bytes(self, slot):
        """All live bytes of a request that can still be rewound as far as one that ran cold to the end of IDS."""
        request = capture(self.manager, self.cache, slot, key="tiny")
        assert (request.length, request.min_length) == (70, 68)
        return request.rows, request.blocks


FORMATS = ["v4", "v41", *(pytest.param(name, marks=pytest.mark.slow) for name in ("per_entry", "plain"))]


@pytest.fixture(scope="module", params=FORMATS)
def cold(request):
    """(model, format, runs in which slot 0 ran cold through IDS and is cached, its logits, its bytes).

    The model is V4.1's small one in V4.1's format.
    """
    dtype = jnp.float32 if request.param == "plain" else jnp.bfloat16
    if request.param == "v41":
        model = DeepseekV4ForCausalLM(v41_config(), dtype)
    else:
        model = load_checkpoint(TINY, dtype=dtype)
    runs = Runs(model, kv_format=request.param)
    slot, hit = runs.admit(IDS)
    assert (slot, hit) == (0, 0)
    logits = runs.feed({0: IDS}, observe=True)[0]
    return model, request.param, runs, logits, jax.device_get(runs.bytes(0))


@pytest.fixture
def runs(cold):
    """The same runs for each test, which leaves slot 0 and what is cached alone."""
    runs = cold[2]
    programs = decode_step._cache_size()
    yield runs
    assert decode_step._cache_size() == programs, "what moves requests gave the next step another argument type"
    for slot in runs.manager.slots[1:]:
        runs.manager.release(slot)
    same_bytes(runs.bytes(0), cold[4])
    runs.prefix.check(runs.cache)


def test_a_hit_is_as_if_it_had_run_cold(cold, runs):
    *_, logits, want = cold
    for prompt_length, hit in ((70, 64), (63, 48), (17, 16)):
        slot, found = runs.admit(IDS[:prompt_length])
        assert found == hit
        chex.assert_trees_all_equal(runs.feed({slot: IDS[hit:]})[slot], logits[hit:])
        same_bytes(runs.bytes(slot), want)
        runs.manager.release(slot)


def test_children_and_parent_do_not_see_each_other(cold, runs):
    *_, logits, want = cold
    parent, _ = runs.admit(IDS[:33])
    runs.feed({parent: IDS[32:45]})
    (same, other), runs.cache = runs.manager.fork(runs.cache, parent, 2)
    out = runs.feed({same: IDS[45:], other: OTHER[45:], parent: IDS[45:60]})
    chex.assert_trees_all_equal(out[same], logits[45:])
    chex.assert_trees_all_equal(out[parent], logits[45:60])
    same_bytes(runs.bytes(same), want)
    assert (out[other] != logits[45:]).any()
    chex.assert_trees_all_equal(runs.feed({parent: IDS[60:]})[parent], logits[60:])
    same_bytes(runs.bytes(parent), want)


@pytest.mark.parametrize(("length", "start"), [(68, 68), (50, 48), (40, 32), (9, 0)])
def test_a_cut_request_never_went_further(cold, runs, length, start):
    *_, logits, want = cold
    slot, hit = runs.admit(IDS)
    # It goes on with other tokens behind `length`, far enough to overwrite every ring row.
    runs.feed({slot: IDS[hit:]})
    got, runs.cache = runs.manager.truncate(runs.cache, slot, length)
    assert got == start
    runs.feed({slot: [*IDS[start:length], *OTHER[length:]]})
    got, runs.cache = runs.manager.truncate(runs.cache, slot, length)
    chex.assert_trees_all_equal(runs.feed({slot: IDS[got:]})[slot], logits[got:])
    same_bytes(runs.bytes(slot), want)


def test_a_request_goes_on_elsewhere(cold, runs, tmp_path):
    model, kv_format, _, logits, want = cold
    slot, _ = runs.admit(IDS)
    got, runs.cache = runs.manager.truncate(runs.cache, slot, 50)
    runs.feed({slot: IDS[got:53]})
    save_request(tmp_path / "request", runs.manager, runs.cache, slot, IDS[:53], key="tiny")
    parked, runs.cache = offload(runs.manager, runs.cache, slot)
    back, runs.cache = resume(runs.manager, runs.cache, parked)
    elsewhere = Runs(model, kv_format=kv_format)
    elsewhere.feed({elsewhere.admit(OTHER)[0]: OTHER[:20]})
    loaded, tokens, elsewhere.cache = load_request(tmp_path / "request", elsewhere.manager, elsewhere.cache, key="tiny")
    assert tokens.tolist() == IDS[:53]
    for place, number in ((runs, back), (elsewhere, loaded)):
        chex.assert_trees_all_equal(place.feed({number: IDS[53:]})[number], logits[53:])
        same_bytes(place.bytes(number), want)


def test_a_prefix_is_found_in_files_by_another_cache(cold, tmp_path):
    model, kv_format, _, logits, want = cold
    for expected in (0, 64):
        files = PrefixFiles(tmp_path, "10MB")
        runs = Runs(model, kv_format=kv_format)
        runs.prefix = PrefixCache(runs.manager, key="tiny", files=files)
        runs.prefix.get_cache = lambda runs=runs: runs.cache
        slot, hit = runs.admit(IDS)
        assert hit == expected
        chex.assert_trees_all_equal(runs.feed({slot: IDS[hit:]}, observe=True)[slot], logits[hit:])
        same_bytes(runs.bytes(slot), want)
        runs.prefix.save(runs.cache)
