"""The state that all HTTP requests to the server share."""

import dataclasses
import functools
import time

from tokenizers import Tokenizer

from dsv4_jax.engine.grammar import Vocabulary
from dsv4_jax.serve.async_engine import AsyncEngine
from dsv4_jax.serve.chat import Release, make_chat
from dsv4_jax.serve.choices import TokenNames
from dsv4_jax.serve.server_metrics import ServerMetrics


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of a server that do not concern the engine.

    Attributes:
      model_name: name of the model in the API.
      end_tokens: ids that end an answer, unless the client sends `ignore_eos`.
      api_key: key that clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`; None = no key is needed.
      allowed_hosts: names and addresses of the server that the headers Host and Origin may have; None = any. With None
        and no API key, a web page could reach the server from a visitor's browser by DNS rebinding.
      request_seconds: time limit of a request in seconds, including the time that it waits.
      adapters: names of the model's adapters (see `nn.lora`), each of which is a model in the API, too.
      release: release in whose encoding of conversations the model was trained: "april", "0731" or "v41". The first two
        are DeepSeek-V4's, with different prompts for reasoning effort. "0731" includes later releases of V4.

    Raises:
      ValueError: two models have the same name.
    """

    model_name: str
    end_tokens: tuple[int, ...] = ()
    api_key: str | None = None
    allowed_hosts: frozenset[str] | None = None
    request_seconds: float = 600.0
    release: Release = "0731"
    adapters: tuple[str, ...] = ()

    def __post_init__(self):
        if len({*self.models}) < len(self.models):
            raise ValueError(f"model_name={self.model_name!r} and adapters={self.adapters} must be different names")

    @property
    def models(self) -> tuple[str, ...]:
        """The names of models in the API: that of the model, then its adapters."""
        return self.model_name, *self.adapters


class Service:
    """The objects that endpoints of the application use, such as the engine and the tokenizer.

    Attributes:
      engine, tokenizer, options: arguments of `create_app`.
      manager: the engine's manager.
      chat: Chat, which encodes conversations as prompts; None without a tokenizer.
      names: TokenNames, which formats tokens in log-probabilities.
      metrics: metrics of the server.
      max_body_bytes: maximum size of a request's body in bytes.
      created: time when the server was made, in seconds since 1970.
      stopping: whether the server is shutting down and refuses new requests.
      compile: function that works as `Vocabulary.compile`, and keeps the 64 most recently used grammars.
    """

    stopping = False

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer | None, options: ServerOptions):
        self.engine = engine
        self.manager = engine.engine.manager
        self.tokenizer = tokenizer
        self.options = options
        self.chat = None if tokenizer is None else make_chat(tokenizer, options.models, options.release)
        self.names = TokenNames(tokenizer)
        self.metrics = ServerMetrics(engine)
        # A body has room for a prompt as long as the context, even if each token takes several escaped characters.
        self.max_body_bytes = 2**20 + 64 * self.manager.schema.max_context
        self.created = int(time.time())

        self.compile = functools.lru_cache(maxsize=64)(lambda lark: self.vocabulary.compile(lark))

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary for grammars, made at first use. Raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json")
        return Vocabulary(self.tokenizer, self.manager.schema.config.vocab_size, self.options.end_tokens)
