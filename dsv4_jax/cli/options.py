"""Options and helpers that the commands share. Importing this module does not import JAX."""

import dataclasses
import functools
import math
import operator
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, dataclass_transform, get_args, get_origin

import tyro

from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import block_tokens
from dsv4_jax.parallel.mesh import check_context_parallel, check_shardable, parse_mesh


Dtype = Literal["float32", "bfloat16"]
# {name of a released model: function that returns its configuration, with DSpark's draft layers if it has them}.
PRESETS = {name: getattr(DSV4Config, name) for name in ("v4_flash", "v4_pro", "v4_flash_0731", "v4_pro_0813")} | {
    "v41_flash": functools.partial(DSV4Config.v41_flash, mtp=True)
}
MODELS = "|".join((*PRESETS, "DIR"))  # text that stands for the value of an option that names a model


# {option: its minimum}, the same in all commands. If an option has several numbers, each must reach the minimum.
MINIMUMS = dict.fromkeys(
    ("decode_from", "drafts", "grace_seconds", "max_waiting", "reply", "request_seconds", "skew"), 0
)
MINIMUMS |= dict.fromkeys(
    (
        "beams",
        "block_tokens",
        "calls",
        "chunk",
        "context",
        "conversations",
        "index_topk",
        "max_new_tokens",
        "max_query_tokens",
        "max_requests",
        "n_best",
        "prompts",
        "requests",
        "token_budget",
        "turns",
    ),
    1,
)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command:
    """The base class of commands. Each subclass becomes a frozen dataclass, whose fields are the command's options.

    If the default of an option is None, its help text says what that means. tyro then does not add the default.
    """

    def __init_subclass__(cls):
        for name, kind in cls.__annotations__.items():
            if getattr(cls, name, ...) is None and get_origin(kind) is not Annotated:
                value, _ = get_args(kind)  # of the type VALUE | None
                choices = get_args(value)
                metavar = f"{{{','.join(choices)}}}" if choices else value.__name__.upper()
                cls.__annotations__[name] = Annotated[kind, optional(metavar)]
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def check_minimums(self) -> None:
        """Raises ValueError, which names the option, if an option is below its minimum, infinite or NaN."""
        for name, minimum in MINIMUMS.items():
            option = getattr(self, name, None)
            for value in option if isinstance(option, tuple) else (option,):
                if value is not None and not minimum <= value < math.inf:  # also true for NaN
                    raise ValueError(f"{name}={value} must be at least {minimum}")

    def explain(self, error: Exception) -> str:
        """Returns an error's message for users of the command line.

        Text such as "max_requests=0" becomes "--max-requests 0" if the command has this option.
        """

        def option(match):
            """Returns the option in place of the match NAME=VALUE, or the match if there is no such option."""
            name, value = match.groups()
            if name not in vars(self):
                return match[0]
            return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")

        return re.sub(r"(?<![\w.-])([a-z]\w*)=('[^']*'|[\w.+-]*\w)", option, str(error))

    def expert_bytes(self) -> int | Literal["auto"] | None:
        """Parses --expert-memory. Call it before JAX starts.

        If the option is given, sets environment variables with which JAX leaves GPU memory to experts.

        Returns:
          Bytes of the GPU for experts, "auto", or None if --expert-memory is not given.

        Raises:
          ValueError: the text is not a size, or there is a mesh.
        """
        values = vars(self)
        expert_memory = values.get("expert_memory")
        if expert_memory is None:
            return None
        if values.get("mesh") is not None:
            raise ValueError("--expert-memory is for one GPU; with --mesh, the devices share the experts")
        # JAX's default allocator takes most of a GPU when it starts or, without preallocation, up to twice what it
        # needs.
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return "auto" if expert_memory == "auto" else parse_bytes(expert_memory, "expert_memory")

    def mesh_sizes(self, config: DSV4Config | None = None) -> dict[str, int]:
        """Parses --mesh and checks it.

        Args:
          config: configuration of the model to shard over the mesh; None to check the mesh alone.

        Returns:
          {axis: number of devices along it}, empty without --mesh.

        Raises:
          ValueError: the text is no mesh, the mesh does not divide the model, or --context-parallel or
            --expert-parallel is given although the axis "model" has only one device.
        """
        values = vars(self)
        expert_parallel = values.get("expert_parallel", False)
        sizes = parse_mesh(values["mesh"]) if values.get("mesh") is not None else {}
        if config is not None:
            check_shardable(config, sizes, expert_parallel)
        check_context_parallel(sizes, values.get("context_parallel", False))
        if expert_parallel and sizes.get("model", 1) == 1:
            raise ValueError(f"{expert_parallel=} needs a mesh with more than one device along the axis model")
        return sizes


def subcommands(**commands: Any) -> Any:
    """Returns the type for which tyro parses one of several commands, given as NAME=CLASS."""
    kinds: Any = [Annotated[command, tyro.conf.subcommand(name)] for name, command in commands.items()]
    return functools.reduce(operator.or_, kinds)


def optional(metavar: str, **options: Any) -> Any:
    """Returns the `tyro.conf.arg` of an option whose help text states its default, so that tyro does not add it.

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


def whole_blocks(config: DSV4Config, tokens: int) -> int:
    """Returns the number of tokens rounded up to whole blocks, but at most the model's context.

    If this number is the cache's context, prompts of similar lengths share a compiled program.
    """
    return min(tokens + -tokens % block_tokens(config), config.max_position_embeddings)


def check_context(config: DSV4Config, tokens: int, option: str) -> None:
    """Raises ValueError if a request of `tokens` tokens is longer than the model's context.

    The error begins with the text `option`, which names the options that determine the number of tokens.
    """
    if tokens > (limit := config.max_position_embeddings):
        raise ValueError(
            f"{option}: a request of {tokens} tokens, prompt and new ones, is longer than the model's context, "
            f"max_position_embeddings={limit}"
        )


def check_file(option: str, path: Path | None, use: Literal["read", "written"]) -> None:
    """Raises ValueError, which names the option, if its file cannot be used. Leaves the disk as it is.

    Args:
      option: name of the option.
      path: the option's file; None is not checked.
      use: what the command does with the file.
    """
    try:
        if path is None:
            return
        if use == "written" and not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        else:
            path.open("rb" if use == "read" else "ab").close()
    except OSError as error:
        raise ValueError(f"--{option} {path} cannot be {use}: {error.strerror}") from None
