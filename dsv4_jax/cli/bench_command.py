"""`dsv4-jax bench`: one subcommand for each benchmark."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from dsv4_jax.cli.options import (
    ContextParallel,
    ExpertParallel,
    MeshOption,
    check_at_least,
    check_writable,
    mesh_sizes,
    notify,
    optional,
)
from dsv4_jax.parallel.mesh import make_mesh


if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsv4_jax.bench.decode_steps import StepOptions
    from dsv4_jax.config import DSV4Config
    from dsv4_jax.quant import KVFormat

Op = Literal[
    "append", "flush", "gather", "indexer", "attention", "linear", "experts", "hyper_connections", "router"
]  # fmt: skip
OPS: tuple[Op, ...] = get_args(Op)

Shapes = Annotated[Literal["flash", "pro"], tyro.conf.arg(help="the model whose shapes are used.")]
Format = Annotated[Literal["v4", "per_entry"], tyro.conf.arg(help="format of the cache's rows.")]
Only = Annotated[tuple[str, ...], tyro.conf.arg(help="only ops whose name or shape contains one of these texts.")]
Calls = Annotated[int, tyro.conf.arg(help="number of calls whose median time is reported.")]
Numbers = Annotated[tuple[int, ...] | None, optional("N ...")]
Drafts = Annotated[
    int,
    tyro.conf.arg(
        metavar="K",
        help="also measure a step that verifies K draft tokens a request, and one that then makes K new ones with the "
        "multi-token-prediction block. Reports tokens a second for several acceptance rates.",
    ),
]
Trace = Annotated[
    Path | None, optional("DIR", help="write a profile of the last case to this folder, for TensorBoard or Perfetto.")
]
JsonFile = Annotated[Path | None, optional("FILE.json", name="json", help="also write the results to this file.")]
PlotFile = Annotated[Path | None, optional("FILE.png")]


@dataclasses.dataclass(frozen=True)
class OpsBench:
    """Times single operations on this device, beside XLA's version of each.

    On a GPU, a time is the median over calls of the summed times of a call's kernels, from the profiler. Every call has
    its own inputs, none of which is in the L2 cache. Each result is first compared with XLA's. On a CPU, a time is the
    wall-clock time of XLA's version at small shapes.

    The roofline is the larger of two times: the call's bytes at the rate of a copy or read, and its operations at the
    rate of a large bfloat16 matrix product. These rates are measured in the same run.

    For example:
      dsv4-jax bench ops
      dsv4-jax bench ops append gather --shapes flash --json h100.json
      dsv4-jax bench ops linear --only FP8

    Attributes:
      ops: the operations to time. Default: all of them.
    """

    ops: Annotated[tyro.conf.Positional[tuple[Op, ...]], tyro.conf.arg(help_behavior_hint="")] = OPS
    shapes: Shapes = "flash"
    cache_format: Format = "v4"
    only: Only = ()
    calls: Calls = 32
    out: JsonFile = None

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        check_at_least(1, calls=self.calls)
        report, _ = _start(self.out)
        from dsv4_jax.bench import op_times

        model = _model(report, self.shapes, self.cache_format)
        _record(report, self.out, results=op_times.run(*model, self.ops, report, only=self.only, calls=self.calls))


@dataclasses.dataclass(frozen=True)
class _DecodeSteps:
    """Options of the benchmarks of decode steps."""

    shapes: Shapes = "flash"
    cache_format: Format = "v4"
    batches: Numbers = None
    contexts: Numbers = None
    drafts: Drafts = 0
    mesh: MeshOption = None
    context_parallel: ContextParallel = False
    trace: Trace = None
    out: JsonFile = None
    plot: PlotFile = None

    def _start(
        self, *, whole: bool, layers: int = 0, expert_parallel: bool = False
    ) -> "tuple[dict[str, Any], tuple[DSV4Config, KVFormat, StepOptions]]":
        """Starts JAX; returns the report's head and the model, format and options of the steps."""
        check_at_least(0, drafts=self.drafts)
        if whole:
            # XLA leaves a quarter of a GPU's memory unused by default.
            os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        parallel = dict(context_parallel=self.context_parallel, expert_parallel=expert_parallel)
        report, mesh = _start(self.out, self.plot, self.trace, self.mesh, **parallel)
        from dsv4_jax.bench.decode_steps import StepOptions

        cases = self.batches, self.contexts, layers, self.trace, self.drafts
        options = StepOptions(*cases, whole=whole, mesh=mesh, **parallel)
        return report, (*_model(report, self.shapes, self.cache_format), options)


