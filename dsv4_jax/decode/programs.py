"""A model with its compiled programs, which costs the host little to call."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.loop import decode_loop, sample_loop
from dsv4_jax.decode.step import Model, decode_step, draft_step, forward, sample_step, topk_step


@jax.tree_util.register_pytree_node_class
class CompiledModel:
    """Runs a model's compiled steps. Make one of a model that runs many of them.

    A call of a compiled function takes its arguments apart. For a module tree of V4-Flash's size that is some 5 ms of
    Python, longer than the step itself may take; for the one list of arrays that this object holds it is 0.25 ms.

    Each method is the function of its name in `dsv4_jax.decode`, without the model; all donate the cache. Those
    functions also take this object as their model. Models of one structure share compiled programs.

    Attributes:
      arrays: the model's arrays.
      structure: how they make up the model.
      compilations: programs that calls of this object's methods have compiled.
    """

    def __init__(self, model: Any):
        """Flattens the model, a pytree such as an nnx.Module; copies nothing. The steps need a `Model`."""
        self.arrays, self.structure = jax.tree.flatten(model)
        self.compilations = 0

    @classmethod
    def of(cls, model: Model) -> "CompiledModel":
        """Makes one of a model; returns one as it is."""
        return model if isinstance(model, CompiledModel) else cls(model)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Any) -> "CompiledModel":
        model = object.__new__(cls)
        model.arrays, model.structure, model.compilations = list(arrays), structure, 0
        return model

    @property
    def module(self) -> Any:
        """The model itself, also while it is traced."""
        return jax.tree.unflatten(self.structure, self.arrays)

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """The module's call, not compiled."""
        return self.module(cache, batch)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The module's `logits`, not compiled."""
        return self.module.logits(hidden)

    def forward_streams(self, cache: KVCache, batch: Batch) -> tuple[Array, Array, KVCache]:
        """The module's `forward_streams`, not compiled."""
        return self.module.forward_streams(cache, batch)

    def mtp_forward(self, streams: Array, cache: KVCache, batch: Batch) -> tuple[Array, Array, KVCache]:
        """The module's `mtp_forward`, not compiled."""
        return self.module.mtp_forward(streams, cache, batch)

    def mtp_write(self, streams: Array, cache: KVCache, batch: Batch) -> KVCache:
        """The module's `mtp_write`, not compiled."""
        return self.module.mtp_write(streams, cache, batch)

    def _run(self, program: Any, *args: Any, **options: Any) -> Any:
        before = program._cache_size()
        results = program(self, *args, **options)
        self.compilations += program._cache_size() - before
        return results

    forward = functools.partialmethod(_run, forward)
    decode_step = functools.partialmethod(_run, decode_step)
    sample_step = functools.partialmethod(_run, sample_step)
    draft_step = functools.partialmethod(_run, draft_step)
    topk_step = functools.partialmethod(_run, topk_step)
    decode_loop = functools.partialmethod(_run, decode_loop)
    sample_loop = functools.partialmethod(_run, sample_loop)
