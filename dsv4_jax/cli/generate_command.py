"""`dsv4-jax generate`."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from dsv4_jax.cli.options import (
    CacheFormat,
    Dtype,
    JsonFlag,
    MeshText,
    Weights,
    check_mesh_text,
    check_not_negative,
    check_positive,
    compiling_for,
    load_model,
    make_manager,
    notify,
)
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.parallel.mesh import make_mesh
from dsv4_jax.sizes import readable_bytes


if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from dsv4_jax.cache import CacheSchema
    from dsv4_jax.decode import CompiledModel
    from dsv4_jax.engine import Candidate

_DEFAULT_TEXT = "In the beginning"
_DEFAULT_IDS = "5,17,42"


@dataclasses.dataclass(frozen=True)
class GenerateCommand:
    """Generates from a prompt through the quantised cache.

    Prints the prompt and the new text as it comes, or the ids of the new tokens where the checkpoint has no
    tokenizer.json; then the speed, how many programs were compiled and how much memory the cache takes. Needs no
    arguments: a small model trained on the King James Bible comes with the package.

    For example:
      dsv4-jax generate
      dsv4-jax generate --checkpoint path/to/folder --prompt "In the beginning" --temperature 0.8 --top-p 0.95
      dsv4-jax generate --prompt-ids 5,17,42 --weights quantized
      dsv4-jax generate --checkpoint path/to/folder --cache-format plain --json
      dsv4-jax generate --temperature 1 --n-best 4
      dsv4-jax generate --beams 4
      dsv4-jax generate --mesh model=2

    Attributes:
      checkpoint: folder with config.json and safetensors files, in float32, bfloat16 or the release's FP8 and FP4.
        Default: the packaged model.
      prompt: the prompt as text; special tokens may be written out. Needs a tokenizer.json in the checkpoint's folder.
        Default with one: In the beginning
      prompt_ids: the prompt as token ids, separated by commas. Default without a tokenizer: 5,17,42
      max_new_tokens: the most tokens to generate.
      cache_format: how the cache is quantised. v4: as released (FP8 rows, FP4 indexer keys). per_entry: one float32
        scale a row. plain: not quantised.
      dtype: of activations, and of weights unless --weights says otherwise.
      weights: dtype of embedding and linear weights in memory. stored: weights that are FP8 or FP4 in the files stay
        so, for kernels that read them, or are dequantised on use. Default: stored on a GPU, else --dtype.
      mesh: several devices, such as model=4 or data=2,model=2. model: heads, experts and vocabulary are cut over 4
        devices, which run the same requests. data: requests are cut over 2 such groups of devices, each of which holds
        the whole model. Default: one device.
      expert_parallel: each device along the mesh's axis "model" holds some of the experts, instead of a part of each.
      context_parallel: the devices along the mesh's axis "model" hold the compressed entries of a request between
        them: so many times more fit.
      temperature: 0 always takes the likeliest token; higher is more varied.
      top_k: sample among this many likeliest tokens; 0 = all.
      top_p: sample among the likeliest tokens that together have this probability; 1 = all.
      seed: of the sampling; the same seed gives the same tokens.
      chunk: prompt tokens that go through the model at once.
      ignore_eos: go on after the model's end token.
      on_device_loop: decode in one program that runs on the device without the host between tokens; they are printed
        at the end. If the first run had to compile, a second one measures the speed.
      drafts: K, how many tokens the model's multi-token-prediction block guesses at each step, for the next step to
        verify. The tokens stay the same. Needs a checkpoint with that block.
      n_best: sample this many answers and print them at the end, ordered by mean log-probability, best first. The
        prompt is run once.
      beams: beam search with this many beams. Answers are printed as with --n-best.
      as_json: print one JSON object instead: tokens, compilations, cache_bytes, seconds, tokens_per_second, device,
        text where there is a tokenizer, accepted (how many drafts each step kept) with --drafts, and candidates
        (tokens, logprob, text) of --n-best and --beams.
    """

    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    prompt_ids: Annotated[str | None, tyro.conf.arg(metavar="1,2,3", help_behavior_hint="")] = None
    max_new_tokens: int = 128
    cache_format: CacheFormat = "v4"
    dtype: Dtype = "bfloat16"
    weights: Weights = None
    mesh: MeshText = None
    expert_parallel: bool = False
    context_parallel: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    chunk: int = 256
    ignore_eos: bool = False
    on_device_loop: bool = False
    drafts: Annotated[int, tyro.conf.arg(metavar="K")] = 0
    n_best: int = 1
    beams: int = 1
    as_json: JsonFlag = False

    def run(self) -> None:
        """Runs the command; raises ValueError or OSError where the user has to change something."""
        # All mistakes are found before the weights are read, which takes long; most before JAX is imported.
        check_positive(max_new_tokens=self.max_new_tokens, chunk=self.chunk, n_best=self.n_best, beams=self.beams)
        check_not_negative(drafts=self.drafts)
        self._check_prompt()
        self._check_search()
        checkpoint = packaged_checkpoint() if self.checkpoint is None else self.checkpoint
        config = read_config(checkpoint, mtp=self.drafts > 0)
        sizes = check_mesh_text(self.mesh, config, self.context_parallel, self.expert_parallel)
        notify(f"Starting JAX and reading {checkpoint} ...")
        import jax

        from dsv4_jax.checkpoint import TextStream, read_tokenizer
        from dsv4_jax.decode import CompiledModel, SamplingParams
        from dsv4_jax.engine.generate import engine_for_prompts, generate_on_device

        mesh = make_mesh(sizes) if sizes else None
        sampling = SamplingParams(self.temperature, self.top_k, self.top_p)
        tokenizer = read_tokenizer(checkpoint)
        option, prompt = self._read_prompt(tokenizer)
        # The last token is sampled, but never stored.
        tokens, slots = len(prompt) + self.max_new_tokens - 1, max(self.n_best, self.beams)
        # Answers to one prompt stay with it, in one part of the mesh.
        cut = dict(mesh=mesh, context_parallel=self.context_parallel)
        slots_in_all = slots * sizes.get("data", 1)
        manager = make_manager(config, slots_in_all, tokens, self.cache_format, self.dtype, drafts=self.drafts, **cut)
        manager.check_ids(prompt, option)

        bar = not self.as_json and sys.stdout.isatty()
        cut = dict(mesh=mesh, expert_parallel=self.expert_parallel)
        model = CompiledModel(load_model(checkpoint, config, self.dtype, self.weights, progress=bar, **cut))
        options: dict[str, Any] = dict(
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            seed=self.seed,
            stop_tokens=() if self.ignore_eos else config.eos_token_id,
            chunk=self.chunk,
        )
        text = None if tokenizer is None else TextStream(tokenizer)
        device = jax.devices()[0].device_kind
        notify(compiling_for(device))

        def show(token: int) -> None:
            if not self.as_json:
                _print_now(f"{token} " if text is None else text.add(token))

        if text is not None and not self.as_json:
            _print_now("".join(map(text.add, prompt)))
        found: list[Candidate] = []
        accepted: list[int] = []
        if slots > 1:

            def best() -> list[int]:
                found[:] = self._search(model, manager, prompt, options)
                return found[0].tokens

            run = _measure_loop(model, best, show)
            run = dataclasses.replace(run, timed_tokens=sum(len(candidate.tokens) for candidate in found))
        elif self.on_device_loop:

            def loop() -> list[int]:
                ((tokens, accepted[:]),) = generate_on_device(model, manager, [prompt], drafts=self.drafts, **options)
                return tokens

            run = _measure_loop(model, loop, show)
        else:
            limit, chunk = options.pop("max_new_tokens"), options.pop("chunk")
            with engine_for_prompts(model, manager, [prompt], limit, chunk, self.drafts) as engine:
                request = engine.add(prompt, max_new_tokens=limit, **options)
                run = _measure_stream(model, engine.stream(request), show)
            accepted = request.accepted
        if self.as_json:
            report = _report(run, manager.schema, device)
            if tokenizer is not None:
                report["text"] = _text_after(tokenizer, prompt, run.tokens)
            if self.drafts:
                report["accepted"] = accepted
            if found:
                report["candidates"] = [_describe(candidate, tokenizer, prompt) for candidate in found]
            print(json.dumps(report))
        else:
            if text is not None:
                _print_now(text.finish())
            for candidate in map(lambda c: _describe(c, tokenizer, prompt), found[1:]):
                print("\n" + candidate.get("text", " ".join(map(str, candidate["tokens"]))), end="")
            _print_table(run, manager.schema, device, accepted if self.drafts else [])

    def _check_prompt(self) -> None:
        """Raises ValueError where --prompt and --prompt-ids exclude each other, or are no text."""
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("--prompt and --prompt-ids exclude each other: give one of them")
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError as error:
            # Python has put a lone surrogate, U+DC00 + byte, in the place of each byte that is no UTF-8.
            byte = ord(error.object[error.start]) - 0xDC00
            raise ValueError(f"--prompt is no UTF-8 text: character {error.start} is the byte 0x{byte:02x}") from None

    def _check_search(self) -> None:
        """Raises ValueError where --n-best and --beams do not go with the other options."""
        if self.n_best > 1 and self.beams > 1:
            raise ValueError("--n-best and --beams exclude each other: give one of them")
        if self.n_best > 1 and self.temperature == 0:
            raise ValueError(f"--n-best {self.n_best} answers would all be the same: give --temperature above 0")
        if self.beams > 1 and self.temperature > 0:
            raise ValueError("--beams searches for the likeliest tokens and draws none: leave out --temperature")
        if self.drafts and max(self.n_best, self.beams) > 1:
            raise ValueError("--drafts makes one answer faster: leave out --n-best and --beams")
        if self.on_device_loop and max(self.n_best, self.beams) > 1:
            raise ValueError("--on-device-loop makes one answer: leave out --n-best and --beams")

    def _search(self, model: Any, manager: Any, prompt: list[int], options: dict[str, Any]) -> "list[Candidate]":
        from dsv4_jax.engine import beam_search, n_best

        if self.n_best > 1:
            return n_best(model, manager, prompt, n=self.n_best, **options)
        options = {name: options[name] for name in ("max_new_tokens", "stop_tokens", "chunk")}
        return beam_search(model, manager, prompt, beams=self.beams, **options)

    def _read_prompt(self, tokenizer: "Tokenizer | None") -> tuple[str, list[int]]:
        """(the option that the prompt comes from, its token ids)."""
        if self.prompt_ids is not None or (self.prompt is None and tokenizer is None):
            return "--prompt-ids", _parse_ids(_DEFAULT_IDS if self.prompt_ids is None else self.prompt_ids)
        if tokenizer is None:
            raise ValueError("--prompt needs a tokenizer.json beside the weights, and there is none: use --prompt-ids")
        return "--prompt", tokenizer.encode(_DEFAULT_TEXT if self.prompt is None else self.prompt).ids


@dataclasses.dataclass(frozen=True)
class _Run:
    tokens: list[int]
    compilations: int
    seconds: float  # everything after loading
    timed_tokens: int  # generated in timed_seconds
    timed_seconds: float  # without compilation
    timed: str  # what timed_seconds measures

    @property
    def tokens_per_second(self) -> float | None:
        return self.timed_tokens / self.timed_seconds if self.timed_tokens else None


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} must be whole numbers separated by commas, such as 5,17,42") from None


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _text_after(tokenizer: "Tokenizer", prompt: list[int], tokens: list[int]) -> str:
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


def _describe(candidate: "Candidate", tokenizer: "Tokenizer | None", prompt: list[int]) -> dict[str, Any]:
    text = {} if tokenizer is None else dict(text=_text_after(tokenizer, prompt, candidate.tokens))
    return dict(tokens=candidate.tokens, logprob=candidate.logprob) | text


def _measure_stream(model: "CompiledModel", stream: Iterator[int], show: Callable[[int], None]) -> _Run:
    """Times the tokens whose steps compiled nothing. The first token does not count: its step runs the prompt."""
    tokens: list[int] = []
    timed: list[float] = []
    before = known = model.compilations
    start = last = time.perf_counter()
    for token in stream:
        now, programs = time.perf_counter(), model.compilations
        if tokens and programs == known:
            timed.append(now - last)
        tokens.append(token)
        show(token)
        known, last = programs, time.perf_counter()
    seconds = time.perf_counter() - start
    return _Run(tokens, known - before, seconds, len(timed), sum(timed), f"{len(timed)} tokens, none compiling")


def _measure_loop(model: "CompiledModel", generate: Callable[[], list[int]], show: Callable[[int], None]) -> _Run:
    """Times a whole run, the prompt included, that compiled nothing."""
    before, start = model.compilations, time.perf_counter()
    tokens = generate()
    seconds = timed = time.perf_counter() - start
    compilations = model.compilations - before
    for token in tokens:
        show(token)
    if compilations:
        start = time.perf_counter()
        generate()
        timed = time.perf_counter() - start
    return _Run(tokens, compilations, seconds, len(tokens), timed, "a whole run, prompt included, none compiling")


def _report(run: _Run, schema: "CacheSchema", device: str) -> dict[str, Any]:
    return dict(
        tokens=run.tokens,
        compilations=run.compilations,
        cache_bytes=dict(
            per_token=schema.bytes_per_token,
            per_request=schema.bytes_per_request,
            total=schema.memory_bytes(),
            dense_bf16_per_token=schema.dense_bytes_per_token,
        ),
        seconds=run.seconds,
        tokens_per_second=run.tokens_per_second,
        timed_tokens=run.timed_tokens,
        device=device,
    )


def _print_table(run: _Run, schema: "CacheSchema", device: str, accepted: list[int]) -> None:
    speed = run.tokens_per_second
    dense, paged = schema.dense_bytes_per_token, schema.bytes_per_token
    saving = f"; dense BF16: {dense}, {dense / paged:.1f} times as many" if paged else ""
    table = Table(title=f"{len(run.tokens)} new tokens on {device}", show_header=False, title_justify="left")
    table.add_row("tokens/s", f"{speed:.1f} ({run.timed})" if speed else "not measured: every step had to compile")
    if accepted:
        table.add_row("tokens a step", f"{len(run.tokens) / len(accepted):.2f}, drafts included")
    table.add_row("time", f"{run.seconds:.2f} s after loading, compilation included")
    table.add_row("compilations", str(run.compilations))
    table.add_row("cache bytes a token", f"{paged:.2f}{saving}")
    table.add_row(
        "cache bytes a request", f"{schema.bytes_per_request:,}, whatever its length: windows and compressor states"
    )
    total = schema.memory_bytes()
    table.add_row("cache bytes in all", f"{total:,} ({readable_bytes(total)}; format {schema.kv_format.name})")
    print()
    Console().print(table)
