"""The command `dsv4-jax serve`."""

import contextlib
import functools
import importlib.util
import ipaddress
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any, Literal

from dsv4_jax.cli import options, startup
from dsv4_jax.cli.model_options import RandomModelOptions
from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.config.draft_config import check_min_confidence
from dsv4_jax.parallel.mesh import check_divisible


_KEY_VARIABLE = "DSV4_JAX_API_KEY"
# Python's switch interval: the maximum time for which another thread keeps the GIL while the engine waits for the GIL.
# Measured with 32 streams, Python's default of 5 ms was as fast (docs/notes/serving.md).
_SWITCH_SECONDS = 5e-4


class ServeCommand(RandomModelOptions):
    """Serves a model over HTTP, in OpenAI's and Anthropic's protocols.

    OpenAI's clients connect to http://HOST:PORT/v1: the openai package, chat front ends, load generators. The page at /
    takes a prompt and shows tokens, accepted drafts and cache use. /health, /ready and /metrics (Prometheus) are
    operational endpoints. The server listens at once, and answers when its programs are compiled; /ready tells when.
    After Ctrl-C or SIGTERM, running requests may finish.

    For example:
      dsv4-jax serve
      dsv4-jax serve --checkpoint path/to/folder --port 8080 --max-requests 32 --context 16384
      dsv4-jax serve --random-weights v4_flash --expert-memory auto
      DSV4_JAX_API_KEY=secret dsv4-jax serve --host 0.0.0.0

      curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"model": "king_james", "prompt": "In the beginning", "max_tokens": 64}'

    Attributes:
      checkpoint: folder with config.json and safetensors files, and tokenizer.json for text. Default: the packaged
        model.
      host: address to listen at. An address that other machines reach needs an API key, or --insecure.
      port: port to listen at; 0 takes a free one.
      api_key: key that clients must send as Authorization: Bearer KEY. Default: the environment variable
        DSV4_JAX_API_KEY, which other users of the machine do not see.
      insecure: listen at any address without an API key.
      allowed_hosts: additional names by which clients may call the server, separated by commas. Other names are refused
        if this option is given, or if the server listens at this machine's own addresses without an API key.
      model_name: name of the model in the API. Default: the name of the checkpoint's folder.
      max_requests: maximum number of running requests; each has a slot in the cache.
      max_waiting: maximum number of requests that wait for a slot; further ones get status 429.
      context: maximum number of tokens in a request, prompt and new ones. Default: 4096, or the model's context if
        it is shorter.
      memory: size of the cache, such as 20GiB. Requests wait while all its blocks are taken. Default: enough for
        --max-requests requests of --context tokens.
      token_budget: maximum number of tokens in a step. A larger budget reads prompts faster and delays running requests
        longer. Default: 256; with --batch-invariant the size of a decode step, --max-requests times (1 + --drafts).
      drafts: number of tokens that may be drafted for a request in a step; 0 = no speculative decoding.
      drafter: source of drafts. prompt: the request's own text; each step then waits for the one before it. model:
        the model's draft layers, a multi-token-prediction block or DSpark's layers, which the checkpoint must have.
      batch_invariant: run all steps in one program, so that a request's logits do not depend on other requests, to the
        last bit. Every step then takes as long as the largest, see --token-budget for its size.
      structured_output: compile the programs for answers of a given form (JSON, required tool calls) at the start.
        Without this, the first request for such an answer waits for its programs.
      effort_prompts: prompts for reasoning effort that the model knows: april has one for max; 0731 and V4's later
        releases have others for high and max; v41 is V4.1's whole encoding, with numbers. Default: as config.json says,
        which has DSpark's fields in V4's releases since 0731.
      adapters: adapters (LoRA) in PEFT's format to serve beside the model, such as poet=path/to/folder,coder=other.
        Requests choose one by its name in their field "model".
      snapshots: block boundaries at which later prompts can continue, because the prefix cache keeps the rows that the
        next token reads there. last: only each request's last boundary, and those where prompts part. See "The prefix
        cache" in docs/requests.md for the memory of snapshots.
      prefix_dir: folder that keeps the prefix cache: blocks go there when they leave memory, and all blocks when the
        server stops. A later server with the same weights finds them. Several servers may share it. Default: no folder.
      prefix_size: with --prefix-dir: maximum size of its files together, such as 200GB. Beyond it, the least recently
        used files are deleted. Default: 50GB.
      request_seconds: time limit of a request in seconds, waiting included.
      grace_seconds: seconds that running requests have to finish after the server is told to stop.
    """

    checkpoint: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    insecure: bool = False
    allowed_hosts: str | None = None
    model_name: str | None = None
    max_requests: int = 16
    max_waiting: int = 256
    context: int | None = None
    memory: str | None = None
    token_budget: int | None = None
    drafts: int = 0
    drafter: Literal["prompt", "model"] = "prompt"
    min_confidence: options.MinConfidence = 0.0
    batch_invariant: bool = False
    structured_output: bool = True
    effort_prompts: Literal["april", "0731", "v41"] | None = None
    adapters: str | None = None
    snapshots: Literal["all", "last"] = "all"
    prefix_dir: Path | None = None
    prefix_size: str | None = None
    request_seconds: float = 600.0
    grace_seconds: float = 30.0

    def run(self) -> None:
        """Runs the server until it is told to stop. Raises ValueError or OSError after a user's mistake."""
        # Options are checked before JAX is imported and the weights are read, which takes long.
        api_key = self._check()
        checkpoint, config = self.open_model(self.checkpoint, mtp=self.drafter == "model")
        context = self._check_model(config)
        folder = checkpoint.parent if checkpoint.is_file() else checkpoint
        name = self.model_name or folder.resolve().name
        if name in self._adapters:
            raise ValueError(f"--adapters {self.adapters}: {name} is the name of the model itself, see --model-name")
        sys.setswitchinterval(_SWITCH_SECONDS)
        with _listen(self.host, self.port) as listener:
            from dsv4_jax.checkpoint import read_tokenizer
            from dsv4_jax.serve import AsyncEngine, HTTPServer, ServerOptions, create_app
            from dsv4_jax.serve.chat import find_release

            tokenizer = read_tokenizer(checkpoint)
            engine = AsyncEngine(self._engine(checkpoint, config, context, name), max_waiting=self.max_waiting)
            address = f"[{self.host}]" if ":" in self.host else self.host
            url = f"http://{address}:{listener.getsockname()[1]}"
            print(f"{startup.visible(name)}: {url} when its programs are compiled", flush=True)
            server_options = ServerOptions(
                name,
                tuple(config.eos_token_id),
                api_key,
                self._hosts(api_key),
                self.request_seconds,
                self.effort_prompts or find_release(folder, config),
                tuple(self._adapters),
            )
            HTTPServer(create_app(engine, tokenizer, server_options), grace_seconds=self.grace_seconds).run([listener])

    def _check(self):
        """Checks the options that do not depend on the model.

        Returns:
          The API key, from --api-key or the environment; None if there is none.

        Raises:
          ValueError: a package for serving is missing, or an option is wrong.
        """
        missing = [
            name
            for name in ("deepseek_recipe", "llguidance", "pydantic", "starlette", "uvicorn")
            if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise ValueError(f"dsv4-jax serve needs {', '.join(missing)}: pip install 'dsv4-jax[serve]'")
        if self.drafter == "model" and not self.drafts:
            raise ValueError("--drafter model needs --drafts of at least 1")
        _ = self._adapters
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.prefix_size is not None:
            parse_bytes(self.prefix_size, "prefix_size")
            if self.prefix_dir is None:
                raise ValueError(f"--prefix-size {self.prefix_size} needs --prefix-dir, the folder of the files")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port {self.port} must be from 0 to 65535")
        api_key = os.environ.get(_KEY_VARIABLE) if self.api_key is None else self.api_key
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise ValueError("the API key must be one or more printable ASCII characters without spaces")
        if not _is_loopback(self.host) and api_key is None and not self.insecure:
            raise ValueError(
                f"--host {self.host} lets others use this server: give --api-key KEY (or the environment variable "
                f"{_KEY_VARIABLE}), or --insecure if that is what you want"
            )
        return api_key

    def _hosts(self, api_key):
        """Returns the host names by which clients may call the server; None if all names are allowed."""
        if self.allowed_hosts is None and (api_key is not None or not _is_loopback(self.host)):
            return None
        names = {name.strip() for name in (self.allowed_hosts or "").lower().split(",")} - {""}
        return frozenset({"localhost", "127.0.0.1", "::1", self.host, *names})

    @property
    def _step_tokens(self) -> int:
        """The number of tokens of the largest step: the token budget, or a decode step of all requests if it is larger.

        A decode step has a token and the drafts of each request.
        """
        decode = self.max_requests * (1 + self.drafts)
        return max(decode, self.token_budget or (decode if self.batch_invariant else 256))

    def _check_model(self, config):
        """Checks the options that depend on the model's configuration.

        Returns the maximum number of tokens of a request. Raises ValueError if an option does not fit the model.
        """
        check_min_confidence(self.min_confidence, config.drafts)
        limit = config.max_position_embeddings
        context = min(4096, limit) if self.context is None else self.context
        if context > limit:
            raise ValueError(f"--context {context} is longer than the model's: max_position_embeddings={limit}")
        check_divisible(self.check_devices(config), max_requests=self.max_requests)
        return context

    def _engine(self, checkpoint, config, context, name):
        """Returns the engine. Its programs are compiled while the weights are read, unless there are adapters."""
        from dsv4_jax.checkpoint import load_adapters
        from dsv4_jax.decode import CompiledModel
        from dsv4_jax.engine import Engine, PromptLookup
        from dsv4_jax.serve.protocol import MAX_LOGPROBS

        manager = self.make_manager(config, self.max_requests, context, self.drafts, self.memory)
        options: dict[str, Any] = {
            "token_budget": self._step_tokens,
            "drafter": None if not self.drafts else "model" if self.drafter == "model" else PromptLookup(),
            "min_confidence": self.min_confidence,
            "batch_invariant": self.batch_invariant,
            "max_logprobs": min(MAX_LOGPROBS, config.vocab_size),
            "structured_output": self.structured_output,
        }
        prefix = self._prefix(manager, checkpoint, name)
        begin_programs = functools.partial(Engine.begin_programs, manager=manager, **options)
        model = self.load_model(
            checkpoint,
            manager.schema,
            step_tokens=self._step_tokens,
            begin_programs=None if self._adapters else begin_programs,  # with adapters, steps have other programs
        )
        if self._adapters:
            module = model.module
            load_adapters(module, self._adapters, dtype=module.model.dtype)
            model = CompiledModel(module, model.expert_memory)
        return Engine(model, manager, prefix=prefix, **options)

    @functools.cached_property
    def _adapters(self) -> dict[str, Path]:
        """The folders of --adapters by name. Raises ValueError if it is malformed or a folder holds no adapter."""
        folders = {}
        for item in self.adapters.split(",") if self.adapters else ():
            name, _, folder = map(str.strip, item.partition("="))
            if not name.isprintable() or not name or not folder or name in folders:
                raise ValueError(f"--adapters {self.adapters} must be NAME=DIR, with different names, by commas")
            folders[name] = Path(folder)
        for name, path in folders.items():
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                if not (path / file).is_file():
                    raise ValueError(f"--adapters {name}={path}: there is no {path / file}")
        return folders

    def weights_key(self, checkpoint: Path) -> str:
        """Returns a text that identifies the weights of the model and of the adapters, and the way of running them.

        The text differs between checkpoints, values of --weights and JAX platforms, so that prefixes cached with one of
        them are not used with another.
        """
        import jax

        from dsv4_jax.checkpoint import weights_fingerprint

        weights = weights_fingerprint(checkpoint) if self.random_weights is None else f"random, skew={self.skew}"
        files = {
            name: (weights_fingerprint(path / "adapter_model.safetensors"), (path / "adapter_config.json").read_text())
            for name, path in self._adapters.items()
        }
        adapters = f", adapters={files}" if files else ""
        return f"{weights}, weights={self.weights}, {jax.default_backend()}{adapters}"

    def _prefix(self, manager, checkpoint, name):
        """Returns the prefix cache. If --prefix-dir is given, the prefix cache has files in this folder.

        Raises ValueError if the folder cannot be used.
        """
        from dsv4_jax.host import PrefixCache, PrefixFiles

        every = None if self.snapshots == "last" else 1
        if self.prefix_dir is None:
            return PrefixCache(manager, key=name, every=every)
        startup.show_log()
        try:
            files = PrefixFiles(self.prefix_dir, self.prefix_size or "50GB")
            return PrefixCache(manager, key=self.weights_key(checkpoint), every=every, files=files)
        except ValueError as error:
            message = str(error).replace("directory=", "--prefix-dir ").replace("max_bytes=", "--prefix-size ")
            raise ValueError(message) from None


def _is_loopback(host):
    """Returns whether a server that listens at `host` can be reached from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _listen(host, port):
    """Returns a listening socket. Port 0 stands for any free port. Raises ValueError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port} cannot be listened at: {error.strerror}") from None
