"""The layers of a model. Equal layers have stacked parameters and run in one loop, see `layer_runs`."""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.cache.pools import count_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.layer_runs import LayerRun, find_runs
from dsv4_jax.nn.layers import StackedRngs
from dsv4_jax.quant import LayerSlice


# A `Recorded` lists the values that a step recorded. Each item is for layers with stacked parameters: (indices of these
# layers, {name in `block.RECORDED`: array [layers, ...]}).
Recorded = list[tuple[tuple[int, ...], dict[str, Shaped[Array, "..."]]]]


# A filter of variables that are not parameters but state, which the call of a module may have changed.
_OTHER_STATE = nnx.All(nnx.Variable, nnx.Not(nnx.Param), lambda path, variable: "axes" not in variable.get_metadata())


class LayerLoop(nnx.Module):
    """A run of layers, see `LayerRun`, as a loop over its repeats. Each iteration runs the layers of a period.

    Attributes:
      run: LayerRun with the indices of the layers (static).
      layers: the layers of the period. Their parameters are stacked over the repeats: [repeats, ...].
    """

    def __init__(
        self, config: DSV4Config, run: LayerRun, layer_type: type[Any], *, param_dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.run = run
        stacked = StackedRngs(rngs, run.repeats)
        numbers = range(run.start, run.start + run.period)
        self.layers = nnx.List([layer_type(config, i, param_dtype=param_dtype, rngs=stacked) for i in numbers])

    def __call__(
        self,
        x: Any,
        cache: StepCache,
        batch: Batch,
        carry: StepCarry,
        *,
        tap_layers: Sequence[int],
        record: Collection[str],
        exports: Mapping[str, set[int]],
        remat: bool,
    ) -> tuple[Any, StepCarry, Any, Recorded]:
        """Runs the layers. Each is called with the arguments of `DecoderLayer.__call__`.

        Args:
          x: input of the first layer, a tree of arrays. Every layer returns a tree of the same structure and types.
          cache, batch: cache and inputs of the step.
          carry: values of earlier layers.
          tap_layers: indices of the model's layers whose output streams go to the carry's taps.
          record: names of the values to return, see `block.RECORDED`.
          exports: {name in `StepCarry`: indices of layers whose value of that name is read by layers after this run}.
          remat: whether a backward pass computes the values within a period again, instead of keeping them.

        Returns:
          (output of the last layer, the carry, the updated cache, the recorded values).
        """
        run = self.run
        graphs, stacks = zip(*map(nnx.split, self.layers), strict=True)
        # Without the barrier, XLA would move dequantization out of the scan below, and so dequantize the weights of all
        # layers at once. If a loop over steps calls this method, XLA would even move it before that loop.
        stacks, x = jax.lax.optimization_barrier((stacks, x))
        # For each layer of a period, the names of the values that it records.
        names = [
            {*record, *(name for name, layers in exports.items() if layers & {*run.layers(position)})}
            for position in range(run.period)
        ]
        tap_rows = [_tap_rows(tap_layers, run.layers(position)) for position in range(run.period)]

        def run_period(state, scanned):
            """Runs the layers of one period.

            Returns (state, [(recorded values, variables that are not parameters) for each layer]).
            """
            x, cache, taps = state
            repeat, values, tap_rows = scanned
            inner = dataclasses.replace(carry, taps=taps)
            outputs = []
            for position, layer in enumerate(self.layers):
                module = nnx.merge(graphs[position], _slices(stacks[position], values[position], repeat))
                x, inner, cache = module(
                    x,
                    cache,
                    batch,
                    inner,
                    number=layer.layer + run.period * repeat,
                    tap_row=tap_rows[position],
                    record=names[position],
                )
                outputs.append((inner.recorded, nnx.state(module, _OTHER_STATE)))
            return (x, cache, inner.taps), outputs

        body = jax.checkpoint(run_period, prevent_cse=False) if remat else run_period
        scanned = jnp.arange(run.repeats, dtype=jnp.int32), stacks, tap_rows
        (x, cache, taps), outputs = jax.lax.scan(body, (x, cache, carry.taps), scanned)
        recorded: Recorded = []
        exported: dict[str, Any] = {name: dict(getattr(carry, name)) for name in exports}
        for position, (values, state) in enumerate(outputs):
            layers = tuple(run.layers(position))
            if state:
                nnx.update(self.layers[position], state)
            for name in exports.keys() & values.keys():
                for repeat, layer in enumerate(layers):
                    if layer in exports[name]:
                        exported[name][layer] = values[name][repeat]
            recorded.append((layers, {name: values[name] for name in record if name in values}))
        carry = dataclasses.replace(carry, taps=taps, recorded={}, **exported)
        return x, carry, cache, recorded


class LayerStack(nnx.Module):
    """Consecutive layers of a model, in loops over runs of equal layers.

    `stack[i]` is a copy of layer i: a module with its own parameters, for reading. To write parameters of a layer, use
    `nn.parameters.parameter_views`.

    Attributes:
      start: index of the first layer (static).
      remat: whether a backward pass keeps only the inputs of each period of layers and computes other values again
        (`jax.checkpoint`). It is False at first, and can be set to True (static).
      loops: LayerLoop of each run.
    """

    def __init__(
        self, config: DSV4Config, layers: range, layer_type: type[Any], *, param_dtype: DTypeLike, rngs: nnx.Rngs
    ):
        """Makes layers with random parameters. `layer_type` is a class with `DecoderLayer`'s arguments."""
        self.config = config
        self.start = layers.start
        self.remat = False
        runs = find_runs([_form(config, layer) for layer in layers], layers.start)
        self.loops = nnx.List([LayerLoop(config, run, layer_type, param_dtype=param_dtype, rngs=rngs) for run in runs])

    def __call__(
        self,
        x: Any,
        cache: StepCache,
        batch: Batch,
        carry: StepCarry,
        *,
        tap_layers: Sequence[int] = (),
        record: Collection[str] = (),
    ) -> tuple[Any, StepCarry, Any, Recorded]:
        """Runs all layers, see `LayerLoop.__call__`. Counts the experts that tokens select if the cache has counts."""
        counts_experts = getattr(cache, "expert_counts", None) is not None  # a user's cache may lack the attribute
        names = {*record, "experts"} if counts_experts else {*record}
        recorded: Recorded = []
        for loop in self.loops:
            exports = self._exports(loop.run)
            x, carry, cache, values = loop(
                x, cache, batch, carry, tap_layers=tap_layers, record=names, exports=exports, remat=self.remat
            )
            recorded += values
        if counts_experts:
            layers = tuple(itertools.chain.from_iterable(layers for layers, _ in recorded))
            cache = count_experts(cache, jnp.concatenate([values["experts"] for _, values in recorded]), layers)
        return x, carry, cache, recorded

    def __len__(self) -> int:
        return self.loops[-1].run.stop - self.start

    def __getitem__(self, index: int) -> Any:
        """Returns a copy of a layer, with its own parameters. Raises IndexError if there is no such layer."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"layer {index} of {len(self)}")
        return self._layer(self.start + index % len(self))

    def slices(self) -> Iterator[Any]:
        """Yields each layer with parameters that are a `LayerSlice`, so that kernels read the stack without a copy."""
        return (self._layer(self.start + index, is_slice=True) for index in range(len(self)))

    def _layer(self, number, is_slice=False):
        """Returns a module with the parameters of a layer: copies, or with `is_slice` a `LayerSlice` of each stack."""
        (loop,) = (loop for loop in self.loops if loop.run.start <= number < loop.run.stop)
        repeat, position = divmod(number - loop.run.start, loop.run.period)
        graph, stack = nnx.split(loop.layers[position])
        values = jax.tree.map(lambda x: _row(x, repeat), stack)
        return _numbered(nnx.merge(graph, _slices(stack, values, jnp.int32(repeat)) if is_slice else values), number)

    def _exports(self, run):
        """Returns {name in `StepCarry`: indices of the layers of a run whose value is read by layers after the run}."""
        later = self.config.layers[run.stop : self.start + len(self)]
        return {
            name: {*range(run.start, run.stop)} & {getattr(spec, name) for spec in later}
            for name in ("selection", "candidates")
        }


def stack_modules[M: nnx.Module](modules: Sequence[M]) -> M:
    """Stacks modules of equal structure: returns one module of this structure, whose variables are [modules, ...].

    A user can put the result in the place of a submodule of a `LayerLoop`'s layers. The loop calls it with each layer's
    values.

    Raises:
      ValueError: the modules differ in more than the values of their variables and the numbers of their layers.
    """
    graphs = [nnx.split(_numbered(nnx.clone(module), 0))[0] for module in modules]
    if different := [i for i, graph in enumerate(graphs) if graph != graphs[0]]:
        raise ValueError(
            f"modules{different} differ from modules[0] in more than the values of variables, and all would run like "
            "modules[0]: make variables of options that differ"
        )
    graph, _ = nnx.split(modules[0])
    return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, modules)))


def _row(array, repeat):
    """Returns a layer's array from a stacked array, or its `jax.ShapeDtypeStruct` from a stacked one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
    return array[repeat]


def _numbered(layer, number):
    """Sets the int attribute `layer` of a layer and of its submodules to `number`, and returns the layer."""
    for _, module in nnx.iter_modules(layer):
        if isinstance(getattr(module, "layer", None), int):
            setattr(module, "layer", number)  # noqa: B010
    return layer


def _form(config, layer):
    """Returns (form, sources) of a layer, see `find_runs`."""
    spec = config.layers[layer]
    form = dataclasses.replace(spec.kind, selection=None, candidates=None)
    sources = tuple(None if source == layer else source for source in (spec.selection, spec.candidates))
    table = layer if config.has_engram(layer) else None  # tables of Engram differ in size
    return (form, spec.selects, spec.makes_candidates, config.is_hashed(layer), table), sources


def _tap_rows(tap_layers, layers):
    """Returns for each layer the row of the taps that gets the layer's input streams, the preceding layer's output.

    The row is past the end for a layer whose input is not a tap. Returns None if this is so for all layers.
    """
    rows = [tap_layers.index(layer - 1) if layer - 1 in tap_layers else len(tap_layers) for layer in layers]
    return None if set(rows) == {len(tap_layers)} else jnp.array(rows, jnp.int32)


def _slices(stacks, values, repeat):
    """Returns a layer's state. The values of parameters that `layers.parameter` stacked become a `LayerSlice`.

    Args:
      stacks: state of the stacked layers.
      values: state of the layer.
      repeat: index of the layer in the stacks.
    """
    flat = []
    for (path, stack), (_, value) in zip(nnx.to_flat_state(stacks), nnx.to_flat_state(values), strict=True):
        if stack.get_metadata().get("axes", ())[:1] == ("layers",):
            whole = jax.tree.map(jax.lax.stop_gradient, stack.get_value())
            value = value.replace(LayerSlice(value.get_value(), whole, repeat))
        flat.append((path, value))
    return nnx.from_flat_state(flat)
