"""LayerCacheHandle and what a step does to the cache beside the layers: no copies, no surprises, clear errors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import CSA, HCA, SLIDING
from dsv4_jax.host import KVCacheManager, PrefixCache, offload, resume
from dsv4_jax.ops import ClassicalView, ClosedWindows, CompressorWeights, IndexerView, SWAView
from dsv4_jax.quant import LayerSlice
from tests.cache.reference import poisoned_cache, random_token, random_weights
from tests.ops.pools import ints, same_bytes
from tests.paths import TINY


CONFIG = DSV4Config.from_hf(TINY)
SIZES = dict(num_blocks=12, max_requests=3, max_context=64, block_tokens=16, max_query_tokens=3)
SCHEMA = CacheSchema(CONFIG, **SIZES)
TABLE = [[7, 2, 11, 0], [4, 9, 1, 6], [3, 10, 5, 8]]
WEIGHTS = random_weights(SCHEMA, np.random.default_rng(17))
TOKENS = 17  # sixteen of one request and a padding one: a window of each rate closes
LAYER = {kind: CONFIG.layer_types.index(kind) for kind in (SLIDING, CSA, HCA)}
OWN = {
    CSA: {f"csa4 {part}" for part in ("entries", "keys", "state", "key_state")},
    HCA: {"hca16 entries", "hca16 state"},
}
SECOND = {CSA: 3, HCA: 4}  # numbers of the second CSA and HCA layers


def make_batch(slots, positions, *, new_blocks=((-1, -1, -1),), reset_slots=(-1, -1, -1), prefill=False):
    """A batch written down by hand."""
    slots = ints(slots)
    positions = ints(positions)
    return Batch(jnp.zeros_like(slots), positions, slots, ints(new_blocks), ints(reset_slots), prefill=prefill)


def one_request(slot, *, prefill=True):
    """The first tokens of one request, and padding."""
    return make_batch([slot] * (TOKENS - 1) + [-1], [*range(TOKENS - 1), -1], prefill=prefill)


def table_cache():
    """A poisoned cache whose three slots hold four blocks each, in no order."""
    return dataclasses.replace(poisoned_cache(SCHEMA), block_table=ints(TABLE))


def layer_inputs(layer, tokens=TOKENS):
    rows = [random_token(SCHEMA, np.random.default_rng(i))[layer] for i in range(tokens)]
    return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *rows)


def flush_arguments(layer, tokens=TOKENS):
    """(kv, gate, weights, index) that fit the layer."""
    x = layer_inputs(layer, tokens)
    weights = jax.tree.map(jnp.asarray, WEIGHTS[layer])
    index = (x.index_kv, x.index_gate, weights[1]) if len(weights) == 2 else None
    return x.kv, x.gate, weights[0], index


def parts(cache):
    """The arrays of each part of a cache, by name."""
    groups = {f"{name} {part}": x for name, group in cache.groups.items() for part, x in vars(group).items()}
    return groups | {name: getattr(cache, name) for name in ("swa", "block_table", "lengths")}


def changed(before, after):
    """Names of the parts whose bytes differ."""

    def raw(tree):
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

    after = parts(after)
    return {name for name, part in parts(before).items() if raw(part) != raw(after[name])}


class TestErrors:
    HANDLE = {kind: poisoned_cache(SCHEMA).handle(layer, make_batch([0], [0])) for kind, layer in LAYER.items()}

    @pytest.mark.parametrize(
        ("kind", "method"),
        [
            (SLIDING, "read_classical_view"),
            (SLIDING, "gather_all_compressed_kv"),
            (SLIDING, "valid_lengths"),
            (SLIDING, "read_indexer_view"),
            (HCA, "read_indexer_view"),
        ],
    )
    def test_a_layer_without_it_says_what_it_is(self, kind, method):
        with pytest.raises(ValueError, match=rf"^this needs a layer that .*; layer {LAYER[kind]} does not"):
            getattr(self.HANDLE[kind], method)()

    def test_a_sliding_layer_has_no_entries_to_gather(self):
        with pytest.raises(ValueError, match="^this needs a layer that attends to entries"):
            self.HANDLE[SLIDING].gather_compressed_kv(ints([[0]]))

    @pytest.mark.parametrize("kind", [SLIDING, HCA])
    def test_only_csa_layers_score(self, kind):
        with pytest.raises(ValueError, match="^this needs a layer that has index keys"):
            self.HANDLE[kind].indexer_scores(jnp.zeros((1, 32, 64), jnp.bfloat16), jnp.zeros((1, 32)))

    def test_a_sliding_layer_does_not_flush(self):
        kv, gate, weights, _ = flush_arguments(LAYER[HCA], 1)
        with pytest.raises(ValueError, match="^this needs a layer that stores entries; layer 0 does not"):
            self.HANDLE[SLIDING].flush(kv, gate, weights)

    def test_csa_needs_its_index(self):
        with pytest.raises(ValueError, match="index is missing, but layer . has a compressor of index keys"):
            self.HANDLE[CSA].flush(*flush_arguments(LAYER[CSA], 1)[:3])

    def test_hca_takes_no_index(self):
        index = flush_arguments(LAYER[CSA], 1)[3]
        with pytest.raises(ValueError, match=f"index is given, but layer {LAYER[HCA]} has no compressor of index keys"):
            self.HANDLE[HCA].flush(*flush_arguments(LAYER[HCA], 1)[:3], index=index)

    @pytest.mark.parametrize(
        ("layer", "message"), [(7, "layer=7 must be at most 4"), (-1, "layer=-1 must be at least 0")]
    )
    def test_layers_that_are_not_there(self, layer, message):
        with pytest.raises(ValueError, match=message):
            self.HANDLE[CSA].cache.handle(layer, make_batch([0], [0]))

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda h: h.write_swa(jnp.zeros((1, 97))), "kv has shape [1, 97], layer 1 takes [1, 96] in this step"),
            (lambda h: h.write_swa(jnp.zeros((2, 96))), "kv has shape [2, 96], layer 1 takes [1, 96]"),
            (
                lambda h: h.attend(jnp.zeros((1, 4, 95)), jnp.zeros(4)),
                "q has shape [1, 4, 95], layer 1 takes [1, any, 96]",
            ),
            (lambda h: h.attend(jnp.zeros((1, 4, 96)), jnp.zeros(3)), "sinks has shape [3], layer 1 takes [4]"),
            (
                lambda h: h.attend(jnp.zeros((1, 4, 96)), jnp.zeros(4), ints([[0], [1]])),
                "indices has shape [2, 1], layer 1 takes [1, any]",
            ),
            (lambda h: h.gather_compressed_kv(ints([[0], [1]])), "indices has shape [2, 1], layer 1 takes [1, any]"),
            (
                lambda h: h.indexer_scores(jnp.zeros((1, 4, 63)), jnp.zeros((1, 4))),
                "q has shape [1, 4, 63], layer 1 takes [1, any, 64]",
            ),
            (
                lambda h: h.indexer_scores(jnp.zeros((1, 4, 64)), jnp.zeros((1, 3))),
                "weights has shape [1, 3], layer 1 takes [1, 4]",
            ),
        ],
    )
    @pytest.mark.usefixtures("untyped")
    def test_rows_of_other_shapes(self, call, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(self.HANDLE[CSA])

    @pytest.mark.parametrize(
        ("dtype", "message"),
        [
            (jnp.int32, "{} has dtype int32, the cache takes bfloat16: convert the rows$"),
            (jnp.float16, "{} has dtype float16, the cache takes bfloat16: convert the rows$"),
            (jnp.float32, "{} has dtype float32, .*: convert the rows, or make the cache with dtype=float32$"),
        ],
    )
    @pytest.mark.usefixtures("untyped")
    def test_rows_of_other_dtypes(self, dtype, message):
        """They would be stored, rounded otherwise than the model rounds."""
        handle = self.HANDLE[CSA]
        rows = jnp.zeros((1, 96), dtype)
        closed = ClosedWindows(rows, handle.batch.slots, ints([-1]))
        with pytest.raises(TypeError, match=message.format("kv")):
            handle.write_swa(rows)
        with pytest.raises(TypeError, match=message.format("kv")):
            handle.norm_rope_append(jnp.zeros((1, 4, 96), dtype), rows, jnp.ones(96), jnp.ones(16), eps=1e-6)
        with pytest.raises(TypeError, match=message.format("closed.values")):
            handle.write_entries(closed, jnp.ones(16))
        with pytest.raises(TypeError, match=message.format("closed.values")):
            handle.write_keys(closed, jnp.ones(16))

    @pytest.mark.parametrize("name", ["kv", "gate"])
    @pytest.mark.usefixtures("untyped")
    def test_windows_of_other_dtypes(self, name):
        kv, gate, weights, index = flush_arguments(LAYER[CSA], 1)
        arrays = dict(kv=kv, gate=gate)
        for dtype in (jnp.int32, jnp.bfloat16):
            wrong = arrays | {name: arrays[name].astype(dtype)}
            with pytest.raises(TypeError, match=f"{name} has dtype {jnp.dtype(dtype)}, it must be float32"):
                self.HANDLE[CSA].flush(**wrong, weights=weights, index=index)
            with pytest.raises(TypeError, match=f"{name} has dtype {jnp.dtype(dtype)}, it must be float32"):
                self.HANDLE[CSA].pool_windows(**wrong, weights=weights)

    @pytest.mark.parametrize("name", ["kv", "gate", "position_bias", "norm_weight"])
    @pytest.mark.parametrize("index", [False, True])
    @pytest.mark.usefixtures("untyped")
    def test_windows_of_other_shapes(self, name, index):
        kv, gate, weights, keys = flush_arguments(LAYER[CSA], 1)
        arrays = dict(zip(("kv", "gate"), keys if index else (kv, gate), strict=False))
        arrays |= vars(keys[2] if index else weights)
        arrays[name] = arrays[name][..., :-1]
        mine = arrays.pop("kv"), arrays.pop("gate"), CompressorWeights(**arrays)
        with pytest.raises(ValueError, match=rf"{'index ' * index}(weights\.)?{name} has shape .*\d\], layer 1 takes"):
            self.HANDLE[CSA].flush(*(kv, gate, weights, mine) if index else (*mine, keys))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(num_blocks=13), "num_blocks is 13 in the {}, 12 in the cache"),
            (dict(max_requests=4), "max_requests is 4 in the {}, 3 in the cache"),
            (dict(max_context=48), "max_context is 48 in the {}, 64 in the cache"),
            (dict(block_tokens=32), "block_tokens is 32 in the {}, 16 in the cache"),
            (dict(max_query_tokens=2), "max_query_tokens is 2 in the {}, 3 in the cache"),
            (dict(kv_format="plain"), "kv_format is PlainFormat.* in the {}, V4Format"),
            (dict(config=dataclasses.replace(CONFIG, index_topk=3)), "index_topk is 3 in the {}, 4 in the cache"),
            (
                dict(config=dataclasses.replace(CONFIG, sliding_window=4)),
                "sliding_window is 4 in the {}, 8 in the cache",
            ),
        ],
    )
    @pytest.mark.usefixtures("untyped")
    def test_a_batch_of_another_manager(self, changes, message):
        manager = KVCacheManager(**dict(config=CONFIG) | SIZES | changes)
        cache = KVCache.abstract(SCHEMA)
        slot = manager.admit()
        batch = manager.prepare_forward({slot: [1]})
        for use in (cache.begin_step, lambda batch: cache.handle(0, batch)):
            with pytest.raises(ValueError, match=f"of a manager of another cache: {message.format('batch')}"):
                use(batch)
        prefix = PrefixCache(manager, key="")
        for call in (
            lambda: manager.fork(cache, slot, 1),
            lambda: manager.truncate(cache, slot, 0),
            lambda: offload(manager, cache, slot),
            lambda: resume(manager, cache, None),
            lambda: prefix.admit(cache, [1]),
            lambda: prefix.observe(cache, slot, [1]),
        ):
            with pytest.raises(ValueError, match=f"the cache is of another manager: {message.format('manager')}"):
                call()

    def test_a_batch_of_a_manager_of_the_same_geometry(self):
        """Whatever else its model's config says."""
        manager = KVCacheManager(dataclasses.replace(CONFIG, routed_scaling_factor=9.0), **SIZES)
        batch = manager.prepare_forward({manager.admit(): [1]})
        assert KVCache.abstract(SCHEMA).handle(0, batch).batch is batch


