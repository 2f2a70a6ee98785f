"""Options of commands that run a model, and how these commands make the model. Does not import JAX when imported."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dsv4_jax.cli import options
from dsv4_jax.cli.options import Command, optional
from dsv4_jax.cli.startup import show_log
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import block_tokens, packaged_checkpoint
from dsv4_jax.parallel.mesh import make_mesh


if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsv4_jax.cache import CacheSchema
    from dsv4_jax.decode import CompiledModel
    from dsv4_jax.host import KVCacheManager


class ModelOptions(Command):
    """The options of commands that run a model, and methods that make the model and the cache's manager from them.

    Attributes:
      dtype: dtype of activations, and of weights unless --weights is given.
      weights: dtype of embedding and linear weights in memory. quantized: weights that are FP8 or FP4 in the files stay
        FP8 or FP4, and are dequantized on use. Default: quantized on a GPU, else --dtype.
      expert_placement: with --expert-memory: file that keeps how often experts were selected, such as placement.npz
        beside the checkpoint. The next start places the hottest experts on the GPU. Default: no file.
    """

    cache_format: options.CacheFormat = None
    dtype: options.Dtype = "bfloat16"
    weights: Literal["quantized", "bfloat16", "float32"] | None = None
    mesh: options.MeshOption = None
    expert_parallel: options.ExpertParallel = False
    context_parallel: options.ContextParallel = False
    expert_memory: options.ExpertMemoryOption = None
    expert_placement: Path | None = None
    host_tables: options.HostTablesOption = False

    def check_devices(self, config: DSV4Config) -> dict[str, int]:
        """Checks the options about devices. Call it before JAX starts, because it may set JAX's environment variables.

        Returns:
          {axis of --mesh: number of devices}, empty without --mesh.

        Raises:
          ValueError: the mesh cannot shard the model, other options contradict --expert-memory, the file of
            --expert-placement cannot be written, or the model has no tables for --host-tables.
        """
        if self.expert_bytes() is not None and self.weights not in (None, "quantized"):
            raise ValueError(f"--expert-memory needs --weights quantized, got {self.weights}")
        if self.expert_placement is not None:
            if self.expert_memory is None:
                raise ValueError("--expert-placement needs --expert-memory: otherwise all experts lie on the GPU")
            options.check_file("expert-placement", self.expert_placement, "written")
        if self.host_tables and config.engram is None:
            raise ValueError("--host-tables is for models with Engram, such as DeepSeek-V4.1; this one has no tables")
        return self.mesh_sizes(config)

    @functools.cached_property
    def devices(self) -> "Mesh | None":
        """The mesh of devices that --mesh describes; None without --mesh, for the default device."""
        sizes = self.mesh_sizes()
        return make_mesh(sizes) if sizes else None

    def load_model(
        self,
        checkpoint: Path,
        schema: "CacheSchema",
        *,
        step_tokens: int = 8192,
        progress: bool = False,
        begin_programs: "Callable[[CompiledModel], None] | None" = None,
    ) -> "CompiledModel":
        """Loads the model. The package's log is shown meanwhile, except for the packaged model.

        Without --weights, quantized weights stay quantized on a GPU and are converted to --dtype elsewhere.

        Args:
          checkpoint: folder of the checkpoint.
          schema: schema of the cache, for which --expert-memory auto leaves room. It has the model's configuration.
          step_tokens: number of tokens of the largest step, for which --expert-memory auto leaves room.
          progress: whether to show a progress bar.
          begin_programs: function that is called with the model before its weights are read, to start compiling the
            model's programs; see `Engine.begin_programs`. None = no call.
        """
        import jax.numpy as jnp

        from dsv4_jax.decode import CompiledModel
        from dsv4_jax.expert_pages import ExpertMemory, HostTables, program_bytes

        experts = None
        if (size := self.expert_bytes()) is not None:
            experts = ExpertMemory(
                None if size == "auto" else size,
                reserved_bytes=program_bytes(step_tokens, schema.config) + schema.memory_bytes(),
                placement_file=self.expert_placement,
            )
        if checkpoint != packaged_checkpoint():
            show_log()
        outlines = []  # the model without weights, whose programs are compiled while the weights are read

        def on_outline(module):
            """Keeps the model without weights, and begins to compile its programs."""
            assert begin_programs is not None
            outlines.append(CompiledModel(module, experts))
            begin_programs(outlines[0])

        module = self._load(
            checkpoint,
            schema.config,
            progress,
            dtype=jnp.dtype(self.dtype),
            mesh=self.devices,
            expert_parallel=self.expert_parallel,
            expert_memory=experts,
            host_tables=HostTables() if self.host_tables else None,
            on_outline=on_outline if begin_programs else None,
        )
        model = CompiledModel(module, experts)
        return outlines[0].with_weights(model) if outlines else model

    def _load(self, checkpoint, config, progress, **arguments):
        """Returns the module with its weights. `arguments` go to `load_checkpoint`, or to `random_model`."""
        import jax

        from dsv4_jax.checkpoint import load_checkpoint

        stay = arguments["expert_memory"] is not None or (self.weights is None and jax.default_backend() == "gpu")
        weights = "quantized" if stay else self.weights
        return load_checkpoint(checkpoint, config, weights=weights, progress=progress, **arguments)

    def make_manager(
        self, config: DSV4Config, requests: int, context: int, drafts: int = 0, memory: str | None = None
    ) -> "KVCacheManager":
        """Returns a manager of a cache.

        Args:
          config: configuration of the model.
          requests: maximum number of requests. It is rounded up so that the mesh's axis "data" divides it.
          context: maximum number of tokens of a request.
          drafts: number of drafts of each request that a step verifies.
          memory: size of the cache, such as "20GiB". None = room for `context` tokens of each request, with the number
            of blocks rounded up to a multiple of the mesh's size.

        Raises:
          ValueError: the model has draft layers that cannot make so many drafts, or a size is impossible.
        """
        import jax.numpy as jnp

        from dsv4_jax.decode.drafts import check_drafts
        from dsv4_jax.host import KVCacheManager

        tokens = block_tokens(config)
        sizes = self.mesh_sizes()
        requests += -requests % sizes.get("data", 1)
        blocks = requests * -(-context // tokens)
        blocks += -blocks % math.prod(sizes.values())
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
            mesh=self.devices,
            context_parallel=self.context_parallel,
        )
        if drafts and config.drafts is not None:
            check_drafts(manager.schema, drafts)
        return manager


class RandomModelOptions(ModelOptions):
    """The options of commands that can also run a model with random weights.

    Attributes:
      random_weights: run a model with random weights in place of a checkpoint, to measure its speed. The value says
        which configuration the model has: that of a released model, or config.json of a folder. Prompts are token ids,
        unless the folder has a tokenizer.json.
    """

    random_weights: Annotated[str | None, optional(options.MODELS)] = None
    skew: options.Skew = 0.0

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
        config = options.named_config(self.random_weights, "--random-weights", mtp=mtp)
        # The folder for a released model's name must not exist, so that no tokenizer.json is found in it.
        folder = packaged_checkpoint().parent / "none" if self.random_weights in options.PRESETS else Path()
        return folder / self.random_weights, config

    def _load(self, checkpoint, config, progress, **arguments):
        if self.random_weights is None:
            return super()._load(checkpoint, config, progress, **arguments)
        from dsv4_jax.checkpoint.random_weights import random_model

        return random_model(config, skew=self.skew, **arguments)


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
