"""Option types and helpers that the commands share. Importing this module does not import JAX."""

import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from dsv4_jax.data import block_tokens, packaged_checkpoint
from dsv4_jax.parallel.mesh import check_context_parallel, check_shardable, parse_mesh
from dsv4_jax.sizes import parse_bytes


if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsv4_jax.config import DSV4Config
    from dsv4_jax.host import KVCacheManager
    from dsv4_jax.nn import DeepseekV4ForCausalLM

Dtype = Literal["float32", "bfloat16"]


def optional(metavar: str, **options: Any) -> Any:
    """Returns the `tyro.conf.arg` of an option whose help text states its default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="", **options)


CacheFormat = Annotated[
    Literal["v4", "per_entry", "plain"],
    tyro.conf.arg(
        help="format of the cache's rows. v4: as released (FP8 rows, FP4 indexer keys). per_entry: one float32 scale a "
        "row. plain: not quantized."
    ),
]
Weights = Annotated[
    Literal["quantized", "bfloat16", "float32"] | None,
    optional(
        "{quantized,bfloat16,float32}",
        help="dtype of embedding and linear weights in memory. quantized: weights that are FP8 or FP4 in the files "
        "stay so, and are dequantized on use. Default: quantized on a GPU, else --dtype.",
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
        "The others lie in host memory, where the GPU reads them. auto: what weights, cache and programs leave. "
        "Default: all experts on the GPU.",
    ),
]
JsonFlag = Annotated[bool, tyro.conf.arg(name="json")]


def use_compilation_cache() -> None:
    """Makes JAX keep compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR names another.

    JAX reads this variable when it is imported, so later it is told. JAX_ENABLE_COMPILATION_CACHE=false turns the cache
    off. Whole steps are kept in a folder of their own within, see `dsv4_jax.decode.program_store`.
    """
    # A run needs dozens of small programs: keep these too.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dsv4_jax" / "programs"
        if not folder.is_absolute():
            return
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            return  # a home folder without write access: programs are compiled every time
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    programs = os.environ["JAX_COMPILATION_CACHE_DIR"]
    is_on = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "true").lower() in ("1", "true", "t", "yes", "y", "on")
    if is_on and programs and "://" not in programs:
        os.environ.setdefault("DSV4_JAX_PROGRAMS", os.path.join(os.path.abspath(programs), "steps"))
    if is_on and programs and "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        seconds = float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
        if jax.config.jax_compilation_cache_dir is None:
            jax.config.update("jax_compilation_cache_dir", programs)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
            compilation_cache.reset_cache()  # if a program was compiled before, JAX has noted that there is no cache


def notify(text: str) -> None:
    """Prints a message about a slow operation to stderr."""
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def compiling_for(device: str) -> str:
    """Returns the message that is shown while programs are compiled."""
    import jax

    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    return f"Compiling for {device} ..." + (f" (compiled programs are kept in {folder})" if folder else "")


def load_model(
    checkpoint: Path,
    config: "DSV4Config",
    dtype: Dtype,
    weights: Weights,
    *,
    progress: bool,
    mesh: "Mesh | None" = None,
    expert_parallel: bool = False,
) -> "DeepseekV4ForCausalLM":
    """Loads a checkpoint with the given dtypes, and logs the tensors of a user's own checkpoint that it skips.

    If `weights` is None, quantized weights stay quantized on a GPU and are converted to `dtype` elsewhere.
    """
    import jax
    import jax.numpy as jnp
    from rich.logging import RichHandler

    from dsv4_jax.checkpoint import load_checkpoint

    if weights is None and jax.default_backend() == "gpu":
        weights = "quantized"
    log = logging.getLogger("dsv4_jax")
    if checkpoint != packaged_checkpoint() and not log.handlers:
        log.setLevel(logging.INFO)
        log.addHandler(RichHandler(console=Console(stderr=True), show_time=False, show_level=False, show_path=False))
    return load_checkpoint(
        checkpoint,
        config,
        dtype=jnp.dtype(dtype),
        weights=weights,
        progress=progress,
        mesh=mesh,
        expert_parallel=expert_parallel,
    )


def expert_bytes(expert_memory: str | None, mesh: str | None) -> int | Literal["auto"] | None:
    """Parses --expert-memory; before JAX starts, so that JAX leaves room for the experts.

    Raises:
      ValueError: the text is not a size, or there is a mesh.
    """
    if expert_memory is None:
        return None
    if mesh is not None:
        raise ValueError("--expert-memory is for one GPU; with --mesh, the devices share the experts")
    # JAX's default allocator takes most of a GPU at once, or twice what it needs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if expert_memory == "auto":
        return "auto"
    try:
        return parse_bytes(expert_memory)
    except ValueError as error:
        raise ValueError(f"--expert-memory: {str(error).removeprefix('memory=')}") from None


def mesh_sizes(
    mesh: str | None, config: "DSV4Config | None", *, context_parallel: bool = False, expert_parallel: bool = False
) -> dict[str, int]:
    """Parses --mesh and returns the number of devices along each axis; {} without a mesh.

    If `config` is given, also checks that the mesh can shard this model.

    Raises:
      ValueError: the text is not a mesh, or the mesh cannot shard the model in the requested way.
    """
    sizes = {} if mesh is None else parse_mesh(mesh)
    if config is not None:
        check_shardable(config, sizes, expert_parallel)
    check_context_parallel(sizes, context_parallel)
    if expert_parallel and sizes.get("model", 1) == 1:
        raise ValueError(f"{expert_parallel=} needs a mesh with more than one device along the axis model")
    return sizes


def make_manager(
    config: "DSV4Config",
    requests: int,
    tokens: int,
    cache_format: CacheFormat,
    dtype: Dtype,
    *,
    drafts: int = 0,
    mesh: "Mesh | None" = None,
    context_parallel: bool = False,
) -> "KVCacheManager":
    """Returns a manager of a cache with room for `requests` requests of up to `tokens` tokens.

    Slots and blocks are rounded up so that every device of the mesh holds the same number.

    Args:
      config: the model's configuration.
      requests: number of requests.
      tokens: number of tokens in a request, prompt included.
      cache_format: format of the cache's rows.
      dtype: dtype of the model.
      drafts: number of draft tokens that a step verifies for a request.
      mesh: the devices; None for the default device.
      context_parallel: whether the devices along "model" share a request's blocks.

    Raises:
      ValueError: the model's context is shorter, or the format does not fit the model.
    """
    import jax.numpy as jnp

    from dsv4_jax.host import KVCacheManager

    limit = config.max_position_embeddings
    if tokens > limit:
        raise ValueError(
            f"a request of {tokens} tokens (prompt and new ones) is longer than the model's context: "
            f"max_position_embeddings={limit}"
        )
    size, groups = block_tokens(config), 1 if mesh is None else mesh.shape.get("data", 1)
    requests, blocks = -(-requests // groups) * groups, -(-tokens // size)
    devices = mesh.size if mesh is not None and context_parallel else 1
    return KVCacheManager(
        config,
        num_blocks=-(-requests * blocks // devices) * devices,
        max_requests=requests,
        # A multiple of the block size, so that prompts of similar lengths share a compiled program.
        max_context=min(blocks * size, limit),
        block_tokens=size,
        kv_format=cache_format,
        dtype=jnp.dtype(dtype),
        max_query_tokens=1 + drafts,
        mesh=mesh,
        context_parallel=context_parallel,
    )


def check_at_least(minimum: int, **values: int | float) -> None:
    """Raises ValueError, which names the option, if a value is below the minimum."""
    for name, value in values.items():
        if not minimum <= value < math.inf:  # nan neither
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least {minimum}")


def check_writable(option: str, path: Path) -> None:
    """Raises ValueError if the option's file cannot be written. Changes nothing on disk."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"--{option} {path} cannot be written: {error.strerror}") from None