@dataclasses.dataclass(frozen=True)
class StepBench(_DecodeSteps):
    """Times decode steps of a model's attention layers, with random weights and a full cache.

    Reports milliseconds a step, the floor (the time to read weights and cache once), and the time of each kind of
    kernel. On a CPU, the layers are those of a tiny model.

    For example:
      dsv4-jax bench step --batches 1 32 --contexts 4096 65536 --plot step.png
      dsv4-jax bench step --batches 1 --contexts 4096 --drafts 2
      dsv4-jax bench step --mesh model=4 --context-parallel

    Attributes:
      batches: batch sizes, in requests. Default: 1 8 32; on a CPU 1 4
      contexts: context lengths, in tokens a request. Default: 4096 65536 1048576; on a CPU 512 4096
      layers: number of layers to run, the first ones; 0 = all.
      plot: plot time against context to this file.
    """

    layers: int = 0

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        report, steps = self._start(whole=False, layers=self.layers)
        from dsv4_jax.bench import decode_steps, plots

        report["layers"] = "attention"
        _record(report, self.out, results=decode_steps.run(*steps, report))
        if self.plot is not None:
            plots.plot_steps(report, self.plot)


@dataclasses.dataclass(frozen=True)
class LayerBench(_DecodeSteps):
    """Times decode steps of whole layers, of one kind of layer at a time, and each operation of a layer.

    Experts and hyper-connections are included; weights are random and quantized as in the release. Operations are timed
    on one device only, so not with --mesh.

    For example:
      dsv4-jax bench layer --json layer.json --plot layer.png
      dsv4-jax bench layer --only experts --batches 1 --contexts 4096

    Attributes:
      batches: batch sizes, in requests. Default: 1 8 32 128; on a CPU 1 4
      contexts: context lengths, in tokens a request. Default: 4096 65536; on a CPU 512 4096
      plot: plot the time of each kind of kernel, and the slowest operations, to this file.
    """

    only: Only = ()
    calls: Calls = 32
    expert_parallel: ExpertParallel = False

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        check_at_least(1, calls=self.calls)
        report, steps = self._start(whole=True, expert_parallel=self.expert_parallel)
        from dsv4_jax.bench import decode_steps, op_times, plots

        ops = () if self.mesh else op_times.run_layer(*steps[:2], report, only=self.only, calls=self.calls)
        _record(report, self.out, ops=ops, results=decode_steps.run_kinds(*steps, report))
        if self.plot is not None:
            plots.plot_layers(report, self.plot)


@dataclasses.dataclass(frozen=True)
class ModelBench(_DecodeSteps):
    """Times decode steps of a model's first layers, with experts and hyper-connections.

    Weights are random and quantized as in the release. Reports microseconds a layer, the floor (the time to read
    weights and cache once), and the time of each kind of kernel.

    For example:
      dsv4-jax bench model --layers 8 --batches 1 8
      dsv4-jax bench model --mesh model=4 --expert-parallel

    Attributes:
      batches: batch sizes, in requests. Default: 1 8 32 128; on a CPU 1 4
      contexts: context lengths, in tokens a request. Default: 4096 65536; on a CPU 512 4096
      layers: number of layers to run, the first ones; 0 = as many as fit.
      plot: plot the time of each kind of kernel to this file.
    """

    layers: int = 0
    expert_parallel: ExpertParallel = False

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        report, steps = self._start(whole=True, layers=self.layers, expert_parallel=self.expert_parallel)
        from dsv4_jax.bench import decode_steps, plots

        report["layers"] = "whole"
        _record(report, self.out, results=decode_steps.run(*steps, report))
        if self.plot is not None:
            plots.plot_layers(report, self.plot)


@dataclasses.dataclass(frozen=True)
class PrefillBench:
    """Times attention layers over chunks of a prompt, one layer of each kind.

    Reports milliseconds and tokens a second, the rate of the matrix products, the floor (products at the rate of a
    large one, or bytes read and written once), and the time of each kind of kernel. The last lines sum up all layers.

    For example:
      dsv4-jax bench prefill --chunks 8192 --contexts 0 65536 --plot prefill.png

    Attributes:
      chunks: numbers of tokens in a chunk. Default: 512 2048 8192; on a CPU 64
      contexts: numbers of tokens before a chunk. Default: 0 65536 524288; on a CPU 0 256
      plot: plot tokens a second against context to this file.
    """

    shapes: Shapes = "flash"
    cache_format: Format = "v4"
    chunks: Numbers = None
    contexts: Numbers = None
    trace: Trace = None
    out: JsonFile = None
    plot: PlotFile = None

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        report, _ = _start(self.out, self.plot, self.trace)
        from dsv4_jax.bench import plots, prefill

        model = _model(report, self.shapes, self.cache_format)
        options = prefill.PrefillOptions(self.chunks, self.contexts, self.trace)
        _record(report, self.out, results=prefill.run(*model, options, report))
        if self.plot is not None:
            plots.plot_prefill(report, self.plot)