class TestSerialization:
    @pytest.mark.parametrize("kv_format", ["v4", "v41", "per_entry", "plain"])
    def test_every_byte_comes_back(self, kv_format):
        schema = CacheSchema(CONFIG, **SIZES, kv_format=kv_format)
        cache = poisoned_cache(schema)
        back = serialization.from_bytes(KVCache.abstract(schema), serialization.to_bytes(cache))
        assert jax.tree.structure(back) == jax.tree.structure(cache)
        same_bytes(back, cache)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                dict(num_blocks=5),
                r"uint8\[2, 12, 4, 64\] as groups.csa4.entries.nope, this one uint8\[2, 5, 4, 64\]",
            ),
            (dict(kv_format="plain"), r"uint8\[2, 12, 4, 64\] as groups.csa4.entries.nope, this one bfloat16"),
        ],
    )
    def test_another_geometry_is_refused(self, changes, message):
        data = serialization.to_bytes(KVCache.zeros(SCHEMA))
        with pytest.raises(ValueError, match=f"the stored cache has .*{message}"):
            serialization.from_bytes(KVCache.abstract(CacheSchema(CONFIG, **SIZES | changes)), data)


class TestViews:
    def test_acquire_allocates_nothing(self):
        """Every array of a handle and of its views is the cache's own object."""
        manager = KVCacheManager(CONFIG, **SIZES)
        cache = manager.init_cache()
        batch = make_batch([0], [0])
        own = {id(x) for x in jax.tree.leaves(cache)}
        for layer in manager.schema.layers:
            handle = manager.acquire(cache, layer.layer, batch)
            assert handle.cache is cache and handle.batch is batch and handle.pending is None
            assert handle.spec is manager.schema.layers[layer.layer]
            views = [handle.read_swa_view()]
            if layer.group is not None:
                views.append(handle.read_classical_view())
            if layer.keys:
                views.append(handle.read_indexer_view())
            arrays = [x for view in views for x in jax.tree.leaves(view) if isinstance(x, jax.Array)]
            assert arrays and {id(x) for x in arrays} <= own

    @pytest.mark.parametrize("kind", [CSA, HCA])
    def test_fields(self, kind):
        cache = table_cache()
        handle = cache.handle(SECOND[kind], make_batch([0], [0]))
        window = handle.read_swa_view()
        entries = handle.read_classical_view()
        assert isinstance(window, SWAView) and window.rows is cache.swa
        assert (window.layer, window.window, window.ring) == (SECOND[kind], 8, 10)
        name, rate = {CSA: ("csa4", 4), HCA: ("hca16", 16)}[kind]
        pool = cache.groups[name]
        assert isinstance(entries, ClassicalView) and entries.rows is pool.entries
        assert entries.block_table is cache.block_table
        assert (entries.layer, entries.compress_rate, entries.entries_per_block) == (1, rate, 16 // rate)
        assert entries.max_entries == 64 // rate
        assert window.codec is SCHEMA.window_codec and entries.codec is SCHEMA.groups[name].entry

    def test_indexer_fields(self):
        cache = table_cache()
        keys = cache.handle(SECOND[CSA], make_batch([0], [0])).read_indexer_view()
        assert isinstance(keys, IndexerView) and keys.rows is cache.groups["csa4"].keys
        assert keys.block_table is cache.block_table and keys.codec is SCHEMA.groups["csa4"].key
        assert (keys.layer, keys.compress_rate, keys.max_entries) == (1, 4, 16)

    @pytest.mark.parametrize(("kind", "lengths"), [(CSA, [0, 0, 1, 3, 4]), (HCA, [0, 0, 0, 0, 1])])
    def test_valid_lengths(self, kind, lengths):
        handle = table_cache().handle(LAYER[kind], make_batch([-1, 0, 0, 1, 1], [-1, 2, 3, 14, 15]))
        assert handle.valid_lengths().tolist() == lengths


class TestWrites:
    @pytest.mark.parametrize("prefill", [False, True])
    @pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
    def test_old_handles_and_caches_keep_their_bytes(self, kind, prefill):
        """Each write returns another handle; the parts of its layer's kind change and no other."""
        cache = table_cache()
        layer = LAYER[kind]
        before = jax.tree.map(np.array, cache)
        first = cache.handle(layer, one_request(0, prefill=prefill))
        written = first.write_swa(layer_inputs(layer).window)
        assert changed(before, written.cache) == {"swa"}
        flushed = written
        if kind != SLIDING:
            flushed = written.flush(*flush_arguments(layer))
            own = OWN[kind]
            assert changed(before, flushed.cache) == {"swa"} | own
            assert changed(before, written.cache) == {"swa"}
        same_bytes(before, first.cache)
        same_bytes(before, cache)
        assert flushed.batch is first.batch and flushed.spec is first.spec

    @pytest.mark.parametrize("prefill", [False, True])
    def test_weights_of_a_stack_are_those_of_their_layer(self, prefill):
        """Every method that takes weights; references read the layer's values, never the stack."""
        draw = np.random.default_rng(3).standard_normal

        def floats(*shape):
            return jnp.asarray(draw(shape), jnp.float32)

        kv, gate, weights, index = flush_arguments(LAYER[CSA])
        q = floats(TOKENS, 2, 96).astype(jnp.bfloat16)
        norm = floats(96)
        sinks = floats(2)
        inv_freq = floats(4)

        def in_stack(value):
            return LayerSlice(value, jnp.full((3, *value.shape), jnp.nan), ints(1))

        def in_stacks(weights):
            arrays = in_stack(weights.position_bias), in_stack(weights.norm_weight)
            return CompressorWeights(*arrays, weights.inv_freq, weights.eps)

        def run(weights, index, norm, sinks):
            handle = table_cache().handle(LAYER[CSA], one_request(0, prefill=prefill))
            rows = layer_inputs(LAYER[CSA]).window
            q_out, handle = handle.norm_rope_append(q, rows, norm, inv_freq, eps=1e-6)
            closed, _ = handle.pool_windows(kv, gate, weights)
            out, handle = handle.flush(kv, gate, weights, index).attend(q_out, sinks)
            return q_out, closed, out, handle.cache

        stacked = in_stacks(weights), (*index[:2], in_stacks(index[2])), in_stack(norm), in_stack(sinks)
        same_bytes(run(*stacked), run(weights, index, norm, sinks))

    @pytest.mark.parametrize("kind", [CSA, HCA])
    def test_other_layers_keep_their_bytes(self, kind):
        """Of the stacks of a kind only the layer's own row changes."""
        cache = table_cache()
        layer = SECOND[kind]
        handle = cache.handle(layer, one_request(0)).write_swa(layer_inputs(layer).window)
        after = handle.flush(*flush_arguments(layer)).cache
        for name in ("swa", *OWN[kind]):
            row = layer if name == "swa" else SCHEMA.layers[layer].index
            for old, new in zip(*(jax.tree.leaves(parts(c)[name]) for c in (cache, after)), strict=True):
                others = [i for i in range(len(old)) if i != row]
                same_bytes(old[ints(others)], new[ints(others)])
                assert np.asarray(old[row]).tobytes() != np.asarray(new[row]).tobytes()

    def test_prefill_rows_wait_for_the_commit(self):
        """In a prefill the ring is written by `attend`, with the bytes that `handle.cache` shows before."""
        cache = table_cache()
        layer = LAYER[SLIDING]
        slots = [1] * 12 + [0] * 5  # twelve tokens push the first two out of a ring of ten
        handle = cache.handle(layer, make_batch(slots, [*range(12), *range(5, 10)], prefill=True))
        kv = layer_inputs(layer).window
        handle = handle.write_swa(kv)
        assert handle.pending is kv
        assert handle.read_swa_view().rows is cache.swa
        shown = handle.cache
        q = jnp.ones((TOKENS, 4, 96), jnp.bfloat16)
        _, attended = handle.attend(q, jnp.zeros(4))
        assert attended.pending is None and handle.pending is kv
        same_bytes(shown, attended.cache)
        assert changed(cache, shown) == {"swa"}
        decode = cache.handle(layer, dataclasses.replace(handle.batch, prefill=False)).write_swa(kv)
        assert decode.pending is None
        same_bytes(shown, decode.cache)

    def test_prefill_flush_keeps_pending_rows(self):
        cache = table_cache()
        layer = LAYER[HCA]
        handle = cache.handle(layer, one_request(2))
        kv = layer_inputs(layer).window
        flushed = flush_arguments(layer)
        handle = handle.write_swa(kv).flush(*flushed)
        assert handle.pending is kv
        other = cache.handle(layer, handle.batch).flush(*flushed).write_swa(kv)
        same_bytes(handle.cache, other.cache)

    def test_decode_attends_what_it_wrote(self):
        """In a decode step the ring holds the tokens before `attend`, which then changes nothing."""
        cache = table_cache()
        layer = LAYER[SLIDING]
        handle = cache.handle(layer, make_batch([0, 1, -1], [0, 0, -1])).write_swa(layer_inputs(layer, 3).window)
        # One visible row and the sink, both with logit 0: half the row.
        out, after = handle.attend(jnp.zeros((3, 4, 96), jnp.bfloat16), jnp.zeros(4))
        assert after is handle
        kv, valid = handle.gather_swa_kv()
        assert valid.sum(axis=1).tolist() == [1, 1, 0]
        same_bytes(out, jnp.broadcast_to(0.5 * kv[:, -1:], out.shape))


class TestResetSlots:
    @pytest.mark.parametrize("slots", [[1], [2, 0], [-1, 1, -1]])
    def test_wipes_exactly_the_slots_named(self, slots):
        cache = dataclasses.replace(table_cache(), lengths=ints([5, 6, 7]))
        after = jax.jit(KVCache.reset_slots)(cache, ints(slots))
        empty = KVCache.zeros(SCHEMA)
        wiped = [slot for slot in slots if slot >= 0]
        for name in cache.groups:
            same_bytes(cache.groups[name].paged, after.groups[name].paged)
        for name in parts(cache):
            if name.endswith(("entries", "keys")):
                continue
            axis = 0 if name in ("block_table", "lengths") else 1
            old, new, clean = (jax.tree.leaves(parts(c)[name]) for c in (cache, after, empty))
            for before, now, zero in zip(old, new, clean, strict=True):
                for slot in range(3):
                    expected = zero if slot in wiped else before
                    same_bytes(jnp.take(expected, slot, axis), jnp.take(now, slot, axis))

    @pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1], [3]])
    def test_wipes_nothing_for_none(self, slots):
        cache = table_cache()
        same_bytes(cache, cache.reset_slots(ints(slots)))


