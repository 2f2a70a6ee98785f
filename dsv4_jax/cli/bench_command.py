"""`dsv4-jax bench`: one subcommand for each benchmark."""

import dataclasses
from typing import Annotated, ClassVar, Literal, get_args

import tyro

from dsv4_jax.cli import options
from dsv4_jax.cli.bench_options import Benchmark, Config, ModelBenchmark, Numbers, PlotFile


Op = Literal[
    "append", "flush", "gather", "indexer", "attention", "linear", "experts", "hyper_connections", "router"
]  # fmt: skip
OPS: tuple[Op, ...] = get_args(Op)


class OpsBench(ModelBenchmark):
    """Times single operations on this device, beside XLA's version of each.

    On a GPU, the time of a call is the sum of its kernels' times, from the profiler; the median over calls is reported.
    Every call has its own inputs, none of which is in the L2 cache. Each result is first compared with XLA's result. On
    a CPU, a time is the wall-clock time of XLA's version at small shapes.

    The roofline is the larger of two times: to move the call's bytes at the rate of a copy or read, and to compute its
    operations at the rate of a large bfloat16 matrix product. These rates are measured in the same run.

    For example:
      dsv4-jax bench ops
      dsv4-jax bench ops append gather --config v4_flash --json h100.json
      dsv4-jax bench ops linear --only FP8

    Attributes:
      ops: the operations to time. Default: all of them.
      only: only ops whose name or shape contains one of these texts.
      calls: number of calls whose median time is reported.
    """

    ops: Annotated[tyro.conf.Positional[tuple[Op, ...]], tyro.conf.arg(help_behavior_hint="")] = OPS
    only: tuple[str, ...] = ()
    calls: int = 32

    def _results(self, report, mesh):
        from dsv4_jax.bench import op_times

        config = self._model(report)
        cases = op_times.chosen_cases(config, report["cache_format"], self.ops, self.only)
        return op_times.run(cases, report, self.calls)


class _DecodeSteps(ModelBenchmark):
    """Options of the benchmarks of decode steps.

    Attributes:
      batches: batch sizes, in requests. Default: 1 8 32 128; on a CPU 1 4
      contexts: context lengths, in tokens a request. Default: 4096 65536; on a CPU 512 4096
      plot: plot the time of each kind of kernel to this file.
      drafts: also measure a step that verifies K draft tokens of each request, and a step that then also makes K new
        drafts with the model's draft layers. Reports tokens a second for several acceptance rates.
    """

    _plot = "plot_layers"
    _sizes = {"batches": ((1, 8, 32, 128), (1, 4)), "contexts": ((4096, 65536), (512, 4096))}
    _each_kind: ClassVar[bool] = False
    batches: Numbers = None
    contexts: Numbers = None
    drafts: int = 0
    mesh: options.MeshOption = None
    context_parallel: options.ContextParallel = False
    plot: PlotFile = None

    def _results(self, report, mesh):
        from dsv4_jax.bench import decode_steps
        from dsv4_jax.bench.step_options import StepOptions

        steps = self._options(StepOptions, mesh)
        return decode_steps.run(self._model(report), steps, report, each_kind=self._each_kind)


class LayerBench(_DecodeSteps):
    """Times decode steps of models that have layers of one kind only, one model for each kind.

    If layers of a kind read entries or selections of other layers, as in V4.1, the model has those layers, too. Weights
    are random and quantized as in the release. Reports the same numbers as "bench model".

    For example:
      dsv4-jax bench layer --json layer.json --plot layer.png
    """

    expert_parallel: options.ExpertParallel = False
    _each_kind = True