@dataclasses.dataclass(frozen=True)
class ServeBench:
    """Times the packaged model on synthetic conversations, without and with a prefix cache.

    The conversations share system prompts, and every turn sends the whole history again. Reports throughput, time to
    the first token, the share of prompt tokens that the cache held, and the number of compiled programs.

    For example:
      dsv4-jax bench serve --conversations 12 --turns 3 --plot serve.png

    Attributes:
      conversations: number of conversations.
      turns: number of requests in a conversation.
      drafts: number of tokens that prompt lookup may draft in a step; 0 = no speculative decoding.
      plot: plot time to the first token against tokens sent to this file.
    """

    conversations: int = 12
    turns: int = 3
    drafts: int = 0
    mesh: MeshOption = None
    out: JsonFile = None
    plot: PlotFile = None

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        check_at_least(1, conversations=self.conversations, turns=self.turns)
        check_at_least(0, drafts=self.drafts)
        report, mesh = _start(self.out, self.plot, mesh=self.mesh)
        from dsv4_jax.bench import plots, serving

        workload = serving.Workload(self.conversations, self.turns, self.drafts)
        report["workload"] = dataclasses.asdict(workload)
        _record(report, self.out, results=serving.run(workload, mesh))
        if self.plot is not None:
            plots.plot_serving(report, self.plot)


@dataclasses.dataclass(frozen=True)
class AllReduceBench:
    """Times sums over the devices of a mesh in a loop on the devices, beside XLA's.

    For example:
      dsv4-jax bench all_reduce --mesh model=4

    Attributes:
      mesh: devices to sum over, such as model=4.
    """

    mesh: Annotated[str, tyro.conf.arg(metavar="model=N")]
    shapes: Shapes = "flash"
    out: JsonFile = None

    def run(self) -> None:
        """Runs the benchmark; raises ValueError if an option is wrong."""
        if mesh_sizes(self.mesh, None).get("model", 1) < 2:
            raise ValueError(f"--mesh {self.mesh} must have more than one device along the axis model")
        report, mesh = _start(self.out, mesh=self.mesh)
        from dsv4_jax.bench import sums

        assert mesh is not None
        _record(report, self.out, results=sums.run(_config(self.shapes).hidden_size, mesh, report))


def _start(
    out: Path | None,
    plot: Path | None = None,
    trace: Path | None = None,
    mesh: str | None = None,
    *,
    context_parallel: bool = False,
    expert_parallel: bool = False,
) -> "tuple[dict[str, Any], Mesh | None]":
    """Checks the options that benchmarks share, starts JAX, and returns the report's head and the mesh."""
    sizes = mesh_sizes(mesh, None, context_parallel=context_parallel, expert_parallel=expert_parallel)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'dsv4-jax[notebooks]'")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot} must end in .png")
    # A run takes minutes, so files that cannot be written are found before it.
    for option, path in (("json", out), ("plot", plot)):
        if path is not None:
            check_writable(option, path)
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
    notify("Starting JAX ...")
    import jax

    report: dict[str, Any] = dict(device=jax.devices()[0].device_kind, jax=jax.__version__)
    return report | (dict(mesh=sizes) if sizes else {}), make_mesh(sizes) if sizes else None


def _config(shapes: Shapes) -> "DSV4Config":
    from dsv4_jax.config import DSV4Config

    return DSV4Config.v4_flash() if shapes == "flash" else DSV4Config.v4_pro()


def _model(report: dict[str, Any], shapes: Shapes, cache_format: Format) -> "tuple[DSV4Config, KVFormat]":
    """Adds the model to the report, and returns its configuration and the cache's format."""
    from dsv4_jax.quant import kv_format

    report |= dict(shapes=shapes, cache_format=cache_format)
    return _config(shapes), kv_format(cache_format)


def _record(report: dict[str, Any], out: Path | None, **sections: Iterable[dict[str, Any]]) -> None:
    """Runs the benchmark: adds every row to its section of the report, and writes the file after each."""
    for section, rows in sections.items():
        report[section] = []
        for row in rows:
            report[section].append(row)
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")


BenchCommand = (
    Annotated[OpsBench, tyro.conf.subcommand("ops")]
    | Annotated[StepBench, tyro.conf.subcommand("step")]
    | Annotated[LayerBench, tyro.conf.subcommand("layer")]
    | Annotated[ModelBench, tyro.conf.subcommand("model")]
    | Annotated[PrefillBench, tyro.conf.subcommand("prefill")]
    | Annotated[ServeBench, tyro.conf.subcommand("serve")]
    | Annotated[AllReduceBench, tyro.conf.subcommand("all_reduce")]
)
