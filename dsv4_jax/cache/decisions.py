"""The discrete decisions of a forward pass, which another forward pass can take instead of making its own."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from dsv4_jax.common.summary import Summarized
from dsv4_jax.config import DSV4Config
from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class Decisions(Summarized):
    """The experts and the selected entries of tokens, in the small dtypes of `decision_types`.

    Arrays hold codes: an id plus one, or 0 for no id, see `encode_ids` and `decode_ids`. A token whose codes are all 0,
    such as padding, has no recorded decisions. The first axes belong to tokens: [T, ...] in a `Batch`.

    Attributes:
      experts: [T, L, num_experts_per_tok] codes of each token's experts in the L decoder layers, in the router's order;
        None = the routers choose.
      selection: [T, S, K] codes of the entries that each token selects, in ascending order, then 0. S is the number of
        layers that select entries themselves, and K their largest `index_topk`. None = the indexers choose.
    """

    experts: Any = None
    selection: Any = None

    @classmethod
    def collect(
        cls,
        recorded: Sequence[tuple[Sequence[int], Mapping[str, Shaped[Array, "..."]]]],
        names: Collection[str],
        config: DSV4Config,
        max_context: int,
    ) -> "Decisions":
        """Makes the decisions of a step from the values that its layers recorded.

        Args:
          recorded: items (indices of n layers, {name: array [n, T, ...]}), see `nn.layer_stack.Recorded`.
          names: names of the fields to keep.
          config, max_context: as for `decision_types`.
        """
        fields = {}
        for name, struct in decision_types(config, max_context).items():
            items = [(layers, values[name]) for layers, values in recorded if name in values and name in names]
            if items:
                # The recorded values are in the order of the loops over layers. `order` sorts them by layer index.
                order = np.argsort([*itertools.chain.from_iterable(layers for layers, _ in items)])
                ids = [_widened(values, struct.shape[-1]) for _, values in items]
                codes = encode_ids(jnp.concatenate(ids), struct.dtype)
                fields[name] = codes[order].swapaxes(0, 1)
        return cls(**fields)

    @classmethod
    def padded(cls, sequences: Sequence["Decisions"], length: int) -> "Decisions":
        """Stacks the decisions of S sequences to NumPy arrays [S, length, ...], padded with zeros.

        Args:
          sequences: S Decisions [n, ...] of one model, where n may differ between sequences, such as the
            `Request.decisions` of S requests. Tokens from index `length` on are left out.
          length: number of tokens of each padded sequence.

        Raises:
          ValueError: a sequence is None, as `Request.decisions` is in an engine that records nothing.
        """
        if missing := [i for i, decisions in enumerate(sequences) if decisions is None]:
            raise ValueError(f"sequences{missing} are None: make the engine with record_decisions")

        def pad(*arrays: np.ndarray) -> np.ndarray:
            """Returns the sequences' arrays of one field as one array."""
            dtype = np.result_type(*arrays)  # engines with different `max_context` record codes of different dtypes
            result = np.zeros((len(arrays), length, *arrays[0].shape[1:]), dtype)
            for row, array in zip(result, arrays, strict=True):
                row[: len(array)] = array[:length]
            return result

        return jax.tree.map(pad, *sequences)

    def __getitem__(self, index: Any) -> "Decisions":
        """Returns the decisions of some tokens, by an index of the arrays' first axes."""
        return jax.tree.map(lambda x: x[index], self)

    def check(self, config: DSV4Config, num_tokens: int) -> None:
        """Raises ValueError unless the arrays are codes of a model's decisions for `num_tokens` tokens."""
        types = decision_types(config, 1)
        for name, codes in vars(self).items():
            if codes is None:
                continue
            if name not in types:
                raise ValueError(f"decisions.{name} must be None: no layer of the model selects entries")
            expected = num_tokens, *types[name].shape
            if codes.shape != expected:
                raise ValueError(f"decisions.{name} must be {list(expected)}, got {list(codes.shape)}")
            if not jnp.issubdtype(codes.dtype, jnp.unsignedinteger):
                raise ValueError(
                    f"decisions.{name} must be unsigned codes, got {codes.dtype}: encode_ids makes them from ids"
                )


def decision_types(config: DSV4Config, max_context: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of the arrays that hold the decisions of one token.

    Args:
      config: the model's configuration.
      max_context: maximum number of tokens of a request, which bounds the number of entries.

    Returns:
      {field of `Decisions`: ShapeDtypeStruct}, where the dtype is the smallest one for the field's codes. "selection"
      is left out if no layer of the model selects entries.
    """
    layers = config.layers[: config.num_hidden_layers]
    experts, k = config.layer_experts(0)
    # The largest code is the number of ids. Its smallest dtype is unsigned.
    types = {"experts": jax.ShapeDtypeStruct((len(layers), k), np.min_scalar_type(experts))}
    if selecting := [spec for spec in layers if spec.selects]:
        shape = len(selecting), max(config.topk(spec.layer) for spec in selecting)
        entries = max_context // min(spec.compress_rate for spec in selecting)
        types["selection"] = jax.ShapeDtypeStruct(shape, np.min_scalar_type(entries))
    return types


@functools.cache
def selection_rows(config):
    """Returns [layers] int32: for each layer that selects entries, its index on axis S of `Decisions.selection`.

    For other layers the index is arbitrary but valid.
    """
    return np.maximum(np.cumsum([spec.selects for spec in config.layers], dtype=np.int32) - 1, 0)


def encode_ids(ids: Any, dtype: DTypeLike) -> Any:
    """Returns the codes of ids, which are at least -1: the id plus one in an unsigned `dtype`."""
    return (ids + 1).astype(dtype)


def decode_ids(codes: Any) -> Any:
    """Returns the int32 ids of codes; -1 for the code 0."""
    return codes.astype(np.int32) - 1


def _widened(ids, width):
    """Pads ids [..., n] at the end with -1 to [..., width]."""
    return jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])], constant_values=-1)
