"""`CompiledModel`: a model as a flat list of arrays, which costs the host little time per call of a compiled step."""

import copy
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.loop import decode_loop
from dsv4_jax.decode.program_store import TRACE, ProgramTable
from dsv4_jax.decode.step import Model, decode_step, forward, logits_step, sample_step
from dsv4_jax.decode.step_launch import launch
from dsv4_jax.expert_pages import ExpertMemory
from pallas_kernels.runtime.pytrees import leaf_types, named_leaves


@jax.tree_util.register_pytree_node_class
class CompiledModel:
    """A model in a form with which a call of a compiled step takes little time on the host.

    A jitted function flattens its arguments at each call. For the modules of the DeepSeek-V4-Flash model this takes
    half a millisecond of Python. The flat list of arrays that this object holds takes a hundredth of that time.

    Each step is a method with the name and arguments of the function in `dsv4_jax.decode`, without the model. The
    functions also accept this object as their model. Models with the same tree structure share compiled programs.

    Attributes:
      arrays: the model's arrays, the leaves of `structure`.
      structure: the tree structure of the model.
      expert_memory: the ExpertMemory that placed the model's experts; None = all experts lie on the devices.
    """

    def __init__(self, model: Any, expert_memory: ExpertMemory | None = None):
        """Flattens a `Model`, such as an nnx.Module, without copying arrays.

        Args:
          model: the model.
          expert_memory: the ExpertMemory that the model was loaded with, if any. An engine uses it to move often
            selected experts to the GPU.
        """
        self.arrays, self.structure = jax.tree.flatten(model)
        self.expert_memory = expert_memory
        self._programs = ProgramTable()

    @classmethod
    def of(cls, model: Model) -> "CompiledModel":
        """Returns a model as a `CompiledModel`; returns a `CompiledModel` unchanged."""
        return model if isinstance(model, CompiledModel) else cls(model)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        return self.arrays, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Any) -> "CompiledModel":
        model = cls(None)
        model.arrays = list(arrays)
        model.structure = structure
        return model

    def with_weights(self, model: Model) -> "CompiledModel":
        """Returns a model with this model's compiled programs and another model's arrays. Compiles nothing.

        An array of the other model is not copied if it has the sharding of this model's array; otherwise it is moved.
        This model may have `jax.ShapeDtypeStruct` in place of arrays, since programs can be compiled while weights are
        still being read.

        Args:
          model: a model of the same structure, such as an nnx.Module.

        Raises:
          ValueError: the models differ in more than the values of their arrays; an array of the other model has no
            values, because it is a `jax.ShapeDtypeStruct` or was deleted; or this model has arrays already, and one of
            the models has an `expert_memory`.
        """
        new = CompiledModel.of(model)
        is_outline = any(isinstance(x, jax.ShapeDtypeStruct) for x in self.arrays)
        if not is_outline and (self.expert_memory is not None or new.expert_memory is not None):
            raise ValueError("weights cannot be replaced while experts lie in expert_memory: make another engine")
        _check_structure(new, self)
        result = copy.copy(self)
        result.expert_memory = new.expert_memory
        result.arrays = [_placed_like(x, old) for x, old in zip(new.arrays, self.arrays, strict=True)]
        return result

    @property
    def compilations(self) -> int:
        """The number of programs that calls of this object's methods have compiled or loaded."""
        return self._programs.compilations

    @property
    def module(self) -> Any:
        """The model with its original structure, such as an nnx.Module. In a traced function its arrays are tracers."""
        return jax.tree.unflatten(self.structure, self.arrays)

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Calls the module as it is, not jitted: returns ([T, hidden] hidden states, the updated cache)."""
        return self.module(cache, batch)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Calls the module's `logits` as it is, not jitted."""
        return self.module.logits(hidden)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the module, such as `drafts`."""
        if name.startswith("_"):  # `copy.copy` looks up such names before the copy has the attribute `structure`
            raise AttributeError(name)
        return getattr(self.module, name)

    def run(self, function: Any, *args: Any, **options: Any) -> Any:
        """Calls a jitted function of (model, cache, ..), with a program from the `program_store` if there is a store.

        Args:
          function: the jitted function. Its last result is the updated cache, and its keyword-only arguments are
            static.
          args: the function's positional arguments after the model.
          options: the function's keyword arguments.

        Returns:
          The results of the function.
        """
        program, positional = self._programs.find(function, (self, *args), options)
        if program is not None:
            return launch(program.call, *positional)
        before = function._cache_size()
        results = function(self, *args, **options)
        self._programs.compilations += function._cache_size() - before
        return results

    def prepare(self, function: Any, *args: Any, **options: Any) -> None:
        """Loads or compiles the program that `run` with these arguments calls. Runs and donates nothing.

        If there is no store, the function is only traced, so that `run` finds the trace. Several threads may call this
        method at once.

        Args:
          function, args, options: as for `run`. A `jax.ShapeDtypeStruct` can take the place of an array.
        """
        program, _ = self._programs.find(function, (self, *args), options)
        if program is None:
            with TRACE:
                function.trace(self, *args, **options)

    forward = functools.partialmethod(run, forward)
    decode_step = functools.partialmethod(run, decode_step)
    logits_step = functools.partialmethod(run, logits_step)
    sample_step = functools.partialmethod(run, sample_step)
    decode_loop = functools.partialmethod(run, decode_loop)


def _check_structure(new, old):
    """Raises ValueError if two CompiledModels differ in more than the values of their arrays, or values are missing.

    The message names an array that differs or has no values, if there is any.
    """
    types_of_new = leaf_types(new.module)
    types_of_old = leaf_types(old.module)
    for name in types_of_old | types_of_new:
        new_type, old_type = (types.get(name, "missing") for types in (types_of_new, types_of_old))
        if new_type != old_type:
            raise ValueError(f"{name} is {new_type} in the new model and {old_type} in the engine's")
    if new.structure != old.structure:
        raise ValueError("the models have equal arrays, but not the same configuration or options of their modules")
    for name, x in named_leaves(new.module).items():
        if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and x.is_deleted()):
            raise ValueError(f"{name} of the new model has no values: it is a shape, or was deleted or donated")


def _placed_like(x, old):
    """Returns the array x with the placement of the array `old`, so that programs compiled for `old` take it.

    The result has the sharding of `old`, and is committed to its devices if `old` is. Its dtype is weak only if both
    dtypes are. If `old` is not a jax.Array, x is returned unchanged.
    """
    if not isinstance(old, jax.Array):
        return x
    if not isinstance(x, jax.Array) or (x.committed and not old.committed) or x.weak_type != old.weak_type:
        x = jax.device_put(np.asarray(x))  # through a NumPy array, so that it is neither committed nor weakly typed
    is_placed = x.committed == old.committed and x.sharding == old.sharding
    return x if is_placed else jax.device_put(x, old.sharding if old.committed else None)
