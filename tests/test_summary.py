"""What objects show of themselves: short, and without reading an array."""

import html.parser
import re

import jax
import numpy as np
import pytest

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.request_rows import read_request
from dsv4_jax.common.summary import MAX_ROWS, Share, Summarized, Summary
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
    expected = f"3 layers, 4 slots of 96 tokens, 12 blocks of 16 tokens, format v4, {size:.2f} KiB"
    assert repr(cache) == f"KVCache({expected})"
    page = text_of(cache._repr_html_())
    assert expected in page and all(name in page for name in manager.schema.pool_bytes())
    # Whatever stands in the arrays' places, and while a program is traced.
    for other in (KVCache.abstract(manager.schema), jax.tree.map(lambda x: None, cache)):
        assert repr(other) == repr(cache) and other._repr_html_() == cache._repr_html_()
    jax.eval_shape(lambda cache: pytest.fail(repr(cache)) if repr(cache) != f"KVCache({expected})" else 0, cache)


def test_a_donated_cache_says_so_and_is_not_read(parts):
    cache = parts[0].init_cache()
    jax.tree.map(lambda x: x.delete(), cache)
    assert repr(cache).endswith(", donated: go on with what the step returned)") and cache._repr_html_()


def test_batches_and_handles(parts):
    _, cache, batch = parts
    assert repr(batch) == "Batch(prefill, 64 tokens with padding)"
    assert "new_blocks int32[" in text_of(batch._repr_html_())
    assert [repr(cache.handle(layer, batch)).partition(", Batch(")[0] for layer in range(3)] == [
        "LayerCacheHandle(layer 0, window of 8 tokens, csa4 entries of 4 tokens, of which 4 are selected",
        "LayerCacheHandle(layer 1, window of 8 tokens",
        "LayerCacheHandle(layer 2, window of 8 tokens, hca16 entries of 16 tokens",
    ]
    assert repr(cache) in text_of(cache.handle(0, batch)._repr_html_())


def test_a_manager_shows_what_its_requests_hold(parts):
    manager = parts[0]
    assert repr(manager).startswith("KVCacheManager(2 requests, 8 free blocks, 3 layers, ")
    page = text_of(manager._repr_html_())
    for words in ("slots  2 of 4", "blocks  4 of 12", "slot 0  40 of 96 tokens in 3 blocks", "slot 1  3 of 96 tokens"):
        assert words in page
    assert '<progress value="40" max="96">' in manager._repr_html_()


def test_requests_elsewhere_and_prefixes_show_their_sizes(parts):
    manager = parts[0]
    cache = parts[1]
    rows = jax.tree.map(np.asarray, read_request(cache, 0, 0, 0, boundary=True))
    request = OffloadedRequest(length=40, min_length=38, rows=rows, blocks={}, identity={})
    assert re.fullmatch(r"OffloadedRequest\(40 tokens, [\d.]+ KiB\)", repr(request))
    assert "can be rewound to" in request._repr_html_()
    assert repr(PrefixCache(manager, key="tiny")) == "PrefixCache(0 blocks, 0 snapshots (0 B))"


def test_a_request_shows_its_progress():
    request = Request(
        "<chat>",
        np.arange(5, dtype=np.int32),
        RequestParams(max_new_tokens=9),
        order=0,
    )
    assert repr(request) == "Request(id '<chat>', 5 prompt tokens, 0 of 9 tokens generated, waiting)"
    request.slot = 3
    request.extend([1, 2], [0.0, 0.0])
    assert str(request.progress) == "2 of 9 tokens generated, running in slot 3"
    request.slot = -1
    request.finish_reason = "stop"
    assert "id '<chat>', 5 prompt tokens, 2 of 9 tokens generated, ended: stop" in text_of(request._repr_html_())


def test_long_tables_are_cut():
    class Many(Summarized):
        def _summary(self):
            return Summary(("many",), {f"row {i}": Share(i, 0) for i in range(MAX_ROWS + 3)})

    page = Many()._repr_html_()
    assert page.count("<tr>") == MAX_ROWS + 1 and "and 3 more" in page