class ModelBench(_DecodeSteps):
    """Times decode steps of a model with some or all of its layers, embedding and head.

    Weights are random and quantized as in the release, and the cache is full. Reports the time of a step, of a step in
    the loop on the device ("loop"), and until the call of a step returns ("call"). The floor is the time to read
    weights and cache once. The time of a layer and its time for each kind of kernel are in microseconds. They do not
    include embedding, head and sampling ("head"), except on a CPU, where single kernels are not timed.

    For example:
      dsv4-jax bench model --layers 8 --batches 1 8
      dsv4-jax bench model --expert-memory auto --skew 0 0.6 1 --batches 1 --contexts 4096
      dsv4-jax bench model --mesh model=4 --expert-parallel
      dsv4-jax bench model --config v4_flash_0731 --drafts 5 --batches 1 --contexts 4096
      dsv4-jax bench model --config v41_flash --mesh model=4 --host-tables --batches 1 --contexts 8192
      dsv4-jax bench model --layers 4 --batches 32 --contexts 4096 --adapters 8

    Attributes:
      layers: number of layers to run: one of each kind with the layers that it reads from, then the model's first
        layers; 0 = as many as fit, or all with --expert-memory. Engram's tables are reduced to what the machine holds.
      skew: how unequally tokens select experts: the expert of rank r has weight r**-S. Each S is measured. With
        --expert-memory, the experts that are frequent with the largest S lie on the GPU.
      adapters: number of adapters (LoRA) of rank 16 beside attention's maps and the shared expert's. Requests use them
        in turn.
      batch_invariant: run decode steps in the program for prompts, as "serve --batch-invariant" does.
    """

    layers: int = 0
    expert_parallel: options.ExpertParallel = False
    expert_memory: options.ExpertMemoryOption = None
    host_tables: options.HostTablesOption = False
    adapters: int = 0
    batch_invariant: bool = False
    skew: Annotated[tuple[float, ...], tyro.conf.arg(metavar="S ...")] = (0.0,)


class PrefillBench(ModelBenchmark):
    """Times layers that read chunks of a prompt, one layer of each kind, with random weights as in the release.

    If a layer reads entries or selections of other layers, these also run alone, and their time is subtracted. Reports
    milliseconds and tokens a second, the rate of the matrix products, the floor, and the time of each kind of kernel.
    The floor is the larger of two times: to read weights and cache once, and to compute the matrix products at the rate
    of a large product. The last lines are for all layers together. Embedding and head are left out, except on a
    CPU, where single kernels are not timed.

    For example:
      dsv4-jax bench prefill --chunks 8192 --contexts 0 65536 --plot prefill.png
      dsv4-jax bench prefill --config v41_flash --mesh model=4 --chunks 8192

    Attributes:
      chunks: numbers of tokens in a chunk. Default: 512 2048 8192; on a CPU 64
      contexts: numbers of tokens before a chunk. Default: 0 65536 524288; on a CPU 0 256
      plot: plot tokens a second against context to this file.
    """

    _plot = "plot_prefill"
    _sizes = {"chunks": ((512, 2048, 8192), (64,)), "contexts": ((0, 65536, 524288), (0, 256))}
    chunks: Numbers = None
    contexts: Numbers = None
    mesh: options.MeshOption = None
    expert_parallel: options.ExpertParallel = False
    plot: PlotFile = None

    def _results(self, report, mesh):
        from dsv4_jax.bench import prefill
        from dsv4_jax.bench.step_options import StepOptions

        return prefill.run(self._model(report), self._options(StepOptions, mesh, batches=(1,)), report)


