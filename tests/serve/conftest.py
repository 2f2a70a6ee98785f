"""Servers in this process, of a small model whose tokens are bytes and of one whose answers are given."""

import contextlib
import dataclasses
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import anthropic
import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from dsv4_jax.checkpoint import read_tokenizer
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import BlockAllocator, KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.serve import AsyncEngine, HTTPServer, ServerOptions, create_app
from dsv4_jax.serve.chat import make_chat
from tests.byte_tokenizer import write_byte_tokenizer
from tests.paths import PACKAGED


SLOTS = 4
BLOCKS = 24
CONTEXT = 256

# Of the model whose answers are given.
SCRIPT_CONTEXT = 8192
VOCABULARY = 272
END = 257
THINK = 258
NAMES = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜User｜>", "<｜Assistant｜>")
NAMES += ("｜DSML｜", "<｜latest_reminder｜>", "<｜System｜>")  # the last is V4.1's


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


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """A tokenizer of bytes with the release's tokens, which encodes them where their names stand."""
    path = tmp_path_factory.mktemp("release") / "tokenizer.json"
    write_byte_tokenizer(path, {name: 256 + i for i, name in enumerate(NAMES)})
    return read_tokenizer(path)


@jax.tree_util.register_pytree_node_class
class ScriptedModel:
    """Draws the tokens that `script` has, [SCRIPT_CONTEXT + 1] by position."""

    script = np.zeros((SCRIPT_CONTEXT + 1,), np.int32)

    def __call__(self, cache, batch):
        shape = jax.ShapeDtypeStruct(batch.positions.shape, jnp.int32)
        read = lambda positions: self.script[positions + 1]  # noqa: E731
        tokens = jax.pure_callback(read, shape, batch.positions)
        return tokens[:, None].astype(jnp.float32), cache.begin_step(batch)

    def logits(self, hidden):
        return 100 * jax.nn.one_hot(hidden[..., 0].astype(jnp.int32), VOCABULARY)

    def draft(self, tokens, count):
        """Guesses them too, so that an answer takes few steps."""
        return self.script[len(tokens) : len(tokens) + count]

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


@pytest.fixture(scope="package")
def scripted(release):
    """A server, and `say(text)`, which makes the model's next answer. `prompts` has the prompts since then."""
    config = DSV4Config.from_hf(PACKAGED).with_layers([LayerSpec.csa()])
    config = dataclasses.replace(config, vocab_size=VOCABULARY, max_position_embeddings=SCRIPT_CONTEXT)
    sizes = dict(max_requests=2, max_context=SCRIPT_CONTEXT, block_tokens=64, max_query_tokens=48)
    manager = KVCacheManager(config, num_blocks=256, **sizes)
    prefix = PrefixCache(manager, key="scripted")
    model = ScriptedModel()
    engine = Engine(model, manager, drafter=model, token_budget=1024, prefix=prefix)
    with serving(engine, release) as server:
        server.prompts = []

        def say(text):
            server.tokens = [*release.encode(text).ids, END]
            server.prompts.clear()

        def script(chat):
            encode = chat.encode

            def encode_and_script(conversation, effort):
                ids = encode(conversation, effort)
                room = ScriptedModel.script[len(ids) :]
                room[:] = END
                room[: len(server.tokens)] = server.tokens[: len(room)]
                server.prompts.append(ids)
                return ids

            chat.encode = encode_and_script

        server.say = say
        server.script = script
        script(server.app.state.service.chat)
        yield server


@pytest.fixture
def v41(scripted, release, monkeypatch):
    """The server of `scripted`, whose chats are in V4.1's encoding."""
    chat = make_chat(release, ["tiny"], "v41")
    scripted.script(chat)
    monkeypatch.setattr(scripted.app.state.service, "chat", chat)
    return scripted


@pytest.fixture
def claude(scripted):
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        yield client
