"""The state that all requests to the server share."""

import dataclasses
import functools
import time

from tokenizers import Tokenizer

from dsv4_jax.engine.grammar import Vocabulary
from dsv4_jax.serve.async_engine import AsyncEngine
from dsv4_jax.serve.chat import EffortPrompts, make_chat
from dsv4_jax.serve.choices import TokenNames
from dsv4_jax.serve.server_metrics import ServerMetrics


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of a server, besides its engine.

    Attributes:
      model_name: name of the model in the API.
      end_tokens: ids that end an answer, unless the client sends `ignore_eos`.
      api_key: key that clients must send as `Authorization: Bearer KEY`; None for no key.
      allowed_hosts: names and addresses that clients may call the server by; None for any, with which a page of
        another site could reach a server without a key, by a name of its own that leads here.
      request_seconds: time limit of a request, waiting included.
      effort_prompts: release whose prompts for reasoning effort the model knows: April's, or 0731's and later ones'.
    """

    model_name: str
    end_tokens: tuple[int, ...] = ()
    api_key: str | None = None
    allowed_hosts: frozenset[str] | None = None
    request_seconds: float = 600.0
    effort_prompts: EffortPrompts = "0731"


class Service:
    """The engine, the tokenizer and everything else that endpoints use.

    Attributes:
      engine, tokenizer, options: arguments of `create_app`.
      chat: encodes conversations as prompts; None without a tokenizer.
      names: names of tokens in log-probabilities.
      metrics: metrics of the server.
      max_body_bytes: maximum size of a body.
      created: time when the server was made, in seconds since 1970.
      stopping: whether new requests are refused because the server is shutting down.
      compile: compiles a grammar as `Vocabulary.compile` does, or finds one of the last 64.
    """

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer | None, options: ServerOptions):
        self.engine = engine
        self.tokenizer = tokenizer
        self.options = options
        self.chat = None if tokenizer is None else make_chat(tokenizer, options.model_name, options.effort_prompts)
        self.names = TokenNames(tokenizer)
        self.metrics = ServerMetrics(engine)
        # Room for a prompt of the longest context, even if each token is several escaped characters.
        self.max_body_bytes = 2**20 + 64 * engine.engine.manager.schema.max_context
        self.created = int(time.time())
        self.stopping = False
        self.compile = functools.lru_cache(maxsize=64)(lambda lark: self.vocabulary.compile(lark))

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens, as grammars see them. Reading them takes a second."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json")
        size = self.engine.engine.manager.schema.config.vocab_size
        return Vocabulary(self.tokenizer, size, self.options.end_tokens)
