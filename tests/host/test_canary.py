"""The canary: any changed byte of what was cached is found when it is read, and named; what may change is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import PoolGroup
from dsv4_jax.host import CacheCorruptionError, PrefixCache
from dsv4_jax.host.offload import capture
from tests.host.managers import ids, make, random_cache, step


@pytest.fixture
def cached():
    """(manager, prefix, cache): slot 0 holds 40 tokens, two of its blocks are cached, block 2 is open."""
    manager = make()
    prefix = PrefixCache(manager, key="", debug=True)
    cache = random_cache(manager)
    slot, _, cache = prefix.admit(cache, ids(60))
    for n in (16, 16, 8):
        cache = step(manager, cache, slot, ids(n))
        prefix.observe(cache, slot, ids(60))
    prefix.check(cache)
    return manager, prefix, cache


def flip(x, *index):
    """The array with one bit of one value changed."""
    raw = np.array(x)
    raw.view(f"uint{8 * raw.dtype.itemsize}")[index] ^= 1
    return jnp.asarray(raw)


# Layer 0 is CSA, layer 1 has windows only, layer 2 is HCA.
POOLS = [("csa4", "entries", "nope", 0), ("csa4", "keys", "codes", 0), ("hca16", "entries", "rope", 2)]


@pytest.mark.parametrize(("pool", "part", "leaf", "layer"), POOLS)
def test_a_changed_block_is_named(cached, pool, part, leaf, layer):
    manager, prefix, cache = cached
    rows = getattr(cache.groups[pool], part)
    index = (0, 1, 0, 5)  # of block 1
    changed = dataclasses.replace(rows, **{leaf: flip(getattr(rows, leaf), *index)})
    bad = cache.with_groups({pool: PoolGroup(**{part: changed})})
    message = rf"block 1 \(tokens 16 to 31\) has changed in layer {layer} since it was cached"
    with pytest.raises(CacheCorruptionError, match=f"slot 1 .new.: {message}"):
        prefix.admit(bad, ids(60))
    with pytest.raises(CacheCorruptionError, match=f"slot 0: {message}"):
        prefix.check(bad, 0)
    with pytest.raises(CacheCorruptionError, match=f"slot 0: {message}"):
        capture(manager, bad, 0)
    with pytest.raises(CacheCorruptionError, match="a check of everything: block 1"):
        prefix.check(bad)
    assert manager.slots == (0,)
    # Who reads only the first block does not care.
    assert prefix.admit(bad, ids(20))[1] == 16


def test_a_changed_snapshot_is_named(cached):
    manager, prefix, cache = cached
    node = manager.requests.state(0).cached_blocks[1]
    swa = node.snapshot.swa
    node.snapshot = dataclasses.replace(node.snapshot, swa=dataclasses.replace(swa, nope=flip(swa.nope, 1, 2, 3)))
    message = "the snapshot at 32 tokens, behind block 1, has changed in layer 1"
    for call in (
        lambda: prefix.admit(cache, ids(60)),
        lambda: prefix.check(cache),
        lambda: manager.truncate(cache, 0, 35),
    ):
        with pytest.raises(CacheCorruptionError, match=message):
            call()
    assert manager.length(0) == 40


def test_what_may_change_is_not_watched(cached):
    _, prefix, cache = cached
    rows = cache.groups["csa4"].entries
    for block in (2, 7):  # open, and free
        rows = dataclasses.replace(rows, nope=flip(rows.nope, 0, block, 0, 0))
    cache = cache.with_groups({"csa4": PoolGroup(entries=rows)})
    cache = dataclasses.replace(cache, swa=jax.tree.map(lambda x: flip(x, 0, 0, 0, 0), cache.swa))
    prefix.check(cache)
    prefix.check(cache, 0)
    assert prefix.admit(cache, ids(60))[1] == 32


def test_without_debug_nothing_is_kept_or_read():
    manager = make()
    prefix = PrefixCache(manager, key="")
    cache = manager.init_cache()
    slot, _, cache = prefix.admit(cache, ids(20))
    cache = step(manager, cache, slot, ids(16))
    prefix.observe(cache, slot, ids(20))
    (node,) = manager.requests.state(slot).cached_blocks
    assert node.sums is None and node.snapshot_sums is None and node.snapshot is not None
    prefix.check(cache)
