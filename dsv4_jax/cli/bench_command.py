"""`dsv4-jax bench`."""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from dsv4_jax.cli.options import MeshText, check_positive, check_writable, notify
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh


Op = Literal[
    "append", "flush", "gather", "indexer", "attention", "linear", "experts", "hyper_connections", "router"
]  # fmt: skip
ALONE = ("step", "layer", "model", "prefill", "serve", "all_reduce")
MESHED = tuple(name for name in ALONE if name != "prefill")
OPS: tuple[Op, ...] = get_args(Op)


@dataclasses.dataclass(frozen=True)
class BenchCommand:
    """Times the operations of cache and attention on this device, beside XLA's version; or decode steps, or serving.

    Every call has its own inputs, and none of them is in the GPU's L2 cache. On a GPU, a time is the median over calls
    of the summed times of a call's kernels, from the profiler. Before an operation is timed, its result is compared
    with XLA's: byte by byte, or within a tolerance where it is a sum. On a CPU, it is the wall-clock time of XLA's
    version at small shapes. The roofline is the larger of two times: a call's bytes at the rate of a copy (of a read,
    for operations that write little), and its operations at the rate of a large bfloat16 matrix product. These rates
    are measured in the same run.

    `step` runs the attention layers of the model with random weights and a full cache (on a CPU: those of a tiny
    model). It reports milliseconds a step, the floor (the time to read weights and cache once), and which kinds of
    kernels take the time. `model` does the same with whole layers, experts and hyper-connections included, whose
    weights are random and stored as the release's are: as many layers as fit the device, if not told otherwise.

    `all_reduce` times sums over the devices of a mesh in a loop on the devices, beside XLA's.
    `prefill` runs an attention layer of each kind over chunks of one request's prompt, after so many tokens as
    `--contexts` says. It reports milliseconds and tokens a second, the rate of the products, the floor (products at the
    rate of a large one, or bytes read and written once), and which kinds of kernels take the time; last, for all layers
    together, the sum of the layers' times.

    `serve` has the packaged model answer made-up conversations that share system prompts and send their history again
    with every turn, without and with a prefix cache. It reports throughput, time to the first token, the share of
    prompt tokens that the cache held, and how many programs were compiled.

    For example:
      dsv4-jax bench
      dsv4-jax bench append gather --shapes flash --json h100.json
      dsv4-jax bench step --batches 1 32 --contexts 4096 65536 --plot step.png
      dsv4-jax bench step --batches 1 --contexts 4096 --drafts 2
      dsv4-jax bench layer --json layer.json --plot layer.png
      dsv4-jax bench layer --only experts --batches 1 --contexts 4096
      dsv4-jax bench model --layers 8 --batches 1 8
      dsv4-jax bench model --mesh model=4
      dsv4-jax bench all_reduce --mesh model=4
      dsv4-jax bench prefill --chunks 8192 --contexts 0 65536 --plot prefill.png
      dsv4-jax bench serve --conversations 12 --turns 3 --plot serve.png

    Attributes:
      ops: which operations (default: all), or step, or layer, or model, or prefill, or serve, or all_reduce.
      shapes: the model whose shapes are used.
      cache_format: what the cache's bytes mean.
      only: only cases of operations whose op or shape contains one of these texts.
      calls: calls that a median is taken over.
      out: also write the results to this file.
      batches: step, layer, model: batch sizes, in requests. Default: 1 8 32, of whole layers 1 8 32 128; on a CPU 1 4
      contexts: step, layer, model: context lengths, in tokens a request. Default: 4096 65536 1048576, of whole layers
        4096 65536; on a CPU 512 4096. prefill: tokens before a chunk. Default: 0 65536 524288; on a CPU 0 256
      chunks: prefill: tokens of a chunk. Default: 512 2048 8192; on a CPU 64
      layers: step, model: run only this many layers, the first ones; 0 = all, or of model as many as fit.
      trace: step, layer, model, prefill: write a profile of the steps at the longest context to this folder, for
        TensorBoard or Perfetto.
      plot: step: plot time against context to this PNG file; layer, model: what takes a layer's time; prefill: tokens
        a second against context; serve: time to the first token against tokens sent.
      conversations: serve: number of conversations.
      turns: serve: requests of each conversation.
      drafts: serve: tokens that prompt lookup may guess in a step. step, layer, model: also measure a step that
        verifies so many drafts of each request, and one that then makes as many with the multi-token-prediction block
        (step: its attention), and report tokens a second for assumed shares of right drafts. 0 = no speculative
        decoding.
      mesh: step, layer, model, serve, all_reduce: several devices, such as model=4, as for generate. Bytes are those of
        one device.
      expert_parallel: layer, model: with --mesh, as for generate.
      context_parallel: step, layer, model: likewise.
    """

    ops: tyro.conf.Positional[tuple[Op | Literal["step", "layer", "model", "prefill", "serve", "all_reduce"], ...]] = (
        OPS
    )
    shapes: Literal["flash", "pro"] = "flash"
    cache_format: Literal["v4", "per_entry"] = "v4"
    only: tuple[str, ...] = ()
    calls: int = 32
    out: Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")] = None
    batches: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = None
    contexts: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = None
    chunks: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = None
    layers: int = 0
    trace: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    conversations: int = 12
    turns: int = 3
    drafts: int = 0
    mesh: MeshText = None
    expert_parallel: bool = False
    context_parallel: bool = False

    def run(self) -> None:
        """Runs the command; raises ValueError where the user has to change something."""
        check_positive(calls=self.calls, conversations=self.conversations, turns=self.turns)
        for alone in ALONE:
            if alone in self.ops and self.ops != (alone,):
                raise ValueError(f"{alone} runs alone, not with {[op for op in self.ops if op != alone]}")
        if self.drafts < 0:
            raise ValueError(f"--drafts {self.drafts} must be at least 0")
        sizes = None if self.mesh is None else parse_mesh(self.mesh)
        if sizes and self.ops[0] not in MESHED:
            raise ValueError(f"--mesh is for {', '.join(MESHED)}: dsv4-jax bench step --mesh {self.mesh}")
        for option, given, ops in (
            ("expert-parallel", self.expert_parallel, ("layer", "model")),
            ("context-parallel", self.context_parallel, ("step", "layer", "model")),
        ):
            if given and (self.ops[0] not in ops or (sizes or {}).get("model", 1) < 2):
                raise ValueError(
                    f"--{option} is for {', '.join(ops)} on several devices: dsv4-jax bench model --mesh model=2"
                )
        if self.ops == ("all_reduce",) and (sizes is None or sizes.get("model", 1) < 2):
            raise ValueError("all_reduce needs several devices: dsv4-jax bench all_reduce --mesh model=2")
        if self.plot is not None and self.ops[0] not in ALONE[:-1]:
            raise ValueError(f"--plot draws {', '.join(ALONE[:-1])}: dsv4-jax bench step --plot {self.plot}")
        if self.ops[0] in ("layer", "prefill") and self.layers:
            raise ValueError(
                f"--layers {self.layers} is not for {self.ops[0]}, which measures layers of one kind at a time"
            )
        if self.chunks is not None and self.ops != ("prefill",):
            raise ValueError("--chunks is for prefill: dsv4-jax bench prefill --chunks 8192")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install 'dsv4-jax[notebooks]'")
        if self.plot is not None and self.plot.suffix != ".png":
            raise ValueError(f"--plot {self.plot} must end in .png")
        # A run takes minutes: that its results cannot be written is found before.
        for option, path in (("json", self.out), ("plot", self.plot)):
            if path is not None:
                check_writable(option, path)
        if self.trace is not None:
            self.trace.mkdir(parents=True, exist_ok=True)

        notify("Starting JAX ...")
        if self.ops[0] in ("layer", "model"):
            # XLA would leave a quarter of a GPU's memory alone.
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        import jax

        from dsv4_jax.bench import decode_steps, op_times, plots, prefill, serving, sums
        from dsv4_jax.config import DSV4Config
        from dsv4_jax.quant import kv_format

        mesh = make_mesh(sizes) if sizes else None
        report: dict[str, Any] = dict(device=jax.devices()[0].device_kind, jax=jax.__version__)
        if mesh is not None:
            report["mesh"] = dict(mesh.shape)
        if self.ops == ("serve",):
            workload = serving.Workload(self.conversations, self.turns, self.drafts)
            report["workload"] = dataclasses.asdict(workload)
            sections = dict(results=serving.run(workload, mesh))
        elif self.ops == ("all_reduce",) and mesh is not None:
            config = DSV4Config.v4_flash() if self.shapes == "flash" else DSV4Config.v4_pro()
            sections = dict(results=sums.run(config.hidden_size, mesh, report))
        else:
            report |= dict(shapes=self.shapes, cache_format=self.cache_format)
            config = DSV4Config.v4_flash() if self.shapes == "flash" else DSV4Config.v4_pro()
            model = config, kv_format(self.cache_format)
            timed = dict(only=self.only, calls=self.calls)
            whole = self.ops != ("step",)
            cases = self.batches, self.contexts, self.layers, self.trace, self.drafts
            cut = dict(mesh=mesh, expert_parallel=self.expert_parallel, context_parallel=self.context_parallel)
            options = decode_steps.StepOptions(*cases, whole=whole, **cut)
            if self.ops == ("layer",):
                # Single ops run on one device.
                parts = [] if mesh else op_times.run(*model, list(op_times.CASES), report, **timed, parts=True)
                sections = dict(parts=parts, results=decode_steps.run_kinds(*model, options, report))
            elif self.ops == ("prefill",):
                options = prefill.PrefillOptions(self.chunks, self.contexts, self.trace)
                sections = dict(results=prefill.run(*model, options, report))
            elif self.ops[0] in ("step", "model"):
                report["layers"] = "whole" if whole else "attention"
                sections = dict(results=decode_steps.run(*model, options, report))
            else:
                sections = dict(results=op_times.run(*model, self.ops, report, **timed))
        for section, rows in sections.items():
            report[section] = []
            for row in rows:
                report[section].append(row)
                if self.out is not None:  # after every row, because a run takes minutes
                    self.out.write_text(json.dumps(report, indent=1) + "\n")
        if self.plot is not None:
            own = dict(step=plots.plot_steps, serve=plots.plot_serving, prefill=plots.plot_prefill)
            draw = own.get(self.ops[0], plots.plot_layers)
            draw(report, self.plot)
