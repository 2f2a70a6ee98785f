"""The command `dsv4-jax generate`."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsv4_jax.cli import options, startup
from dsv4_jax.cli.model_options import RandomModelOptions
from dsv4_jax.common.arguments import check_temperature, check_top_k, check_top_p
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.config.draft_config import check_min_confidence


_DEFAULT_TEXT = "In the beginning"
_DEFAULT_IDS = (5, 17, 42)
SHORT_PROMPT = 32  # maximum number of tokens of a prompt that is read token by token, in the decode program


class GenerateCommand(RandomModelOptions):
    """Generates from a prompt through the quantized cache.

    Prints the prompt and the new text as it comes, or the ids of the new tokens if the checkpoint has no
    tokenizer.json. Then prints the speed, the number of compiled programs and the memory of the cache. Needs no
    arguments: a small model trained on the King James Bible comes with the package.

    For example:
      dsv4-jax generate
      dsv4-jax generate --checkpoint path/to/folder --prompt "In the beginning" --temperature 0.8 --top-p 0.95
      dsv4-jax generate --prompt-ids 5,17,42 --weights quantized
      dsv4-jax generate --checkpoint path/to/folder --cache-format plain --json
      dsv4-jax generate --temperature 1 --n-best 4
      dsv4-jax generate --beams 4
      dsv4-jax generate --mesh model=2
      dsv4-jax generate --random-weights v4_flash --expert-memory auto

    Attributes:
      checkpoint: folder with config.json and safetensors files, in float32, bfloat16 or the release's FP8 and FP4.
        Default: the packaged model.
      prompt: the prompt as text; special tokens may be written out. Needs a tokenizer.json in the checkpoint's folder.
        Default with a tokenizer: In the beginning
      prompt_ids: the prompt as token ids, separated by commas. Default without a tokenizer: 5,17,42
      max_new_tokens: maximum number of tokens to generate.
      temperature: 0 always takes the likeliest token; higher is more varied.
      top_k: sample among this many likeliest tokens; 0 = all.
      top_p: sample among the likeliest tokens that together have this probability; 1 = all.
      seed: seed of the sampling; the same seed gives the same tokens.
      chunk: number of prompt tokens in a prefill step. Default: 256, or 1 for a prompt of up to 32 tokens, which then
        needs no program of its own to be compiled.
      ignore_eos: continue after the model's end token.
      drafts: number of tokens K to draft in each step, for the next step to verify. The checkpoint's draft layers make
        them: a multi-token-prediction block or DSpark's layers. The output is the same.
      n_best: sample this many answers and print them at the end, the highest mean log-probability first. The prompt is
        run once.
      beams: beam search with this many beams. Answers are printed as with --n-best.
      json: print one JSON object instead: tokens, compilations, cache_bytes, seconds, tokens_per_second, device;
        text if there is a tokenizer; accepted (number of accepted drafts of each step) with --drafts; candidates
        (tokens, logprob, text) with --n-best and --beams.
    """

    checkpoint: Path | None = None
    prompt: str | None = None
    prompt_ids: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    chunk: int | None = None
    ignore_eos: bool = False
    drafts: int = 0
    min_confidence: options.MinConfidence = 0.0
    n_best: int = 1
    beams: int = 1
    json: bool = False

    def run(self) -> None:
        """Runs the command. Raises ValueError or OSError after a user's mistake."""
        # Options are checked before the weights are read, which takes long, and most of them before JAX is imported.
        self._check()
        checkpoint, config = self.open_model(self.checkpoint, mtp=self.drafts > 0)
        check_min_confidence(self.min_confidence, config.drafts)
        options.check_context(config, self.max_new_tokens, f"--max-new-tokens {self.max_new_tokens}")
        sizes = self.check_devices(config)
        ids = None if self.prompt_ids is None else _parse_ids(self.prompt_ids)
        startup.notify(f"Starting JAX and reading {checkpoint} ...")
        import jax

        from dsv4_jax.checkpoint import read_tokenizer

        tokenizer = read_tokenizer(checkpoint)
        option, prompt = ("--prompt-ids", ids) if ids is not None else self._encode(tokenizer)
        # The last token is sampled, but not stored in the cache.
        total = len(prompt) + self.max_new_tokens - 1
        options.check_context(config, total, f"{option} and --max-new-tokens {self.max_new_tokens}")
        # The answers to one prompt share blocks, so all of them run in one shard of the mesh's axis "data". The cache's
        # slots are divided evenly among the shards, so each shard needs a slot for each answer.
        requests = self._answers * sizes.get("data", 1)
        manager = self.make_manager(config, requests, options.whole_blocks(config, total), self.drafts)
        manager.check_ids(prompt, option)
        progress = not self.json and sys.stdout.isatty()
        step_tokens = max(self._chunk(prompt), self._answers * (1 + self.drafts))
        model = self.load_model(checkpoint, manager.schema, step_tokens=step_tokens, progress=progress)
        device = jax.devices()[0].device_kind
        folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
        hint = f" (compiled programs are kept in {folder})" if folder else ""
        startup.notify(f"Compiling for {device} ...{hint}")
        report = self._generate(model, manager, tokenizer, prompt, device)
        if self.json:
            print(json.dumps(report))
            return
        for candidate in report.get("candidates", [])[1:]:
            _print("\n" + candidate.get("text", " ".join(map(str, candidate["tokens"]))))
        _print_table(report, manager.schema.kv_format.name)

    @property
    def _answers(self) -> int:
        """The number of answers or beams that share the prompt."""
        return max(self.n_best, self.beams)

    def _chunk(self, prompt):
        """Returns the number of prompt tokens in a step."""
        return self.chunk or (1 if len(prompt) <= SHORT_PROMPT else 256)

    def _check(self):
        """Raises ValueError if an option is out of range or contradicts another one."""
        check_temperature(self.temperature)
        check_top_k(self.top_k)
        check_top_p(self.top_p)
        if self.prompt is not None and self.prompt_ids is not None:
            raise ValueError("--prompt and --prompt-ids exclude each other: give one of them")
        try:
            (self.prompt or "").encode()
        except UnicodeEncodeError as error:
            # In arguments, Python replaces each byte that is not UTF-8 by a lone surrogate, U+DC00 + byte.
            byte = ord(error.object[error.start]) - 0xDC00
            raise ValueError(f"--prompt is no UTF-8 text: character {error.start} is the byte 0x{byte:02x}") from None
        if self.n_best > 1 and self.beams > 1:
            raise ValueError("--n-best and --beams exclude each other: give one of them")
        if self.n_best > 1 and self.temperature == 0:
            raise ValueError(f"--n-best {self.n_best} answers would all be the same: give --temperature above 0")
        if self.beams > 1 and self.temperature > 0:
            raise ValueError("--beams searches for the likeliest tokens and draws none: leave out --temperature")
        if self._answers > 1 and self.drafts:
            raise ValueError("--drafts makes one answer faster: leave out --n-best and --beams")

    def _encode(self, tokenizer):
        """Returns (option, token ids) of the prompt that --prompt gives, or of the default prompt.

        Raises ValueError if --prompt is given and there is no tokenizer.
        """
        if self.prompt is None and tokenizer is None:
            return "--prompt-ids", list(_DEFAULT_IDS)
        if tokenizer is None:
            raise ValueError("--prompt needs a tokenizer.json beside the weights, and there is none: use --prompt-ids")
        return "--prompt", tokenizer.encode(_DEFAULT_TEXT if self.prompt is None else self.prompt).ids

    def _generate(self, model, manager, tokenizer, prompt, device) -> dict[str, Any]:
        """Generates as the options ask. Unless --json is given, prints the prompt and each token of the first answer.

        Returns:
          The JSON object of --json, see `json` of the command.
        """
        from dsv4_jax.engine.text import AnswerText

        text = AnswerText(tokenizer, (), ())

        def show(token):
            """Prints a token as text, or as its id without a tokenizer. Prints nothing with --json."""
            if not self.json:
                _print(text.add(token))

        def describe(tokens):
            """Returns the fields of --json about the tokens of an answer."""
            if tokenizer is None:
                return {"tokens": tokens}
            return {"tokens": tokens, "text": tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]}

        for token in () if tokenizer is None else prompt:
            show(token)
        if self._answers == 1:
            tokens, speed, accepted = self._stream_answer(model, manager, prompt, show)
            details = {"accepted": accepted} if self.drafts else {}
        else:
            candidates, speed = self._find_answers(model, manager, prompt)
            tokens = candidates[0].tokens
            for token in tokens:
                show(token)
            details = {"candidates": [describe(x.tokens) | {"logprob": x.logprob} for x in candidates]}
        if not self.json:
            _print(text.finish())
        schema = manager.schema
        cache_bytes = {
            "per_token": schema.bytes_per_token,
            "per_request": schema.bytes_per_request,
            "total": schema.memory_bytes(),
            "dense_bf16_per_token": schema.dense_bytes_per_token,
        }
        return describe(tokens) | speed | {"device": device, "cache_bytes": cache_bytes} | details

    def _limits(self, manager):
        """Returns the parameters of a request that end an answer."""
        stop_tokens = () if self.ignore_eos else manager.schema.config.eos_token_id
        return {"max_new_tokens": self.max_new_tokens, "stop_tokens": stop_tokens}

    def _draws(self):
        """Returns the parameters of a request that say how tokens are drawn."""
        from dsv4_jax.decode import SamplingParams

        return {"sampling": SamplingParams(self.temperature, self.top_k, self.top_p), "seed": self.seed}

    def _stream_answer(self, model, manager, prompt, show):
        """Generates one answer, passes each token to `show`, and measures the time of tokens.

        The first token is not timed, because its step runs the prompt. Steps that compile a program are not timed
        either.

        Returns:
          (tokens, speed, number of accepted drafts of each step), with the speed as `_speed` returns it.
        """
        from dsv4_jax.decode import DraftOptions
        from dsv4_jax.engine.generate import engine_for_prompts

        drafts = DraftOptions(self.drafts, self.min_confidence)
        tokens = []
        timed = []
        with engine_for_prompts(model, manager, [prompt], self.max_new_tokens, self._chunk(prompt), drafts) as engine:
            request = engine.add(prompt, **self._draws(), **self._limits(manager))
            before = known = model.compilations
            begin = step_begin = time.perf_counter()
            for token in engine.stream(request):
                seconds = time.perf_counter() - step_begin
                if tokens and model.compilations == known:
                    timed.append(seconds)
                tokens.append(token)
                show(token)
                known = model.compilations
                step_begin = time.perf_counter()
            seconds = time.perf_counter() - begin
        return tokens, _speed(known - before, seconds, len(timed), sum(timed)), request.accepted

    def _find_answers(self, model, manager, prompt):
        """Returns (candidates, speed): the answers of `n_best` or the beams of `beam_search`, and `_speed`'s result.

        The best candidate comes first.
        """
        from dsv4_jax.engine import beam_search, n_best

        programs = model.compilations
        begin = time.perf_counter()
        options: dict[str, Any] = self._limits(manager) | {"chunk": self._chunk(prompt)}
        if self.n_best > 1:
            candidates = n_best(model, manager, prompt, n=self.n_best, **self._draws(), **options)
        else:
            candidates = beam_search(model, manager, prompt, beams=self.beams, **options)
        seconds = time.perf_counter() - begin
        compilations = model.compilations - programs
        timed_tokens = 0 if compilations else sum(len(candidate.tokens) for candidate in candidates)
        return candidates, _speed(compilations, seconds, timed_tokens, seconds)


