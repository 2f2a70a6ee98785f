"""Fills a model with a checkpoint's tensors."""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dsv4_jax.checkpoint.keys import Weight
from dsv4_jax.checkpoint.match import listing, match_weights
from dsv4_jax.checkpoint.placement import Staging, bounds_of, expert_shapes, fill, tables_on_host
from dsv4_jax.checkpoint.progress import byte_bar
from dsv4_jax.checkpoint.reader import StoredTensor, read_checkpoint
from dsv4_jax.checkpoint.storage import QuantizedTensor
from dsv4_jax.checkpoint.tokenizer import read_tokenizer
from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages import ExpertMemory, HostTables
from dsv4_jax.nn import DeepseekV4ForCausalLM, TokenMap
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.parameters import (
    ParameterView,
    indexed_shape,
    leaves,
    parameter_views,
    set_leaf,
    write_leaf,
)
from dsv4_jax.nn.shardings import check_blocks, parameter_sharding, sharded_structs
from dsv4_jax.nn.token_map import compressed_token_ids
from dsv4_jax.parallel.mesh import check_mesh, check_shardable
from dsv4_jax.quant import BLOCKS, quantized_struct


_MAX_HOST_BYTES = 1 << 26  # maximum number of bytes of an array that is assembled on the host


def load_checkpoint(
    path: str | Path,
    config: DSV4Config | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    weights: Literal["quantized"] | DTypeLike | None = None,
    mesh: Mesh | None = None,
    expert_parallel: bool = False,
    expert_memory: ExpertMemory | None = None,
    host_tables: HostTables | None = None,
    progress: bool = False,
    on_outline: Callable[[DeepseekV4ForCausalLM], None] | None = None,
) -> DeepseekV4ForCausalLM:
    """Reads a DeepSeek-V4 checkpoint in any of the three namings, see `checkpoint.keys`.

    Tensors may be F32, BF16, F16, integers, or in the release's quantized storage (FP8 linears, FP4 experts: see
    `checkpoint.storage`). Files are memory-mapped, and one parameter is converted at a time. On a mesh, each device
    gets only its shard.

    Args:
      path: a folder with `model.safetensors` or shards and their index, or one `.safetensors` file.
      config: configuration of the model. None reads config.json beside the tensors, for a model without draft layers.
        For a model with draft layers, give `DSV4Config.from_hf(path, mtp=True)`.
      dtype: dtype of the activations, bfloat16 or float32.
      weights: dtype of the embedding and the linear weights in memory: bfloat16 or float32, both of which hold every
        value of the quantized storage exactly. "quantized" keeps quantized weights quantized and dequantizes them on
        use, with equal results. None = the dtype of the activations. Some parameters are always float32, as their
        modules say.
      mesh: devices to shard the model over, with an axis "model", for instance `jax.make_mesh((4,), ("model",))`; see
        `parallel.axis_rules`. Give `KVCacheManager` the same mesh. None = the default device.
      expert_parallel: whether each device along "model" gets whole experts instead of a shard of each expert.
      expert_memory: places some of the routed experts, the embedding and Engram's tables in host memory, for a model
        that is larger than its GPU. It needs weights="quantized" and no mesh. None = all weights lie on the devices.
      host_tables: places Engram's tables in host memory, from which each device reads the rows of a step; the tables
        take 203 GB in V4.1-Flash. None = the tables lie on the devices, unless there is an `expert_memory`.
      progress: whether to show a progress bar on standard error.
      on_outline: function that is called before weights are read, with a model that has `jax.ShapeDtypeStruct` in
        place of arrays. The function can begin to compile programs with this model meanwhile. None = no call.

    Returns:
      The model. Tensors of draft layers are left out if the configuration has no draft layers. The tensors of V4.1's
      image encoder are left out, too. The log says so in both cases. The compressed token ids of Engram are computed
      from tokenizer.json beside the tensors.

    Raises:
      ValueError: in one of these cases:

        * `dtype` or `weights` is invalid, or `expert_memory` is given without weights="quantized" or with a mesh.
        * A file is missing or broken, see `checkpoint.reader`.
        * Tensors are missing, extra, of the wrong shape or kind, or have wrong scales (all in one message).
        * Weights are NaN or infinite, or ids of experts are out of range.
        * The mesh does not divide the model, or would split a block of weights that share a scale.
        * The model has Engram, and tokenizer.json is missing or belongs to another model.
        * The host or a device is out of memory.
    """
    if isinstance(weights, str) and weights not in ("quantized", "bfloat16", "float32"):
        raise ValueError(f"{weights=} must be quantized, bfloat16 or float32")
    if expert_memory is not None and (weights != "quantized" or mesh is not None):
        raise ValueError(f'expert_memory= needs weights="quantized" and no mesh, got {weights=}, {mesh=}')
    path = Path(path)
    stay_quantized = weights == "quantized"
    if config is None:
        config = DSV4Config.from_hf(path)
    if mesh is not None:
        check_mesh(mesh)
        check_shardable(config, mesh.shape, expert_parallel)
    param_dtype = None if stay_quantized else weights
    model = DeepseekV4ForCausalLM(config, dtype=dtype, param_dtype=param_dtype, rngs=ABSTRACT)
    table, tensors = match_weights(path, read_checkpoint(path), config)
    views = parameter_views(model)
    token_maps = {name: view.variable for name, view in views.items() if isinstance(view.variable, TokenMap)}
    assert {weight.path for weight in table} == views.keys() - token_maps, "the table of keys and the model disagree"
    token_ids = _read_token_ids(path, config) if token_maps else None

    groups = collections.defaultdict(list)  # {id of a variable: weights that it holds}
    for weight in table:
        groups[id(views[weight.path].variable)].append(weight)
    # Experts are loaded last if there is `expert_memory`, and get the memory that the other weights leave.
    ordered = sorted(groups.values(), key=lambda group: expert_memory is not None and group[0].is_expert)
    # Refuses layers with different numbers of experts before anything is loaded.
    layout = expert_shapes(table) if expert_memory else ([], [])
    loader = _Loader(config, tensors, views, mesh, expert_parallel, expert_memory, host_tables)
    if stay_quantized:
        for group in ordered:
            loader.keep_quantized(group)
    if on_outline is not None:
        on_outline(sharded_structs(model, mesh, expert_parallel=expert_parallel))
    with byte_bar("Loading weights" if progress else None, loader.nbytes(table)) as advance:
        for group in ordered:
            with _name_if_out_of_memory(path, group[0], mesh):
                if expert_memory is not None and group[0].is_expert and not expert_memory.layers:
                    expert_memory.plan(*layout)
                loader.load(group)
            advance(loader.nbytes(group))
    for variable in token_maps.values():
        variable.set_value(jax.device_put(token_ids, loader.sharding(variable)))
    if loader.problems:
        raise ValueError(f"{path} holds impossible values:{listing(loader.problems)}")
    return model


