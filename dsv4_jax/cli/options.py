"""Options and helpers that the commands share. Importing this module does not import JAX."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dsv4_jax.cli.option_checks import check_writable
from dsv4_jax.cli.startup import show_log
from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import block_tokens, packaged_checkpoint
from dsv4_jax.parallel.mesh import check_context_parallel, check_shardable, make_mesh, parse_mesh


if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsv4_jax.cache import CacheSchema
    from dsv4_jax.decode import CompiledModel
    from dsv4_jax.expert_pages import ExpertMemory, HostTables
    from dsv4_jax.host import KVCacheManager

Dtype = Literal["float32", "bfloat16"]
# {name of a released model: function that returns its configuration, with DSpark's draft layers if it has them}.
PRESETS = {name: getattr(DSV4Config, name) for name in ("v4_flash", "v4_pro", "v4_flash_0731", "v4_pro_0813")} | {
    "v41_flash": functools.partial(DSV4Config.v41_flash, mtp=True)
}


def optional(metavar: str, **options: Any) -> Any:
    """Returns the `tyro.conf.arg` of an option whose help text states its default, so that tyro does not add one.

    Args:
      metavar: text that stands for the option's value in the help text.
      **options: other arguments of `tyro.conf.arg`.
    """
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="", **options)


CacheFormat = Annotated[
    Literal["v4", "v41", "per_entry", "plain"] | None,
    optional(
        "{v4,v41,per_entry,plain}",
        help="format of the cache's rows. v4: DeepSeek-V4's (FP8 rows, FP4 indexer keys). v41: DeepSeek-V4.1's (FP8 "
        "windows, FP4 entries and keys). per_entry: one float32 scale a row. plain: not quantized. Default: the "
        "format of the model's release.",
    ),
]
MeshOption = Annotated[
    str | None,
    optional(
        "data=M,model=N",
        help="devices to use. model=4 is tensor parallelism: heads, experts and vocabulary are sharded over 4 devices. "
        "data=2 is data parallelism: 2 groups of devices hold the whole model and serve different requests. "
        "Default: one device.",
    ),
]
ExpertParallel = Annotated[
    bool, tyro.conf.arg(help="with --mesh model=N: each device holds some whole experts, not a shard of every expert.")
]
ContextParallel = Annotated[
    bool,
    tyro.conf.arg(
        help="with --mesh model=N: the devices share the compressed entries of a request, so that N times as many fit."
    ),
]
ExpertMemoryOption = Annotated[
    str | None,
    optional(
        "auto|SIZE",
        help="for a model that is larger than its GPU: how much of the GPU the routed experts may take, such as 60GB. "
        "The other experts lie in host memory, where the GPU reads them. auto: what weights, cache and programs leave. "
        "Default: all experts on the GPU.",
    ),
]
HostTablesOption = Annotated[
    bool,
    tyro.conf.arg(
        help="for DeepSeek-V4.1: keep Engram's tables, 203 GB, in host memory, where the GPUs read the rows of a step. "
        "--expert-memory always keeps them there."
    ),
]
Skew = Annotated[
    float,
    tyro.conf.arg(
        metavar="S",
        help="with random weights: how unequally tokens select experts. The expert of rank r has weight r**-S; with "
        "--expert-memory, frequent experts lie on the GPU.",
    ),
]
MinConfidence = Annotated[
    float,
    tyro.conf.arg(
        metavar="P",
        help="with DSpark's draft layers: drop the first draft whose probability of being accepted is below P, as the "
        "model estimates it, and all drafts behind it; 0 = drop none. Changes no token.",
    ),
]
JsonFlag = Annotated[bool, tyro.conf.arg(name="json")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of commands that run a model, and methods that make the model and the cache's manager from them.

    Attributes:
      dtype: dtype of activations, and of weights unless --weights is given.
      weights: dtype of embedding and linear weights in memory. quantized: weights that are FP8 or FP4 in the files stay
        FP8 or FP4, and are dequantized on use. Default: quantized on a GPU, else --dtype.
      expert_placement: with --expert-memory: file that keeps how often experts were selected, such as placement.npz
        beside the checkpoint. The next start places the hottest experts on the GPU. Default: no file.
    """

    cache_format: CacheFormat = None
    dtype: Dtype = "bfloat16"
    weights: Annotated[Literal["quantized", "bfloat16", "float32"] | None, optional("{quantized,bfloat16,float32}")] = (
        None
    )
    mesh: MeshOption = None
    expert_parallel: ExpertParallel = False
    context_parallel: ContextParallel = False
    expert_memory: ExpertMemoryOption = None
    expert_placement: Annotated[Path | None, optional("FILE")] = None
    host_tables: HostTablesOption = False

    def check_devices(self, config: DSV4Config) -> dict[str, int]:
        """Checks the options about devices. Call it before JAX starts, because it may set JAX's environment variables.

        Returns:
          {axis of --mesh: number of devices}, empty without --mesh.

        Raises:
          ValueError: the mesh cannot shard the model, other options contradict --expert-memory, the file of
            --expert-placement cannot be written, or the model has no tables for --host-tables.
        """
        if expert_bytes(self.expert_memory, self.mesh) is not None and self.weights not in (None, "quantized"):
            raise ValueError(f"--expert-memory needs --weights quantized, got {self.weights}")
        if self.expert_placement is not None:
            if self.expert_memory is None:
                raise ValueError("--expert-placement needs --expert-memory: otherwise all experts lie on the GPU")
            check_writable("expert-placement", self.expert_placement)
        if self.host_tables and config.engram is None:
            raise ValueError("--host-tables is for models with Engram, such as DeepSeek-V4.1; this one has no tables")
        return mesh_sizes(
            self.mesh, config, context_parallel=self.context_parallel, expert_parallel=self.expert_parallel
        )

    @functools.cached_property
    def devices(self) -> "Mesh | None":
        """The mesh of devices that --mesh describes; None without --mesh, for the default device."""
        return None if self.mesh is None else make_mesh(parse_mesh(self.mesh))

    def load_model(
        self,
        checkpoint: Path,
        schema: "CacheSchema",
        *,
        step_tokens: int = 8192,
        progress: bool = False,
        begin_programs: "Callable[[CompiledModel], None] | None" = None,
    ) -> "CompiledModel":
        """Loads the model. Unless it is the packaged one, the package's log is shown meanwhile.

        Without --weights, quantized weights stay quantized on a GPU and are converted to --dtype elsewhere.

        Args:
          checkpoint: folder of the checkpoint.
          schema: schema of the cache, for which --expert-memory auto leaves room. It has the model's configuration.
          step_tokens: number of tokens of the largest step, for which --expert-memory auto leaves room.
          progress: whether to show a progress bar.
          begin_programs: function that is called before the weights are read, with the model without weights, to start
            compiling its programs; see `Engine.begin_programs`. None = no call.
        """
        from dsv4_jax.decode import CompiledModel

        experts = self._expert_memory(schema, step_tokens)
        load = self._loader(checkpoint, schema.config, experts, progress)
        if begin_programs is None:
            return CompiledModel(load(), experts)
        outlines = []  # the model without weights, whose programs are compiled while the weights are read

        def on_outline(module):
            outlines.append(CompiledModel(module, experts))
            begin_programs(outlines[0])

        model = CompiledModel(load(on_outline=on_outline), experts)
        return outlines[0].with_weights(model)

    def _loader(self, checkpoint: Path, config: DSV4Config, experts: "ExpertMemory | None", progress: bool) -> Any:
        """Returns a function that loads the model; it takes `on_outline` as `load_checkpoint` does."""
        import jax
        import jax.numpy as jnp

        from dsv4_jax.checkpoint import load_checkpoint

        stay = experts is not None or (self.weights is None and jax.default_backend() == "gpu")
        if checkpoint != packaged_checkpoint():
            show_log()
        return functools.partial(
            load_checkpoint,
            checkpoint,
            config,
            dtype=jnp.dtype(self.dtype),
            weights="quantized" if stay else self.weights,
            mesh=self.devices,
            expert_parallel=self.expert_parallel,
            expert_memory=experts,
            host_tables=self._host_tables(),
            progress=progress,
        )

    def _host_tables(self) -> "HostTables | None":
        if not self.host_tables:
            return None
        from dsv4_jax.expert_pages import HostTables

        return HostTables()

    def _expert_memory(self, schema: "CacheSchema", step_tokens: int) -> "ExpertMemory | None":
        if (size := expert_bytes(self.expert_memory, self.mesh)) is None:
            return None
        import jax

        from dsv4_jax.expert_pages import CudaMemory, ExpertMemory, program_bytes

        return ExpertMemory(
            None if size == "auto" else size,
            reserved_bytes=program_bytes(step_tokens, schema.config) + schema.memory_bytes(),
            memory=CudaMemory(jax.devices()[0]),
            placement_file=self.expert_placement,
        )

    def make_manager(
        self, config: DSV4Config, requests: int, context: int, drafts: int = 0, memory: str | None = None
    ) -> "KVCacheManager":
        """Returns a manager of a cache.

        Args:
          config: configuration of the model.
          requests: maximum number of requests. It is rounded up so that the mesh's axis "data" divides it.
          context: maximum number of tokens of a request.
          drafts: number of drafts of each request that a step verifies.
          memory: size of the cache, such as "20GiB". None = all requests can have `context` tokens, where the number of
            blocks is rounded up so that the mesh divides it.

        Raises:
          ValueError: the model has draft layers that cannot make so many drafts, or a size is impossible.
        """
        import jax.numpy as jnp

        from dsv4_jax.decode.drafts import check_drafts
        from dsv4_jax.host import KVCacheManager

        mesh = self.devices
        tokens = block_tokens(config)
        groups = 1 if mesh is None else mesh.shape.get("data", 1)
        devices = 1 if mesh is None else mesh.size
        requests += -requests % groups
        blocks = requests * -(-context // tokens)
        blocks += -blocks % devices
        manager = KVCacheManager(
            config,
            memory=memory,
            num_blocks=blocks if memory is None else None,
            max_requests=requests,
            max_context=context,
            max_query_tokens=1 + drafts,
            block_tokens=tokens,
            kv_format=self.cache_format,
            dtype=jnp.dtype(self.dtype),
            mesh=mesh,
            context_parallel=self.context_parallel,
        )
        if drafts and config.drafts is not None:
            check_drafts(manager.schema, drafts)
        return manager


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomModelOptions(ModelOptions):
    """The options of commands that can also run a model with random weights.

    Attributes:
      random_weights: run a model with random weights in place of a checkpoint, to measure its speed. The value says
        which configuration the model has: that of a released model, or config.json of a folder. Prompts are token ids,
        unless the folder has a tokenizer.json.
    """

    random_weights: Annotated[str | None, optional("|".join((*PRESETS, "DIR")))] = None
    skew: Skew = 0.0

    def open_model(self, checkpoint: Path | None, *, mtp: bool = False) -> tuple[Path, DSV4Config]:
        """Returns the folder of the model and its configuration.

        The folder does not exist if --random-weights names a released model.

        Args:
          checkpoint: value of --checkpoint; None = the packaged checkpoint, unless --random-weights is given.
          mtp: whether to include the draft layers.

        Raises:
          ValueError: there is no such model, or the options exclude each other.
        """
        if self.random_weights is None:
            if self.skew:
                raise ValueError(f"--skew {self.skew} needs --random-weights")
            return open_checkpoint(checkpoint, mtp=mtp)
        if checkpoint is not None:
            raise ValueError("--checkpoint and --random-weights exclude each other: give one of them")
        if self.weights not in (None, "quantized"):
            raise ValueError(f"--random-weights are quantized: leave out --weights {self.weights}")
        config = named_config(self.random_weights, "--random-weights", mtp=mtp)
        # The folder for a released model's name must not exist, so that no tokenizer.json is found in it.
        folder = packaged_checkpoint().parent / "none" if self.random_weights in PRESETS else Path()
        return folder / self.random_weights, config

    def _loader(self, checkpoint: Path, config: DSV4Config, experts: "ExpertMemory | None", progress: bool) -> Any:
        if self.random_weights is None:
            return super()._loader(checkpoint, config, experts, progress)
        import jax.numpy as jnp

        from dsv4_jax.checkpoint.random_weights import random_model

        show_log()
        return functools.partial(
            random_model,
            config,
            self.devices,
            dtype=jnp.dtype(self.dtype),
            expert_parallel=self.expert_parallel,
            expert_memory=experts,
            host_tables=self._host_tables(),
            skew=self.skew,
        )

    def weights_key(self, checkpoint: Path) -> str:
        """Returns a text that identifies the model's weights and the way of running them.

        Another checkpoint, another --weights or another JAX platform has another text. So prefixes that were cached
        with one of them are not used with another.
        """
        import jax

        from dsv4_jax.checkpoint import weights_fingerprint

        is_random = self.random_weights is not None
        weights = f"random, skew={self.skew}" if is_random else weights_fingerprint(checkpoint)
        return f"{weights}, weights={self.weights}, {jax.default_backend()}"


def named_config(name: str, option: str, *, mtp: bool = False) -> DSV4Config:
    """Returns the configuration of a released model, or that of a folder with a config.json.

    Args:
      name: name of a released model, one of `PRESETS`, or path of the folder.
      option: the command's option that has this value, for errors.
      mtp: whether to include the draft layers.

    Raises:
      ValueError: there is no such model or folder, or config.json is invalid.
    """
    if name in PRESETS:
        return PRESETS[name]().with_drafts(mtp)
    if not Path(name).exists():
        raise ValueError(f"{option} {name} is neither {' nor '.join(PRESETS)} nor an existing folder")
    return DSV4Config.from_hf(Path(name), mtp=mtp)


def open_checkpoint(path: Path | None, *, mtp: bool = False) -> tuple[Path, DSV4Config]:
    """Returns the path of a checkpoint and its configuration.

    Args:
      path: value of --checkpoint; None = the packaged checkpoint.
      mtp: whether to include the draft layers.

    Raises:
      ValueError: the path is no folder, safetensors file or config.json, or its config.json is missing or invalid.
    """
    checkpoint = packaged_checkpoint() if path is None else path
    if checkpoint.is_file() and checkpoint.suffix not in (".safetensors", ".json"):
        raise ValueError(f"--checkpoint {checkpoint} is neither a folder nor a safetensors file")
    return checkpoint, DSV4Config.from_hf(checkpoint, mtp=mtp)


def whole_blocks(config: DSV4Config, tokens: int) -> int:
    """Returns the number of tokens rounded up to whole blocks, but at most the model's context.

    If this number is the cache's context, prompts of similar lengths share a compiled program.
    """
    return min(tokens + -tokens % block_tokens(config), config.max_position_embeddings)


def expert_bytes(expert_memory: str | None, mesh: str | None) -> int | Literal["auto"] | None:
    """Parses --expert-memory. If it is given, sets environment variables with which JAX leaves GPU memory to experts.

    Call it before JAX starts.

    Args:
      expert_memory: value of --expert-memory, None if it is not given.
      mesh: value of --mesh, None if it is not given.

    Returns:
      Bytes of the GPU for experts, "auto", or None if --expert-memory is not given.

    Raises:
      ValueError: the text is not a size, or there is a mesh.
    """
    if expert_memory is None:
        return None
    if mesh is not None:
        raise ValueError("--expert-memory is for one GPU; with --mesh, the devices share the experts")
    # JAX's default allocator takes most of a GPU when it starts or, without preallocation, up to twice what it needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return "auto" if expert_memory == "auto" else parse_bytes(expert_memory, "expert_memory")


def mesh_sizes(
    mesh: str | None, config: DSV4Config | None, *, context_parallel: bool = False, expert_parallel: bool = False
) -> dict[str, int]:
    """Parses --mesh and checks it.

    Args:
      mesh: value of --mesh, None if it is not given.
      config: configuration of the model to shard over the mesh; None to check the mesh alone.
      context_parallel: whether the compressed entries of a request are distributed over the axis "model".
      expert_parallel: whether each device along the axis "model" has whole experts.

    Returns:
      {axis: number of devices along it}, empty without --mesh.

    Raises:
      ValueError: the text is no mesh, the mesh does not divide the model, or the axis "model" has only one device
        although one of the two flags is given.
    """
    sizes = {} if mesh is None else parse_mesh(mesh)
    if config is not None:
        check_shardable(config, sizes, expert_parallel)
    check_context_parallel(sizes, context_parallel)
    if expert_parallel and sizes.get("model", 1) == 1:
        raise ValueError(f"{expert_parallel=} needs a mesh with more than one device along the axis model")
    return sizes
