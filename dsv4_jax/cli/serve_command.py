"""`dsv4-jax serve`."""

import dataclasses
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any

import tyro

from dsv4_jax.cli.options import (
    CacheFormat,
    Dtype,
    MeshText,
    Weights,
    check_mesh_text,
    check_positive,
    load_model,
)
from dsv4_jax.data import block_tokens, packaged_checkpoint, read_config
from dsv4_jax.parallel.mesh import make_mesh


_KEY_VARIABLE = "DSV4_JAX_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServeCommand:
    """Serves a model over HTTP, in OpenAI's protocol.

    Clients that talk to OpenAI talk to http://HOST:PORT/v1: the openai package, chat front ends, load generators. The
    page at / takes a prompt and shows tokens, accepted drafts and cache use. /health, /ready and /metrics (Prometheus)
    are for who runs the server. It listens at once, and answers when its programs are compiled, which /ready tells.
    Ctrl-C or SIGTERM lets running requests end.

    For example:
      dsv4-jax serve
      dsv4-jax serve --checkpoint path/to/folder --port 8080 --max-requests 32 --context 16384
      DSV4_JAX_API_KEY=secret dsv4-jax serve --host 0.0.0.0

      curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \\
        -d '{"prompt": "In the beginning", "max_tokens": 64, "temperature": 0}'

    Attributes:
      checkpoint: folder with config.json and safetensors files, and tokenizer.json for text. Default: the packaged
        model.
      host: address to listen at. Others than 127.0.0.1 need an API key.
      port: port to listen at; 0 takes a free one.
      api_key: what clients must send as Authorization: Bearer KEY. Default: the environment variable DSV4_JAX_API_KEY,
        which other users of the machine do not see.
      insecure: listen at any address without an API key.
      mesh: several devices, such as model=4 or data=2,model=2. model: heads, experts and vocabulary are cut over 4
        devices, which run the same requests. data: requests are cut over 2 such groups of devices, each of which holds
        the whole model. Default: one device.
      expert_parallel: each device along the mesh's axis "model" holds some of the experts, instead of a part of each.
      context_parallel: the devices along the mesh's axis "model" hold the compressed entries of a request between
        them: so many times more fit.
      model_name: what clients call the model. Default: the name of the checkpoint's folder.
      max_requests: requests that run at once; each has a slot in the cache.
      max_waiting: requests that wait for a slot at most; others get status 429.
      context: tokens of a request at most, prompt and new ones. Default: 4096, or the model's context if it is shorter.
      memory: of the cache, such as 20GiB. When its blocks are all taken, requests wait. Default: what full slots need.
      token_budget: tokens a step runs at most. More read prompts faster and delay running requests longer.
      drafts: tokens a step that prompt lookup may guess of each request; 0 = no speculative decoding.
      num_scheduler_steps: decode steps that run on the device without the host between them while nobody waits; their
        tokens come together. Needs --drafts 0, and pays with several GPUs, where the host is slower than the steps.
      batch_invariant: run all steps in one program: a request and its seed then give the same tokens whatever else
        runs, to the last bit of a logit. Decode steps are slower.
      request_seconds: the longest that a request may take, waiting included.
      grace_seconds: how long running requests may go on when the server is told to stop.
      cache_format: how the cache is quantised, as for generate.
      dtype: of activations, and of weights unless --weights says otherwise.
      weights: dtype of embedding and linear weights in memory, as for generate.
    """

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[str | None, tyro.conf.arg(metavar="KEY", help_behavior_hint="")] = None
    insecure: bool = False
    mesh: MeshText = None
    expert_parallel: bool = False
    context_parallel: bool = False
    model_name: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    max_requests: int = 16
    max_waiting: int = 256
    context: Annotated[int | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    memory: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    token_budget: int = 256
    drafts: int = 2
    num_scheduler_steps: int = 1
    batch_invariant: bool = False
    request_seconds: float = 600.0
    grace_seconds: float = 30.0
    cache_format: CacheFormat = "v4"
    dtype: Dtype = "bfloat16"
    weights: Weights = None

    def run(self) -> None:
        """Runs the server until it is told to stop; raises ValueError or OSError after a user's mistake."""
        missing = [name for name in ("pydantic", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            raise ValueError(f"dsv4-jax serve needs {', '.join(missing)}: pip install 'dsv4-jax[serve]'")
        from dsv4_jax.checkpoint import read_tokenizer
        from dsv4_jax.serve import AsyncEngine, HTTPServer, ServerOptions, create_app
        from dsv4_jax.serve.server import listen

        # All mistakes are found before the weights are read, which takes long.
        api_key = self._check()
        checkpoint = packaged_checkpoint() if self.checkpoint is None else self.checkpoint
        config, tokenizer = read_config(checkpoint), read_tokenizer(checkpoint)
        folder = checkpoint.parent if checkpoint.is_file() else checkpoint
        options = ServerOptions(
            model_name=self.model_name or folder.resolve().name,
            end_tokens=tuple(config.eos_token_id),
            api_key=api_key,
            request_seconds=self.request_seconds,
        )
        with listen(self.host, self.port) as listener:
            engine = AsyncEngine(self._engine(checkpoint, config, options), max_waiting=self.max_waiting)
            host = f"[{self.host}]" if ":" in self.host else self.host
            print(
                f"{options.model_name}: http://{host}:{listener.getsockname()[1]} when its programs are compiled",
                flush=True,
            )
            HTTPServer(create_app(engine, tokenizer, options), grace_seconds=self.grace_seconds).run([listener])

    def _check(self) -> str | None:
        """Checks the options; returns the API key."""
        steps = self.num_scheduler_steps
        check_positive(max_requests=self.max_requests, token_budget=self.token_budget, num_scheduler_steps=steps)
        if steps > 1 and (self.drafts or self.batch_invariant):
            raise ValueError(f"--num-scheduler-steps {steps} needs --drafts 0, and no --batch_invariant")
        if self.context is not None:
            check_positive(context=self.context)
        for name in ("max_waiting", "drafts"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 0")
        for name in ("request_seconds", "grace_seconds"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 0")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port {self.port} must be from 0 to 65535")
        api_key = os.environ.get(_KEY_VARIABLE) if self.api_key is None else self.api_key
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise ValueError("the API key must be one or more printable ASCII characters without spaces")
        if self.host != "127.0.0.1" and api_key is None and not self.insecure:
            raise ValueError(
                f"--host {self.host} lets others use this server: give --api-key KEY (or the environment variable "
                f"{_KEY_VARIABLE}), or --insecure if that is what you want"
            )
        return api_key

    def _engine(self, checkpoint: Path, config: Any, options: Any) -> Any:
        import jax.numpy as jnp

        from dsv4_jax.engine import Engine, PromptLookup
        from dsv4_jax.host import KVCacheManager, PrefixCache
        from dsv4_jax.serve.protocol import MAX_LOGPROBS

        limit = config.max_position_embeddings
        context = min(4096, limit) if self.context is None else self.context
        if context > limit:
            raise ValueError(f"--context {context} is longer than the model's: max_position_embeddings={limit}")
        sizes = check_mesh_text(self.mesh, config, self.context_parallel, self.expert_parallel)
        mesh = make_mesh(sizes) if sizes else None
        size = block_tokens(config)
        full = self.max_requests * -(-context // size)
        full += -full % math.prod(sizes.values())
        manager = KVCacheManager(
            config,
            memory=self.memory,
            num_blocks=full if self.memory is None else None,
            max_requests=self.max_requests,
            max_context=context,
            block_tokens=size,
            kv_format=self.cache_format,
            dtype=jnp.dtype(self.dtype),
            max_query_tokens=1 + self.drafts,
            mesh=mesh,
            context_parallel=self.context_parallel,
        )
        cut = dict(mesh=mesh, expert_parallel=self.expert_parallel)
        model = load_model(checkpoint, config, self.dtype, self.weights, progress=False, **cut)
        return Engine(
            model,
            manager,
            token_budget=max(self.token_budget, self.max_requests * (1 + self.drafts)),
            drafter=PromptLookup() if self.drafts else None,
            prefix=PrefixCache(manager, key=options.model_name),
            batch_invariant=self.batch_invariant,
            num_scheduler_steps=self.num_scheduler_steps,
            max_logprobs=min(MAX_LOGPROBS, config.vocab_size),
        )
