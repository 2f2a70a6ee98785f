"""Option types and helpers that the commands share. Importing this module does not import JAX."""

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from dsv4_jax.data import block_tokens, packaged_checkpoint
from dsv4_jax.parallel.mesh import check_context_parallel, check_shardable, parse_mesh


if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dsv4_jax.config import DSV4Config
    from dsv4_jax.host import KVCacheManager
    from dsv4_jax.nn import DeepseekV4ForCausalLM

CacheFormat = Literal["v4", "per_entry", "plain"]
Dtype = Literal["float32", "bfloat16"]
Weights = Annotated[
    Literal["quantized", "bfloat16", "float32"] | None,
    tyro.conf.arg(metavar="{stored,bfloat16,float32}", help_behavior_hint=""),
]
MeshText = Annotated[str | None, tyro.conf.arg(name="mesh", metavar="data=M,model=N", help_behavior_hint="")]
JsonFlag = Annotated[bool, tyro.conf.arg(name="json")]


def use_compilation_cache() -> None:
    """Has JAX keep compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR names another.

    It keeps small ones too, of which a run needs dozens. JAX reads these variables when it is imported, and
    JAX_ENABLE_COMPILATION_CACHE=false, which turns the cache off.
    """
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folder = caches / "dsv4_jax" / "programs"
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or not folder.is_absolute():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return  # a home that cannot be written to: programs are compiled every time
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def notify(text: str) -> None:
    """Says on stderr what takes a while."""
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def compiling_for(device: str) -> str:
    """What to say before programs are compiled."""
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
    """Reads the weights as --dtype and --weights say; logs which tensors of a user's own checkpoint it skips.

    Without --weights they stay as they are stored on a GPU, whose kernels read them so, and become --dtype elsewhere.
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
    cut = dict(mesh=mesh, expert_parallel=expert_parallel)
    return load_checkpoint(checkpoint, config, dtype=jnp.dtype(dtype), weights=weights, progress=progress, **cut)


def check_mesh_text(
    text: str | None, config: "DSV4Config", context_parallel: bool = False, expert_parallel: bool = False
) -> dict[str, int]:
    """Sizes of --mesh by axis, none without it.

    Raises:
      ValueError: it is no mesh, or cannot cut the model as --expert-parallel, or the context as --context-parallel
      says.
    """
    sizes = {} if text is None else parse_mesh(text)
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
    """A manager of a cache for `requests` requests of up to `tokens` tokens, `drafts` of which are guessed at once.

    Where a mesh cuts requests, each part has as many slots as the others, and where it splits their context, each
    device as many blocks.

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
    size, parts = block_tokens(config), 1 if mesh is None else mesh.shape.get("data", 1)
    requests, blocks = -(-requests // parts) * parts, -(-tokens // size)
    devices = mesh.size if mesh is not None and context_parallel else 1
    return KVCacheManager(
        config,
        num_blocks=-(-requests * blocks // devices) * devices,
        max_requests=requests,
        # Whole blocks, so that prompts of similar lengths share a compiled program.
        max_context=min(blocks * size, limit),
        block_tokens=size,
        kv_format=cache_format,
        dtype=jnp.dtype(dtype),
        max_query_tokens=1 + drafts,
        mesh=mesh,
        context_parallel=context_parallel,
    )


def check_positive(**sizes: int) -> None:
    """Raises ValueError naming the option whose value is below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


def check_not_negative(**sizes: int) -> None:
    """Raises ValueError naming the option whose value is below 0."""
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 0")


def check_writable(option: str, path: Path) -> None:
    """Raises ValueError if the option's file cannot be written; changes nothing."""
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"--{option} {path} cannot be written: {error.strerror}") from None