def _speed(compilations, seconds, timed_tokens, timed_seconds):
    """Returns the fields of --json about speed.

    Args:
      compilations: number of programs that were compiled.
      seconds: seconds of everything after loading, compilation included.
      timed_tokens: number of tokens whose steps did not compile and so count for the speed.
      timed_seconds: seconds in which these tokens were generated.
    """
    return {
        "compilations": compilations,
        "seconds": seconds,
        "timed_tokens": timed_tokens,
        "tokens_per_second": timed_tokens / timed_seconds if timed_tokens else None,
    }


def _print(text):
    """Prints a model's text. If stdout is a terminal, control characters are left out."""
    print(startup.visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _parse_ids(text):
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"--prompt-ids {text!r} must be whole numbers separated by commas, such as 5,17,42") from None


def _print_table(report, format_name):
    """Prints the JSON object of --json as a table."""
    tokens = len(report["tokens"])
    cache = report["cache_bytes"]
    total = cache["total"]
    paged = cache["per_token"]
    dense = cache["dense_bf16_per_token"]
    saving = f"; dense BF16: {dense}, {dense / paged:.1f} times as many" if paged else ""
    cells = {"tokens/s": "not measured: all compiled"}
    if speed := report["tokens_per_second"]:
        cells["tokens/s"] = f"{speed:.1f} ({report['timed_tokens']} tokens, none compiling)"
    if accepted := report.get("accepted"):
        cells["tokens a step"] = f"{tokens / len(accepted):.2f}, drafts included"
    cells |= {
        "time": f"{report['seconds']:.2f} s after loading, compilation included",
        "compilations": str(report["compilations"]),
        "cache bytes a token": f"{paged:.2f}{saving}",
        "cache bytes a request": f"{cache['per_request']:,}, whatever its length: windows and compressor states",
        "cache bytes in all": f"{total:,} ({readable_bytes(total)}; format {format_name})",
    }
    table = Table(title=f"{tokens} new tokens on {report['device']}", show_header=False, title_justify="left")
    for row in cells.items():
        table.add_row(*row)
    print()
    Console().print(table)
