"""Fills a model with a checkpoint's tensors."""

import collections
import contextlib
import difflib
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Weight, is_draft, is_draft_copy
from dsv4_jax.checkpoint.placement import Staging
from dsv4_jax.checkpoint.reader import StoredTensor, read_checkpoint
from dsv4_jax.checkpoint.storage import QuantizedTensor, join_scales
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.projections import ModuleFiller
from dsv4_jax.nn.shardings import check_blocks, parameter_sharding
from dsv4_jax.parallel.mesh import check_mesh, check_shardable
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


_log = logging.getLogger(__name__)
_MAX_LISTED = 100  # problems of each kind: a wrong config would list tens of thousands
_MAX_COMPARED = 200  # candidates for the nearest name


def load_checkpoint(
    path: str | Path,
    config: DSV4Config | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    weights: Literal["quantized"] | DTypeLike | None = None,
    mesh: Mesh | None = None,
    expert_parallel: bool = False,
    fused: bool = False,
    expert_memory: ExpertMemory | None = None,
    progress: bool = False,
) -> DeepseekV4ForCausalLM:
    """Reads a DeepSeek-V4 checkpoint, in any of the three namings.

    Tensors may be F32, BF16, F16, integers, or in the release's quantized storage (FP8 linears, FP4 experts: see
    `checkpoint.storage`). Files are memory-mapped. One parameter is converted at a time; on a mesh each device gets its
    shard straight from the file's pages.

    Args:
        path: a folder with `model.safetensors` or shards and their index, or one `.safetensors` file.
        config: configuration of the model. None reads config.json beside the tensors, without the
            multi-token-prediction block: for drafts, give `DSV4Config.from_hf(path, mtp=True)`.
        dtype: dtype of the activations, bfloat16 or float32.
        weights: dtype of embedding and linear weights, bfloat16 or float32; both hold every value of the quantized
            storage exactly. "quantized" keeps quantized weights quantized in memory and dequantizes them on use, with
            equal results. None = the dtype of the activations. The module decides which parameters are always float32.
        mesh: devices to shard the model over, with an axis "model", for instance `jax.make_mesh((4,), ("model",))`; see
            `parallel.axis_rules`. Give `KVCacheManager` the same mesh. None = the default device.
        expert_parallel: whether each device along "model" gets whole experts instead of a shard of each expert.
        fused: whether linear maps of one input share a matrix, see `nn.fuse_projections`.
        expert_memory: where the routed experts of the release's storage lie, for a model that is larger than its GPU;
            the embedding lies in host memory then. None = on the devices. Needs weights="quantized" and no mesh.
        progress: whether to show a progress bar on standard error.

    Returns:
        The model. Tensors of multi-token prediction are left out, and logged, if the configuration has none.

    Raises:
        ValueError: the dtype or `weights` is invalid; a file is broken (see `reader`); tensors are missing, extra,
            mis-shaped, of the wrong kind or have wrong scales (all in one message); weights are NaN or infinite; the
            mesh does not divide the model or would split a block of weights with one scale; a device is out of memory.
    """
    if isinstance(weights, str) and weights not in ("quantized", "bfloat16", "float32"):
        raise ValueError(f"{weights=} must be quantized, bfloat16 or float32")
    if expert_memory is not None and (weights != "quantized" or mesh is not None):
        raise ValueError(f'expert_memory= needs weights="quantized" and no mesh, got {weights=}, {mesh=}')
    path, stay = Path(path), isinstance(weights, str) and weights == "quantized"
    if config is None:
        config = DSV4Config.from_hf(path if path.is_dir() else path.parent / "config.json")
    if mesh is not None:
        check_mesh(mesh)
        check_shardable(config, mesh.shape, expert_parallel)
    param_dtype = None if stay else weights
    model = DeepseekV4ForCausalLM(config, dtype=dtype, param_dtype=param_dtype, rngs=ABSTRACT)
    stored = read_checkpoint(path)
    if not config.num_nextn_predict_layers and (unused := [name for name in stored if is_draft(name)]):
        _log.info("%d tensors of multi-token prediction (%s, ...) are not used", len(unused), unused[0])
        stored = {name: x for name, x in stored.items() if not is_draft(name)}
    # The block shares the model's embedding and head; a file may hold copies of them.
    stored = {name: x for name, x in stored.items() if not is_draft_copy(name)}
    tensors, wrong_scales = join_scales(stored)

    filler = ModuleFiller(model, fused=fused)
    table = list(keys.weights(config, keys.detect_naming(config, stored)))
    if config.tie_word_embeddings:
        table = list(keys.tied(table, stored))
    shapes = {key: parameter.shape for key, parameter in filler.parameters.items()}
    assert {weight.path: weight.shape for weight in table} == shapes, "the table of keys and the model disagree"
    dtypes = {key: np.dtype(parameter.dtype) for key, parameter in filler.parameters.items()}
    _refuse_mismatches(table, tensors, dtypes, wrong_scales)

    if expert_memory is not None:
        # The experts come last and get the memory that the others leave.
        table.sort(key=lambda weight: weight.is_expert)
    bad, staging = [], Staging()
    for number, weight in enumerate(_with_bar(table, tensors, progress), 1):
        pieces, parameter = [tensors[source] for source in weight.sources], filler.parameters[weight.path]
        where = None if mesh is None else parameter_sharding(parameter, mesh, expert_parallel)
        with _name_if_out_of_memory(path, weight, f"number {number} of {len(table)}", mesh):
            memory = expert_memory if weight.is_expert else None
            if memory is not None and not memory.is_planned:
                _log.info("%s", _plan(memory, table))
            value = _stored(weight, pieces, dtypes[weight.path], where, staging, memory) if stay else None
            if value is None:
                value, problems = _converted(weight, pieces, dtypes[weight.path], config, where, staging)
                bad += problems
            if expert_memory is not None and weight.path == keys.EMBEDDING and isinstance(value, jax.Array):
                value = expert_memory.place_on_host(value)
            if not bad:
                filler.set(weight.path, value)
    if bad:
        raise ValueError(f"{path} holds impossible values:{_listing(bad)}")
    return model