class ServeBench(Benchmark):
    """Times an engine: the packaged model on synthetic conversations, or a model of any size with random weights.

    Without --config, the conversations share system prompts, and every request sends the whole history again. They are
    served without and with a prefix cache. A system prompt has 280 to 330 tokens, a message 16 to 80 and a reply 16 to
    32. Reports throughput, time to the first token, the share of prompt tokens that the cache held, and the number of
    compiled programs.

    With --config, reports the time to the first token of prompts that run alone. Then, for each number of requests that
    decode at once: the times of a step of the engine and of a step of the on-device loop, and tokens a second. With
    random weights, hardly a draft is accepted, so --drafts shows the cost of drafts only.

    With --config and --reply, it serves a load in the place of decode steps: twice as many requests as run at once,
    each with a prompt of --context tokens and a reply of --reply tokens. Reports the tokens of prompts and replies a
    second, and the median and the 95th percentile of the times to the first token and of the times of a token.

    For example:
      dsv4-jax bench serve --conversations 12 --turns 3 --plot serve.png
      dsv4-jax bench serve --config v4_flash --expert-memory auto --requests 1 4 --prompts 1024 8192
      dsv4-jax bench serve --config v4_flash --layers 4 --requests 32 128 --prompts
      dsv4-jax bench serve --config v4_flash --mesh model=4 --requests 16 64 --prompts --context 8192 --reply 1024

    Attributes:
      conversations: number of conversations.
      turns: number of requests in a conversation.
      drafts: number of tokens that prompt lookup may draft in a step, or with --config the model's draft layers; 0 = no
        speculative decoding.
      plot: plot time to the first token against tokens sent to this file; not with --config.
      config: a released model, or a folder with a config.json. On a CPU, a tiny model replaces the releases of V4.
      layers: with --config: number of layers to run, chosen as by "bench model"; 0 = all.
      requests: with --config: numbers of requests that decode at once. Default: 1 4 16 64; on a CPU 1 4
      prompts: with --config: numbers of tokens of the prompts. Default: 1024 8192 65536; on a CPU 256
      context: with --config: number of tokens of a request when it begins to decode.
      reply: with --config: number of tokens of the replies of a load; 0 = measure decode steps.
      token_budget: with --config: number of tokens in a step that reads prompts.
    """

    _plot = "plot_serving"
    _sizes = {"requests": ((1, 4, 16, 64), (1, 4)), "prompts": ((1024, 8192, 65536), (256,))}
    conversations: int = 12
    turns: int = 3
    drafts: int = 0
    mesh: options.MeshOption = None
    plot: PlotFile = None
    config: Annotated[str | None, options.optional(options.MODELS)] = None
    layers: int = 0
    requests: Numbers = None
    prompts: Numbers = None
    context: int = 512
    reply: int = 0
    token_budget: int = 2048
    expert_parallel: options.ExpertParallel = False
    expert_memory: options.ExpertMemoryOption = None
    host_tables: options.HostTablesOption = False
    skew: options.Skew = 0.0

    def run(self) -> None:
        """Runs the benchmark. Raises ValueError if an option is wrong or options exclude each other."""
        if self.config is None and (
            self.expert_memory is not None or self.host_tables or self.skew or self.layers or self.reply
        ):
            raise ValueError("--expert-memory, --host-tables, --skew, --layers and --reply need --config")
        if self.config is not None and self.plot is not None:
            raise ValueError("--plot is for conversations: leave out --config")
        super().run()

    def _results(self, report, mesh):
        if self.config is None:
            from dsv4_jax.bench import serving

            workload = serving.Workload(self.conversations, self.turns, self.drafts)
            report["workload"] = dataclasses.asdict(workload)
            return serving.run(workload, mesh)
        from dsv4_jax.bench import engine_steps
        from dsv4_jax.bench.cases import measured_config

        config = options.named_config(self.config, "--config", mtp=self.drafts > 0)
        report["config"] = self.config
        config = measured_config(config, report, "config")
        return engine_steps.run(config, self._options(engine_steps.EngineOptions, mesh), report)


class AllReduceBench(Benchmark):
    """Times sums over the devices of a mesh (all-reduces) in a loop on the devices, beside XLA's sums.

    For example:
      dsv4-jax bench all_reduce --mesh model=4

    Attributes:
      mesh: devices to sum over, such as model=4.
    """

    mesh: Annotated[str, tyro.conf.arg(metavar="model=N")]
    config: Config = "v4_flash"

    def _results(self, report, mesh):
        from dsv4_jax.bench import sums

        if mesh.shape.get("model", 1) < 2:
            raise ValueError(f"--mesh {self.mesh} must have more than one device along the axis model")
        return sums.run(options.named_config(self.config, "--config").hidden_size, mesh, report)


BenchCommand = options.subcommands(
    ops=OpsBench,
    layer=LayerBench,
    model=ModelBench,
    prefill=PrefillBench,
    serve=ServeBench,
    all_reduce=AllReduceBench,
)
