"""Saved and offloaded requests: every refusal, and that none of them changes anything."""

import dataclasses
import hashlib
import json
import os

import chex
import jax
import numpy as np
import pytest
import safetensors

from dsv4_jax.cache import CacheSchema
from dsv4_jax.cache.request_rows import read_blocks, read_request, write_blocks, write_request
from dsv4_jax.config import DSV4Config
from dsv4_jax.host import CacheFullError, load_request, offload, resume, save_request
from dsv4_jax.host.offload import capture, identity
from tests.host.managers import CONFIG, host_state, ids, make, random_cache, step
from tests.ops.pools import same_bytes
from tests.paths import PACKAGED


def begun(n=40, **changes):
    """(manager, cache of random bytes, slot of a request of n tokens)."""
    manager = make(**changes)
    cache = random_cache(manager)
    other = manager.admit()
    slot = manager.admit()
    cache = step(manager, cache, other, ids(20))
    return manager, step(manager, cache, slot, ids(n)), slot


def same_request(a, b):
    assert a.length == b.length and a.identity == b.identity
    same_bytes((a.rows, a.blocks), (b.rows, b.blocks))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(path, what was saved)."""
    manager, cache, slot = begun()
    path = tmp_path_factory.mktemp("requests") / "request.safetensors"
    save_request(path, manager, cache, slot, ids(40), key="tiny")
    return path, capture(manager, cache, slot, key="tiny")


@pytest.mark.parametrize(
    ("config", "digest"),
    [
        (DSV4Config.v4_flash(), "c07d8206f20b55a7d97ffb47b8d8e2ffcb28fcd27e534707e64e8b5a9812aaaa"),
        (DSV4Config.v4_flash_0731(), "05378813f096f949c755241106e350168cf5ef89788efd4e34f7cae08f3b0c75"),
        (DSV4Config.from_hf(PACKAGED), "ce1c7899b20d3ea9ada74ba1d4185dfa3fa72273ffef5c585a672cfc9d41fe6b"),
    ],
    ids=["v4_flash", "v4_flash_0731", "packaged"],
)
def test_new_fields_of_the_configuration_leave_files_of_earlier_versions_readable(config, digest):
    def identity_of(config):
        return identity(CacheSchema(config, num_blocks=1, max_requests=1, max_context=256), "")

    assert identity_of(config)["config"] == digest
    other = dataclasses.replace(config, delays_pre=True)
    specs = (dataclasses.replace(config.specs[0], window=7), *config.specs[1:])
    for changed in (other, dataclasses.replace(config, specs=specs)):
        assert identity_of(changed)["config"] != digest


class TestRoundTrip:
    @pytest.mark.parametrize(
        "changes",
        [dict(), dict(num_blocks=3, max_requests=1, max_context=40), dict(max_context=4000, num_blocks=99)],
        ids=["the same geometry", "just enough", "much"],
    )
    def test_into_another_cache(self, saved, changes):
        path, request = saved
        manager = make(**changes)
        slot, tokens, cache = load_request(path, manager, random_cache(manager), key="tiny")
        assert tokens.tolist() == ids(40) and tokens.dtype == np.int32
        assert (manager.length(slot), manager.min_length(slot)) == (40, 38)
        assert cache.lengths[slot] == 40
        chex.assert_trees_all_equal(cache.block_table[slot], manager.block_table[slot])
        same_request(capture(manager, cache, slot, key="tiny"), request)

    @pytest.mark.parametrize(("most", "min_length"), [(1, 40), (2, 39), (8, 38)])
    def test_rings_of_other_sizes(self, saved, most, min_length):
        """Live rows are the same where both rings have them; a shorter ring reaches less far back."""
        path, request = saved
        manager = make(max_query_tokens=most)
        slot, _, cache = load_request(path, manager, random_cache(manager), key="tiny")
        assert manager.min_length(slot) == min_length
        again = capture(manager, cache, slot)
        both = min(again.rows.swa.nope.shape[1], request.rows.swa.nope.shape[1])
        live = 40 - min_length + CONFIG.sliding_window
        for a, b in zip(jax.tree.leaves(again.rows.swa), jax.tree.leaves(request.rows.swa), strict=True):
            same_bytes(a[:, -min(live, both) :], b[:, -min(live, both) :])
            assert not np.asarray(a[:, : a.shape[1] - live]).any()

    @pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3)])
    def test_rings_of_a_model_with_draft_layers(self, tmp_path, before, after):
        """Its windows have more spare rows than its other rings, which drafts overwrite."""
        config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
        manager, cache, slot = begun(config=config, max_query_tokens=before)
        save_request(tmp_path / "request", manager, cache, slot, ids(40))
        other = make(config, max_query_tokens=after)
        slot, tokens, cache = load_request(tmp_path / "request", other, random_cache(other))
        assert tokens.tolist() == ids(40) and other.min_length(slot) == 41 - min(before, after)

    def test_offload_and_resume(self):
        manager, cache, slot = begun()
        before = capture(manager, cache, slot)
        blocks = manager.block_table[slot].tolist()
        offloaded, cache = offload(manager, cache, slot)
        assert (manager.free_slots, manager.free_blocks) == (3, 10)
        assert offloaded.nbytes > 10_000
        # Others take its slot and blocks meanwhile; then it comes back twice.
        cache = step(manager, cache, manager.admit(), ids(1))
        a, cache = resume(manager, cache, offloaded)
        b, cache = resume(manager, cache, offloaded)
        for slot in (a, b):
            same_request(capture(manager, cache, slot), before)
        assert manager.block_table[a].tolist() != blocks

    def test_blocks_in_several_pieces(self):
        manager, cache, slot = begun(16 * 20 + 5, num_blocks=60, max_context=700)
        before = capture(manager, cache, slot)
        offloaded, cache = offload(manager, cache, slot)
        programs = [f._cache_size() for f in (read_blocks, write_blocks, read_request, write_request)]
        slot, cache = resume(manager, cache, offloaded)
        same_request(capture(manager, cache, slot), before)
        small, cache = offload(manager, step(manager, cache, manager.admit(), ids(2)), 2)
        _, cache = resume(manager, cache, small)
        assert programs[0] == read_blocks._cache_size() and programs[2] == read_request._cache_size()
        assert (write_blocks._cache_size(), write_request._cache_size()) == (programs[1] + 1, programs[3] + 1)

    def test_nothing_of_earlier_owners_is_in_the_file(self, tmp_path):
        """Two requests with the same live bytes make the same file, whatever lay there before."""
        first, cache, slot = begun(20)
        offloaded, _ = offload(first, cache, slot)
        files = []
        for fill in (random_cache, lambda manager: manager.init_cache()):
            manager = make()
            slot, cache = resume(manager, fill(manager), offloaded)
            save_request(tmp_path / "a", manager, cache, slot, ids(20))
            files.append((tmp_path / "a").read_bytes())
        assert files[0] == files[1]

    def test_the_safetensors_package_reads_it(self, saved):
        path, request = saved
        with safetensors.safe_open(path, "flax") as file:
            assert file.metadata()["format"] == "dsv4_jax request"
            chex.assert_trees_all_equal(file.get_tensor("tokens"), np.array([ids(40)]))
            same_bytes(file.get_tensor("rows.swa.rope"), request.rows.swa.rope)
            same_bytes(file.get_tensor("blocks.csa4.keys.codes"), request.blocks["csa4"].keys.codes)


class TestRefusals:
    @pytest.fixture
    def target(self):
        """A manager and cache with a request, checked on leaving to be unchanged."""
        manager, cache, _ = begun(20)
        before = host_state(manager)
        bytes_before = jax.tree.map(np.array, cache)
        yield manager, cache
        assert host_state(manager) == before
        same_bytes(cache, bytes_before)

    def refuses(self, path, target, message, error=ValueError, key="tiny"):
        with pytest.raises(error, match=message) as caught:
            load_request(path, *target, key=key)
        assert error is CacheFullError or not isinstance(caught.value, CacheFullError)

    def edited(self, path, folder, change):
        new = folder / "edited.safetensors"
        new.write_bytes(change(path.read_bytes()))
        return new

    def test_every_cut(self, saved, target, tmp_path):
        size = saved[0].stat().st_size
        for keep in [0, 1, 7, 8, 9, 300, *range(1000, size, size // 20), size - 1]:
            path = self.edited(saved[0], tmp_path, lambda blob, keep=keep: blob[:keep])
            self.refuses(path, target, "no safetensors file|SHA-256")

    def test_any_changed_byte(self, saved, target, tmp_path):
        rng = np.random.default_rng(0)
        size = saved[0].stat().st_size
        start = 8 + int.from_bytes(saved[0].read_bytes()[:8], "little")
        for at in [*range(0, start, 11), *rng.integers(start, size, 40)]:

            def flip(blob, at=at):
                return blob[:at] + bytes([blob[at] ^ (1 << rng.integers(8))]) + blob[at + 1 :]

            self.refuses(
                self.edited(saved[0], tmp_path, flip),
                target,
                "no safetensors|SHA-256|no saved|version|made with|length is|max_query_tokens is",
            )

    def test_bytes_at_the_end(self, saved, target, tmp_path):
        self.refuses(
            self.edited(saved[0], tmp_path, lambda blob: blob + b"\0"), target, "no safetensors file, or it is damaged"
        )

    def forged(self, path, folder, edit=lambda header: None, data=lambda data: data, **metadata):
        """A file that was changed by somebody who then computed the checksum."""

        def change(blob):
            start = 8 + int.from_bytes(blob[:8], "little")
            header = json.loads(blob[8:start])
            header["__metadata__"] |= metadata
            edit(header)
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            new = len(text).to_bytes(8, "little") + text + data(blob[start:-32])
            return new + hashlib.sha256(new).digest()

        return self.edited(path, folder, change)

    def test_a_forgery_without_changes_is_the_file(self, saved, tmp_path):
        assert self.forged(saved[0], tmp_path).read_bytes() == saved[0].read_bytes()

    @pytest.mark.parametrize("floor", ["999999", "41", "37", "-1", "4.0", "", "forty", "9" * 5000])
    def test_a_min_length_that_the_rings_do_not_reach(self, saved, target, tmp_path, floor):
        path = self.forged(saved[0], tmp_path, min_length=floor)
        self.refuses(path, target, "min_length is .* must be from 38 to 40")

    @pytest.mark.parametrize("floor", [None, 40, [40]])
    def test_metadata_are_texts(self, saved, target, tmp_path, floor):
        self.refuses(self.forged(saved[0], tmp_path, min_length=floor), target, "no safetensors file")

    @pytest.mark.parametrize("name", ["length", "max_query_tokens"])
    @pytest.mark.parametrize("number", ["0", "1073741825", "-1", "x"])
    def test_numbers_out_of_range(self, saved, target, tmp_path, name, number):
        path = self.forged(saved[0], tmp_path, **{name: number})
        self.refuses(path, target, f"^{name} is '{number}', it must be from 1 to 1073741824")

    @pytest.mark.parametrize("numbers", [{"length": "39"}, {"max_query_tokens": "4"}, {"length": "040"}])
    def test_other_numbers(self, saved, target, tmp_path, numbers):
        """The shapes of the arrays follow from the numbers."""
        self.refuses(self.forged(saved[0], tmp_path, **numbers), target, "its header or its SHA-256")

    def test_large_numbers(self, saved, target, tmp_path):
        path = self.forged(saved[0], tmp_path, length="1073741824", max_query_tokens="1073741824")
        self.refuses(path, target, "its header or its SHA-256")

    def test_no_min_length(self, saved, target, tmp_path):
        path = self.forged(saved[0], tmp_path, lambda header: header["__metadata__"].pop("min_length"))
        self.refuses(path, target, "min_length is 'None'")

    def test_every_tensor_is_checked_against_the_schema(self, saved, target, tmp_path):
        """Renamed, of another dtype with as many bytes, and of every other shape with as many elements."""
        header = json.loads(saved[0].read_bytes()[8:].split(b"}}")[0] + b"}}")
        names = [name for name in header if name != "__metadata__"]
        assert len(names) > 10
        message = "its header or its SHA-256 is not what it was written with"

        def rename(name):
            return lambda header: header.update({"other": header.pop(name)})

        def retype(name):
            same = {"U8": "I8", "I8": "U8", "I32": "F32", "F32": "I32", "BF16": "F16", "F8_E4M3": "U8", "F8_E8M0": "U8"}
            return lambda header: header[name].update(dtype=same[header[name]["dtype"]])

        def reshape(name, shape):
            return lambda header: header[name].update(shape=shape)

        for name in names:
            shape = header[name]["shape"]
            count = int(np.prod(shape))
            shapes = [[count], [1, count], [count, 1], [*shape, 1], [1, *shape], [1] * 30 + [count]]
            for other in [other for other in shapes if other != shape]:
                self.refuses(self.forged(saved[0], tmp_path, reshape(name, other)), target, message)
            for edit in (rename(name), retype(name)):
                self.refuses(self.forged(saved[0], tmp_path, edit), target, message)

    @pytest.mark.parametrize("rows", [-1, 1])
    @pytest.mark.parametrize("part", ["blocks.csa4.entries.nope", "rows.swa.nope", "rows.groups.csa4.state.kv"])
    def test_rows_too_many_or_too_few(self, saved, target, tmp_path, part, rows):
        """One row less or more, the data with it: blocks that the tokens do not need, rings that differ."""
        header = json.loads(saved[0].read_bytes()[8:].split(b"}}")[0] + b"}}")
        axis = min(1, len(header[part]["shape"]) - 1)
        begin, end = header[part]["data_offsets"]
        row = (end - begin) // header[part]["shape"][axis]
        more = rows * row

        def edit(header):
            header[part]["shape"][axis] += rows
            for name, entry in header.items():
                if name != "__metadata__" and entry["data_offsets"][1] >= end:
                    entry["data_offsets"] = [x + more if x >= end else x for x in entry["data_offsets"]]

        def data(data):
            return data[: min(end, end + more)] + bytes(max(0, more)) + data[end:]

        self.refuses(self.forged(saved[0], tmp_path, edit, data), target, "its header or its SHA-256")

    @pytest.mark.parametrize(
        "content", [b"[" * 100_000, b'{"a":' * 100_000, b"{" + b'"a":1,' * 9, b"[]", b"1", b"\xff"]
    )
    def test_headers_of_junk(self, target, tmp_path, content):
        (tmp_path / "junk").write_bytes(len(content).to_bytes(8, "little") + content)
        self.refuses(tmp_path / "junk", target, "no safetensors file")
        (tmp_path / "junk").write_bytes(content)
        self.refuses(tmp_path / "junk", target, "no safetensors file")

    def test_another_version(self, saved, target, tmp_path):
        self.refuses(
            self.forged(saved[0], tmp_path, version="2"), target, "has version '2', this package reads version '3'"
        )
        self.refuses(self.forged(saved[0], tmp_path, format="model"), target, "this is no saved request")

    def test_other_weights(self, saved, target):
        self.refuses(saved[0], target, "made with key='tiny', this cache has key='large'", key="large")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (dict(kv_format="per_entry"), r"made with kv_format='V4Format\(\)', this cache has kv_format='PerEntry"),
            (dict(block_tokens=32), "block_tokens='16', this cache has block_tokens='32'"),
            (dict(config=dataclasses.replace(CONFIG, rope_theta=5e4)), "made with config='"),
            (dict(max_context=32), "holds 40 tokens, max_context=32"),
        ],
    )
    def test_another_model_or_geometry(self, saved, changes, message):
        manager = make(**changes)
        before = host_state(manager)
        self.refuses(saved[0], (manager, manager.init_cache()), message)
        assert host_state(manager) == before

    def test_no_room(self, saved):
        manager, cache, _ = begun(20, max_requests=2)
        self.refuses(saved[0], (manager, cache), "1 slots are needed", CacheFullError)
        manager, cache, _ = begun(20, num_blocks=6)
        self.refuses(saved[0], (manager, cache), "3 blocks are needed, 2 of 6 are free", CacheFullError)

    def test_no_such_file(self, target, tmp_path):
        with pytest.raises(FileNotFoundError):
            load_request(tmp_path / "none", *target)

    def test_other_safetensors_files(self, target, tmp_path):
        from safetensors.numpy import save_file

        save_file({"tokens": np.zeros(3, np.int32)}, tmp_path / "other")
        self.refuses(tmp_path / "other", target, "no saved request")

    @pytest.mark.parametrize(
        ("slot", "tokens", "message"),
        [
            (1, ids(39), "tokens has 39 ids, slot 1 holds 40 tokens"),
            (1, [], "tokens is empty"),
            (3, ids(3), "slot=3 is not admitted"),
        ],
    )
    def test_what_cannot_be_saved(self, slot, tokens, message, tmp_path):
        manager, cache, _ = begun()
        with pytest.raises(ValueError, match=message):
            save_request(tmp_path / "r", manager, cache, slot, tokens)
        assert not list(tmp_path.iterdir())

    def test_empty_requests_are_not_offloaded(self):
        manager, cache, _ = begun()
        with pytest.raises(ValueError, match="slot 2 holds no tokens yet"):
            offload(manager, cache, manager.admit())

    def test_a_file_appears_whole_or_not_at_all(self, tmp_path, monkeypatch):
        manager, cache, slot = begun()
        save_request(tmp_path / "r", manager, cache, slot, ids(40))
        before = (tmp_path / "r").read_bytes()

        def fail(*_):
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            save_request(tmp_path / "r", manager, cache, slot, ids(40))
        assert [p.name for p in tmp_path.iterdir()] == ["r"] and (tmp_path / "r").read_bytes() == before