@contextlib.contextmanager
def _name_if_out_of_memory(path: Path, weight: Weight, place: str, mesh: Mesh | None) -> Iterator[None]:
    """Raises ValueError, which names the weight and its place among all, if the host or a device is out of memory."""
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"{path} does not fit: out of memory at {weight.path}. {error}") from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        devices = 1 if mesh is None else mesh.size
        raise ValueError(
            f"{path} does not fit: a device is out of memory at {weight.path}, {place}, on {devices} "
            f"device{'s' * (devices > 1)}. Shard the model over more devices (mesh=), or keep quantized weights "
            f'quantized (weights="quantized"). {error}'
        ) from error


def _plan(memory: ExpertMemory, table: list[Weight]) -> str:
    """Decides where experts lie; returns a sentence about it."""
    experts = [weight for weight in table if weight.is_expert]
    (first, *_), layers = experts, {weight.module for weight in experts}
    shapes = [weight.packed_shape for weight in experts if weight.module == first.module]
    return memory.plan(len(layers), shapes)


def _with_bar(
    table: list[Weight], tensors: Mapping[str, StoredTensor | QuantizedTensor], progress: bool
) -> Iterator[Weight]:
    """Yields the table's weights under a progress bar that counts bytes."""
    sizes = {weight.path: sum(tensors[source].nbytes for source in weight.sources) for weight in table}
    columns = "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("Loading weights", total=sum(sizes.values()))
        for weight in table:
            yield weight
            bar.advance(task, sizes[weight.path])


