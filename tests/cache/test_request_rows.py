"""The functions that move a request's bytes: in place, nothing of others comes along, nothing else is touched."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import KVCache, request_rows
from tests.cache.reference import poisoned_cache
from tests.host.managers import make, random_cache
from tests.ops.pools import same_bytes


SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def vector(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def calls(schema):
    """{name: (function, arguments)} with shapes instead of arrays."""
    cache = KVCache.abstract(schema)
    slots = schema.max_requests
    blocks = schema.max_blocks
    rows = {
        boundary: jax.eval_shape(lambda c, b=boundary: request_rows.read_request(c, 0, 0, 0, boundary=b), cache)
        for boundary in (False, True)
    }
    some = jax.eval_shape(lambda c: request_rows.read_blocks(c, jnp.zeros(4, jnp.int32), 0, 0), cache)
    where = (SCALAR, SCALAR, vector(blocks))
    lists = (vector(slots), vector(slots), vector(slots, blocks))
    return {
        "read": (request_rows.read_request, (cache, SCALAR, SCALAR, SCALAR)),
        "read blocks": (request_rows.read_blocks, (cache, vector(4), SCALAR, SCALAR)),
        "write": (request_rows.write_request, (cache, *where, rows[False])),
        "write a boundary": (request_rows.write_request, (cache, *where, rows[True])),
        "write the table": (request_rows.write_request, (cache, *where, None)),
        "copy": (request_rows.copy_request, (cache, SCALAR, SCALAR, SCALAR, *lists)),
        "write blocks": (request_rows.write_blocks, (cache, vector(4), some)),
    }


@pytest.mark.parametrize("name", calls(make().schema))
def test_scratch_memory_does_not_grow_with_the_pools(name):
    temp = []
    for blocks in (200, 2000):
        schema = make(num_blocks=blocks).schema
        function, arguments = calls(schema)[name]
        compiled = function.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        temp.append(memory.temp_size_in_bytes)
        if not name.startswith("read"):
            assert memory.alias_size_in_bytes == arguments[0].nbytes
            shapes = {f"[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(arguments[0]) if x.ndim > 2}
            lines = [line for line in compiled.as_text().splitlines() if re.search(r"= \S+ copy(-start)?\(", line)]
            assert not [line for line in lines if any(shape in line.split("copy")[0] for shape in shapes)]
    assert temp[0] == temp[1]


def at(*values):
    return jax.device_put(tuple(np.asarray(x, np.int32) for x in values))


class TestOnlyLiveBytesLeave:
    @pytest.mark.parametrize(("length", "min_length"), [(1, 0), (3, 1), (8, 8), (21, 19), (32, 30), (33, 33)])
    def test_of_a_slot(self, length, min_length):
        """In a cache of NaN and 0xFF everything that is not live comes out as zeros, everything live as it is."""
        schema = make().schema
        rows = request_rows.read_request(poisoned_cache(schema), *at(1, length, min_length))
        window = schema.config.sliding_window

        def live(x):
            raw = np.asarray(x)
            raw = raw.view(np.uint8).reshape(*raw.shape[:2], -1)
            assert set(np.unique(raw)) <= {0, 0xFF}
            return raw[0] == 0xFF

        positions = length - schema.swa_ring + np.arange(schema.swa_ring)
        chex.assert_trees_all_equal(live(rows.swa.nope).all(1), positions >= max(0, min_length - window))
        positions = length - schema.state_ring("csa4") + np.arange(schema.state_ring("csa4"))
        first_half, second_half = np.split(live(rows.groups["csa4"].state.gate), 2, axis=1)
        chex.assert_trees_all_equal(first_half.all(1), positions >= max(0, min_length // 4 * 4 - 4))
        chex.assert_trees_all_equal(second_half.any(1), positions >= min_length // 4 * 4)
        positions = length - schema.state_ring("hca16") + np.arange(schema.state_ring("hca16"))
        chex.assert_trees_all_equal(live(rows.groups["hca16"].state.kv).all(1), positions >= min_length // 16 * 16)

    def test_of_blocks(self):
        schema = make().schema
        read = request_rows.read_blocks(poisoned_cache(schema), *at([5, 2, 7, -1], 1, 3 * 16 + 9))
        entries = np.asarray(read["csa4"].entries.nope)
        assert (entries[:, :2] == 0xFF).all() and (entries[:, 2, :2] == 0xFF).all()  # 9 tokens of the third: 2 entries
        assert not entries[:, 2, 2:].any() and not entries[:, 3].any()
        hca = np.asarray(read["hca16"].entries.nope)
        assert (hca[:, :2] == 0xFF).all() and not hca[:, 2:].any()


class TestNothingElseIsTouched:
    def test_a_copy(self):
        """Every other slot, block and row of the table is as before; -1 copies nothing."""
        manager = make()
        cache = random_cache(manager)
        before = jax.tree.map(np.array, cache)
        tables = np.full((4, 6), -1)
        tables[0, :2] = 3, 9
        after = request_rows.copy_request(cache, *at(2, 5, 20, [0, -1, -1, -1], [9, -1, -1, -1], tables))
        want = jax.tree.map(np.array, before)
        for part in (want.swa, *(group.by_slot for group in want.groups.values())):
            for x in jax.tree.leaves(part):
                x[:, 0] = x[:, 2]
        for x in jax.tree.leaves([group.paged for group in want.groups.values()]):
            x[:, 9] = x[:, 5]
        want.block_table[0] = tables[0]
        want.lengths[0] = 20
        same_bytes(after, want)

    def test_a_boundary(self):
        """Restoring a snapshot writes the last window's rows and half of CSA's last ones."""
        manager = make()
        source = random_cache(manager)
        cache = random_cache(manager)
        rows = request_rows.read_request(source, *at(1, 32, 32), boundary=True)
        want = jax.tree.map(np.array, cache)
        after = request_rows.write_request(cache, *at(3, 32, [7, 8, -1, -1, -1, -1]), rows)
        for have, new in zip(jax.tree.leaves(want.swa), jax.tree.leaves(source.swa), strict=True):
            for position in range(24, 32):
                have[:, 3, position % 10] = np.asarray(new)[:, 1, position % 10]
        pairs = (jax.tree.leaves(cache.groups["csa4"].by_slot) for cache in (want, source))
        for have, new in zip(*pairs, strict=True):
            half = have.shape[-1] // 2
            for position in range(28, 32):
                have[:, 3, position % 10, :half] = np.asarray(new)[:, 1, position % 10, :half]
        want.block_table[3] = [7, 8, -1, -1, -1, -1]
        want.lengths[3] = 32
        same_bytes(after, want)

    def test_blocks(self):
        manager = make()
        cache = random_cache(manager)
        want = jax.tree.map(np.array, cache)
        read = request_rows.read_blocks(cache, *at([4, 0, 11], 0, 96))
        after = request_rows.write_blocks(cache, *at([6, -1, 1]), read)
        for x in jax.tree.leaves([group.paged for group in want.groups.values()]):
            x[:, 6] = x[:, 4]
            x[:, 1] = x[:, 11]
        same_bytes(after, want)
