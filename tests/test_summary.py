"""What objects show of themselves: short, and without reading an array."""

import html.parser
import re

import jax
import numpy as np
import pytest

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.request_rows import read_request
from dsv4_jax.common.summary import MAX_ITEMS, MAX_ROWS, Share, Summarized
from dsv4_jax.engine.requests import Request, RequestParams
from dsv4_jax.host import PrefixCache
from dsv4_jax.host.offload import OffloadedRequest
from tests.host.managers import ids, make


def text_of(page):
    """The text of an HTML fragment, whose tags must all be closed."""
    found = []
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_data = found.append
    parser.handle_starttag = lambda tag, _: tags.append(tag)
    parser.handle_endtag = lambda tag: tags.remove(tag)
    parser.feed(page)
    assert not tags
    return " ".join(found)


@pytest.fixture(scope="module")
def parts():
    """(manager, cache, batch) of a step of two requests."""
    manager = make()
    slots = manager.admit(), manager.admit()
    return manager, manager.init_cache(), manager.prepare_forward({slots[0]: ids(40), slots[1]: ids(3)})


def test_a_cache_shows_its_geometry_and_the_bytes_of_its_pools(parts):
    manager, cache, _ = parts
    size = manager.schema.memory_bytes() / 1024
    sizes = "layers: 3, max_requests: 4, max_context: 96, num_blocks: 12, block_tokens: 16, format: v4"
    expected = f"KVCache({sizes}, memory: {size:.2f} KiB, "
    assert repr(cache).startswith(expected) and repr(cache).endswith(", ...)")
    page = text_of(cache._repr_html_())
    assert all(name in page for name in ("max_context 96", "format v4", *manager.schema.pool_bytes()))
    # Whatever stands in the arrays' places, and while a program is traced.
    for other in (KVCache.abstract(manager.schema), jax.tree.map(lambda x: None, cache)):
        assert repr(other) == repr(cache) and other._repr_html_() == cache._repr_html_()
    jax.eval_shape(lambda cache: 0 if repr(cache).startswith(expected) else pytest.fail(repr(cache)), cache)


def test_a_donated_cache_says_so_and_is_not_read(parts):
    cache = parts[0].init_cache()
    jax.tree.map(lambda x: x.delete(), cache)
    assert repr(cache).startswith("KVCache(donated: go on with what the step returned, ") and cache._repr_html_()


def test_batches_and_handles(parts):
    _, cache, batch = parts
    assert repr(batch) == (
        "Batch(token_ids: int32[64], positions: int32[64], slots: int32[64], new_blocks: int32[8,3], "
        "reset_slots: int32[4], prefill: True, adapters: None, is_image: None, ...)"
    )
    page = text_of(batch._repr_html_())
    assert "new_blocks int32[8,3]" in page and "draft_block 0" in page and "schema" not in page
    assert [repr(cache.handle(layer, batch)) for layer in range(3)] == [
        "LayerCacheHandle(layer: 0, window: 8 tokens, csa4: entries of 4 tokens, selected entries: 4)",
        "LayerCacheHandle(layer: 1, window: 8 tokens)",
        "LayerCacheHandle(layer: 2, window: 8 tokens, hca16: entries of 16 tokens)",
    ]


def test_a_manager_shows_what_its_requests_hold(parts):
    manager = parts[0]
    assert repr(manager).startswith("KVCacheManager(slots: 2 of 4, blocks: 4 of 12, layers: 3, ")
    page = text_of(manager._repr_html_())
    for words in ("slots  2 of 4", "blocks  4 of 12", "slot 0  40 of 96 tokens in 3 blocks", "slot 1  3 of 96 tokens"):
        assert words in page
    assert '<progress value="40" max="96">' in manager._repr_html_()


def test_requests_elsewhere_and_prefixes_show_their_sizes(parts):
    manager = parts[0]
    cache = parts[1]
    rows = jax.tree.map(np.asarray, read_request(cache, 0, 0, 0, boundary=True))
    request = OffloadedRequest(length=40, min_length=38, rows=rows, blocks={}, identity={})
    assert re.fullmatch(r"OffloadedRequest\(length: 40, min_length: 38, size: [\d.]+ KiB\)", repr(request))
    assert "min_length 38" in text_of(request._repr_html_())
    assert repr(PrefixCache(manager, key="tiny")) == "PrefixCache(blocks: 0, snapshots: 0 (0 B), hit rate: 0%)"


def test_a_request_shows_its_progress():
    request = Request(
        "<chat>",
        np.arange(5, dtype=np.int32),
        RequestParams(max_new_tokens=9),
        order=0,
    )
    assert repr(request) == "Request(id: '<chat>', prompt tokens: 5, progress: 0 of 9 tokens generated, waiting)"
    request.slot = 3
    request.extend([1, 2], [0.0, 0.0])
    assert str(request.progress) == "2 of 9 tokens generated, running in slot 3"
    request.slot = -1
    request.finish_reason = "stop"
    page = text_of(request._repr_html_())
    assert all(words in page for words in ("id '<chat>'", "prompt tokens 5", "2 of 9 tokens generated, ended: stop"))


def test_long_lines_and_tables_are_cut():
    class Many(Summarized):
        def _summary(self):
            return {f"row {i}": Share(i, 0) for i in range(MAX_ROWS + 3)}

    assert repr(Many()).endswith(f", row {MAX_ITEMS - 1}: {MAX_ITEMS - 1} of 0, ...)")
    page = Many()._repr_html_()
    assert page.count("<tr>") == MAX_ROWS + 1 and "and 3 more" in page