class TestBeginStep:
    def begin(self, *, slots=(-1,), positions=(-1,), **batch):
        """(block table, lengths) after a step; everything else must stay as it was."""
        cache = dataclasses.replace(table_cache(), lengths=ints([5, 6, 7]))
        after = jax.jit(KVCache.begin_step)(cache, make_batch(slots, positions, **batch))
        same_bytes(dataclasses.replace(cache, block_table=after.block_table, lengths=after.lengths), after)
        return after.block_table.tolist(), after.lengths.tolist()

    def test_padding_changes_nothing(self):
        assert self.begin(slots=[-1] * 4, positions=[-1] * 4) == (TABLE, [5, 6, 7])

    def test_lengths_follow_the_last_token_of_each_request(self):
        """In any order of slots, with padding at the end, and never from a request that is not in the batch."""
        table, lengths = self.begin(slots=[2, 2, 2, 0, -1, -1], positions=[7, 8, 9, 0, -1, -1])
        assert (table, lengths) == (TABLE, [1, 6, 10])

    def test_lengths_may_shrink_after_a_rewind(self):
        assert self.begin(slots=[1], positions=[3])[1] == [5, 4, 7]

    def test_new_blocks_go_to_their_place(self):
        table, _ = self.begin(new_blocks=[[2, 3, 1], [-1, -1, -1], [0, 0, 9], [-1, -1, -1]])
        assert table == [[9, 2, 11, 0], [4, 9, 1, 6], [3, 10, 5, 1]]

    def test_a_padded_slot_writes_no_block(self):
        """A negative index would wrap around to the last slot."""
        assert self.begin(new_blocks=[[-1, 0, 5], [-1, 3, 5]])[0] == TABLE

    def test_reset_comes_before_new_blocks_and_lengths(self):
        table, lengths = self.begin(
            slots=[1, 1], positions=[0, 1], reset_slots=[1, -1, -1], new_blocks=[[1, 0, 8], [-1, -1, -1]]
        )
        assert table == [TABLE[0], [8, -1, -1, -1], TABLE[2]]
        assert lengths == [5, 2, 7]

    def test_reset_alone(self):
        assert self.begin(reset_slots=[2, -1, 0]) == ([[-1] * 4, TABLE[1], [-1] * 4], [0, 6, 0])


@pytest.mark.parametrize("kv_format", ["v4", "v41"])
def test_rows_of_several_layers_are_written_as_those_of_each(kv_format):
    """More tokens of two requests than a ring has rows, with padding between and behind them."""
    cache = poisoned_cache(CacheSchema(CONFIG, **SIZES, kv_format=kv_format))
    count = SCHEMA.swa_ring + 3
    slots = [2] * count + [-1] + [0] * 2 + [-1]
    positions = [*range(count), -1, 40, 41, -1]
    batch = make_batch(slots, positions, prefill=True)
    rows = {layer: layer_inputs(layer, len(slots)).window for layer in (SECOND[HCA], SECOND[CSA])}
    want = cache
    for layer, kv in rows.items():
        want = want.handle(layer, batch).write_swa(kv).cache
    same_bytes(want, jax.jit(lambda cache: cache.write_windows(rows, batch))(cache))
    assert changed(cache, want) == {"swa"}