def _read_token_ids(path, config):
    """Returns the compressed id of each token id, [vocab] int32, from the tokenizer of a checkpoint with Engram."""
    tokenizer = read_tokenizer(path)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json, from which Engram's compressed token ids are computed")
    return compressed_token_ids(tokenizer, config)


@contextlib.contextmanager
def _name_if_out_of_memory(path, weight, mesh):
    """Turns an out-of-memory error of the host or a device into a ValueError that names the weight being loaded.

    Args:
      path: the checkpoint.
      weight: the weight that is loaded in this context.
      mesh: the mesh that the model is sharded over; None for one device.
    """
    try:
        yield
    except MemoryError as error:
        raise ValueError(f"{path} does not fit: out of memory at {weight.path}. {error}") from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        devices = 1 if mesh is None else mesh.size
        raise ValueError(
            f"{path} does not fit: a device is out of memory at {weight.path}, on {devices} "
            f"device{'s' * (devices > 1)}. Shard the model over more devices (mesh=), or keep quantized weights "
            f'quantized (weights="quantized"). {error}'
        ) from error


@dataclasses.dataclass
class _Loader:
    """Loads the variables of a model one by one.

    A variable holds one weight, or several weights: stacked weights of equal layers, or weights of linear maps that are
    fused into one matrix.

    Attributes:
      config, mesh, expert_parallel, memory, host_tables: as for `load_checkpoint`.
      tensors: the checkpoint's tensors by name.
      views: the place of each weight in a variable of the model, by the weight's path.
      impossible: {name of a stored tensor: number of its values that no weight can have}.
    """

    config: DSV4Config
    tensors: Mapping[str, StoredTensor | QuantizedTensor]
    views: Mapping[str, ParameterView]
    mesh: Mesh | None
    expert_parallel: bool
    memory: ExpertMemory | None
    host_tables: HostTables | None
    staging: Staging = dataclasses.field(default_factory=Staging)
    impossible: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def problems(self) -> list[str]:
        """A sentence for each loaded tensor that has NaN, infinite values, or ids of experts that do not exist."""
        sentences = []
        for source, count in self.impossible.items():
            tensor = self.tensors[source]
            if tensor.dtype.startswith(("I", "U")):
                sentences.append(f"{source} names experts outside 0..{self.config.n_routed_experts - 1}")
            else:
                sentences.append(f"{source} has {count} NaN or infinite values of {math.prod(tensor.shape)}")
        return sentences

    def nbytes(self, weights: list[Weight]) -> int:
        """Returns the size of these weights in the files, in bytes."""
        return sum(self.tensors[source].nbytes for weight in weights for source in weight.sources)

    def keep_quantized(self, weights: list[Weight]) -> None:
        """Makes a variable's value a `QuantizedWeight` if all its weights can stay quantized, in the same kind.

        Raises ValueError if the mesh would split a block of weights that share a scale.
        """
        kinds = set()
        for weight in weights:
            for source in weight.sources:
                piece = self.tensors[source]
                if not isinstance(piece, QuantizedTensor) or not piece.can_stay:
                    return
                # Each piece has its own scales. If several pieces form one matrix, each must have whole blocks of rows.
                # Several pieces form one matrix if the weight has more pieces than experts: one for the gate, one for
                # the up projection.
                if piece.shape[0] % BLOCKS[piece.dtype][0] and len(weight.sources) > weight.shape[0]:
                    return
                kinds.add(piece.dtype)
        if len(kinds) > 1:
            return
        (kind,) = kinds
        variable = self.views[weights[0].path].variable
        variable.set_value(quantized_struct(kind, variable.get_value()))
        if (where := self.sharding(variable)) is not None:
            check_blocks(weights[0].path, variable.get_value().shape, kind, where)

    def sharding(self, variable: nnx.Variable) -> NamedSharding | None:
        """Returns the sharding of a variable; None without a mesh."""
        return None if self.mesh is None else parameter_sharding(variable, self.mesh, self.expert_parallel)

    def load(self, weights: list[Weight]) -> None:
        """Loads all weights of a variable. Unless the variable is quantized, values are converted to its dtype."""
        variable = self.views[weights[0].path].variable
        where = self.sharding(variable)
        if self.memory is not None and weights[0].is_expert:
            # Codes are copied to the GPU or to host memory, as planned.
            modules = [weight.module for weight in weights]
            stack = self.memory.place_stack(modules, variable.get_value().codes.shape)
            for number, weight in enumerate(weights):
                stack.write(number, [read() for read in self._pieces(weight, "codes")[0]])
            set_leaf(variable, "codes", stack.array)
        tables = tables_on_host(weights[0].path, self.memory, self.host_tables)
        for field, struct in leaves(variable.get_value()).items():
            if isinstance(struct, jax.Array):
                continue
            array = None
            shards = []  # (index of a shard, its array in host memory) if the host has the whole array
            if tables is not None:
                array, shards = tables.empty(struct.shape, struct.dtype, where)
            elif struct.size * struct.dtype.itemsize <= _MAX_HOST_BYTES:
                # Assembled on the host, because each update on the device would need a compiled program.
                shards = [((), np.zeros(struct.shape, struct.dtype))]
            for weight in weights:
                view = self.views[weight.path]
                pieces, check = self._pieces(weight, field)
                index = view.leaf_index(field)
                shape = indexed_shape(struct.shape, index)
                # Codes, scales (a `field` of a quantized weight) and stored tensors are views of the file, and several
                # threads copy them. Other weights are dequantized, one at a time.
                are_stored = all(isinstance(self.tensors[source], StoredTensor) for source in weight.sources)
                threads = are_stored or field is not None
                for shard_index, shard in shards:
                    fill({bounds_of(shard_index[-len(shape) :], shape): shard[index]}, pieces, shape, check, threads)
                if not shards:
                    # The sharding of this weight alone, without the axes of layers.
                    part = where and NamedSharding(where.mesh, PartitionSpec(*where.spec[view.num_layer_axes :]))
                    value = self.staging.place(pieces, shape, struct.dtype, part, check, threads)
                    write_leaf(variable, field, value, index)
            if shards and array is None:
                whole = shards[0][1]
                array = self.staging.place([whole.view], whole.shape, whole.dtype, where)
            if array is not None:
                set_leaf(variable, field, array)

    def _pieces(self, weight, field):
        """Returns the functions that read a weight's stored tensors, and the function that checks their values.

        Scales need no check, so for them the second function is None.

        Args:
          weight: the weight.
          field: "codes" or "scale" of a quantized weight; None for a plain array.
        """
        tensors: list[Any] = [self.tensors[source] for source in weight.sources]

        def check(number, stored, value):
            """Counts the values of a block that are not finite, or are no ids of experts."""
            if field == "codes":
                count = tensors[number].count_nan(stored)
            elif value.dtype.kind == "i":  # the model's only integers are the ids in the tables of hash-routed layers
                count = np.count_nonzero((stored < 0) | (stored >= self.config.n_routed_experts))
            else:
                count = value.size - np.count_nonzero(np.isfinite(value))
            if count:
                self.impossible[weight.sources[number]] += int(count)

        if field is None:
            return [tensor.load for tensor in tensors], check
        stored = [getattr(tensor, field) for tensor in tensors]
        return [functools.partial(x.data.reshape, x.shape) for x in stored], check if field == "codes" else None