def _stored(
    weight: Weight,
    pieces: list[StoredTensor | QuantizedTensor],
    dtype: np.dtype,
    where: NamedSharding | None,
    staging: Staging,
    memory: ExpertMemory | None,
) -> QuantizedWeight | None:
    """Loads a weight in its quantized storage; returns None if it cannot stay quantized."""
    quantized = [piece for piece in pieces if isinstance(piece, QuantizedTensor) and piece.can_stay]
    if len(quantized) < len(pieces) or len({piece.dtype for piece in quantized}) > 1:
        return None
    first = quantized[0]
    # Pieces of one matrix must end at a block of rows: each piece has its own scales.
    if first.dtype == "FP8" and first.shape[0] % WEIGHT_BLOCK and len(pieces) > weight.shape[0]:
        return None

    if where is not None:
        check_blocks(weight.path, weight.shape, first.dtype, where)

    def whole(tensors: list[StoredTensor]) -> jax.Array:
        rows, columns = tensors[0].shape
        matrices = [functools.partial(tensor.data.reshape, tensor.shape) for tensor in tensors]
        rows *= len(tensors) // math.prod(weight.shape[:-2])
        return staging.place(matrices, (*weight.shape[:-2], rows, columns), np.uint8, where)

    scale = whole([piece.scale for piece in quantized])
    if memory is None:
        codes = whole([piece.codes for piece in quantized])
    else:
        codes = memory.place(weight.module, [piece.codes.data for piece in quantized], weight.packed_shape)
    return QuantizedWeight(codes, scale, first.dtype, dtype)


def _converted(
    weight: Weight,
    pieces: list[StoredTensor | QuantizedTensor],
    dtype: np.dtype,
    config: DSV4Config,
    where: NamedSharding | None,
    staging: Staging,
) -> tuple[jax.Array, list[str]]:
    """Loads a weight in the parameter's dtype; returns it with a list of problems."""
    experts = config.n_routed_experts
    wrong: list[tuple[int, int]] = []  # (number of the piece, count)

    def check(number: int, stored: np.ndarray, value: np.ndarray) -> None:
        # The model's only integers are the hash layers' expert ids.
        bad = (stored < 0) | (stored >= experts) if dtype.kind == "i" else ~np.isfinite(value)
        if count := int(np.count_nonzero(bad)):
            wrong.append((number, count))

    # Dequantizing takes memory, and threads would keep it.
    views = all(isinstance(piece, StoredTensor) for piece in pieces)
    value = staging.place([piece.load for piece in pieces], weight.shape, dtype, where, check, threads=views)
    size = math.prod(weight.source_shape)
    many = "names experts outside 0..{last}" if dtype.kind == "i" else "has {count} NaN or infinite values of {size}"
    counts = collections.Counter[int]()
    for number, count in wrong:
        counts[number] += count
    found = [
        f"{pieces[number].name} {many.format(last=experts - 1, count=count, size=size)}"
        for number, count in sorted(counts.items())
    ]
    return value, found


def _refuse_mismatches(
    table: list[Weight],
    stored: dict[str, StoredTensor | QuantizedTensor],
    dtypes: dict[str, np.dtype],
    wrong_scales: dict[str, str],
) -> None:
    """Raises one ValueError with all differences between the needed and the stored tensors."""
    needed = {source: weight for weight in table for source in weight.sources}
    missing = [name for name in needed if name not in stored and name not in wrong_scales]
    extra = [name for name in stored if name not in needed]
    shapes, kinds = [], []
    for name, weight in needed.items():
        if name not in stored:
            continue
        tensor = stored[name]
        if tensor.shape != weight.source_shape:
            shapes.append(f"{name} is {list(tensor.shape)}, needed {list(weight.source_shape)}")
        if tensor.dtype.startswith(("I", "U")) != (dtypes[weight.path].kind == "i"):
            kinds.append(f"{name} is stored as {tensor.dtype}, needed for {dtypes[weight.path]}")
    problems = {
        "missing": _with_nearest(missing, extra),
        "extra": _with_nearest(extra, missing),
        "of another shape": shapes,
        "of another kind": kinds,
        "without the right scale": list(wrong_scales.values()),
    }
    found = [f"{len(lines)} {what}:{_listing(lines)}" for what, lines in problems.items() if lines]
    if found:
        raise ValueError("the checkpoint does not fit the configuration.\n" + "\n".join(found))


def _with_nearest(names: list[str], others: list[str]) -> list[str]:
    """Adds the most similar other name to each name that will be listed."""
    near = (difflib.get_close_matches(name, others[:_MAX_COMPARED], n=1, cutoff=0.8) for name in names[:_MAX_LISTED])
    found = [f"{name} (near: {match[0]})" if match else name for name, match in zip(names, near, strict=False)]
    return found + names[_MAX_LISTED:]


def _listing(lines: list[str]) -> str:
    more = [f"... and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "".join(f"\n  {line}" for line in lines[:_MAX_LISTED] + more)
