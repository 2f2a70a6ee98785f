"""A server in this process, of a small model whose tokens are bytes."""

import contextlib
import shutil
import socket
import sys
import threading
import time
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest

from dsv4_jax.checkpoint import read_tokenizer
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import BlockAllocator, KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.serve import AsyncEngine, HTTPServer, ServerOptions, create_app
from tests.paths import DATA, PACKAGED


sys.path.insert(0, str(DATA.parents[1] / "scripts"))  # they import one another by bare names

SLOTS = 4
BLOCKS = 24
CONTEXT = 256


@pytest.fixture(scope="session")
def tokenizer():
    return read_tokenizer(PACKAGED)


@pytest.fixture(scope="session")
def bytes_model():
    """(a model, its configuration): the packaged one's shape with one layer and random weights."""
    config = DSV4Config.from_hf(PACKAGED).with_layers([LayerSpec.csa()])
    return DeepseekV4ForCausalLM(config), config


@pytest.fixture(scope="session")
def make_manager(bytes_model):
    def make(free=BLOCKS):
        sizes = dict(max_requests=SLOTS, max_context=CONTEXT, block_tokens=16, max_query_tokens=3)
        manager = KVCacheManager(bytes_model[1], num_blocks=BLOCKS, **sizes)
        manager.requests.allocator = BlockAllocator(free)  # the same programs, whatever there is to give
        return manager

    return make


@contextlib.contextmanager
def serving(engine, tokenizer, *, max_waiting=40, grace_seconds=20.0, **options):
    """Runs a server of an engine; yields its parts and clients."""
    options = ServerOptions("tiny", end_tokens=(257,), **options)
    engine = AsyncEngine(engine, max_waiting=max_waiting)
    app = create_app(engine, tokenizer, options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HTTPServer(app, grace_seconds=grace_seconds, access_log=False)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        connect = dict(base_url=f"{url}/v1", api_key=options.api_key or "none", max_retries=0)
        try:
            with httpx.Client(base_url=url, timeout=120) as http, openai.OpenAI(**connect) as client:
                while not (server.started and engine.ready):
                    assert thread.is_alive() and (engine.alive or not server.started), "the engine's thread has ended"
                    time.sleep(0.01)
                yield SimpleNamespace(
                    url=url, http=http, client=client, connect=connect, engine=engine, app=app, server=server
                )
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(serve_again):
    with serve_again() as server:
        yield server


@pytest.fixture(scope="module")
def serve_again(bytes_model, make_manager, tokenizer):
    """serve_again(**options) -> another server of the same programs."""

    def make(free=BLOCKS, debug=False, batch_invariant=False, files=None, **options):
        manager = make_manager(free)
        prefix = PrefixCache(manager, key="tiny", debug=debug, files=files)
        run = dict(
            token_budget=24, drafter=PromptLookup(), prefix=prefix, batch_invariant=batch_invariant, max_logprobs=20
        )
        engine = Engine(bytes_model[0], manager, **run)
        return serving(engine, tokenizer, **options)

    return make


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
