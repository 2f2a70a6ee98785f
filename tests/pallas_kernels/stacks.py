"""Shared by the tests of kernels whose weights are stacked over equal layers."""

import math
import re

import jax
import jax.numpy as jnp

from dsv4_jax.quant import LayerSlice, QuantizedWeight
from tests.ops.pools import same_bytes


LAYERS = 3


def check_layers(implementation, call, layers, carry=None, *, poison=True):
    """Compares every byte of an op in a loop over stacked weights with its calls with the weights of each layer alone.

    What an implementation must not read is poisoned: stacks for "xla", a layer's values for kernels.

    Args:
      implementation: the name that `call` gets.
      call: (weights, carry, implementation) -> (carry, outputs). Arrays that kernels write in place, as pools, belong
        in the carry alone, as in a model's loop: on a GPU, XLA fuses a kernel with the copy of its result to a loop's
        outputs, and then loses what the kernel writes in place.
      layers: the weights of each layer, pytrees of one structure.
      carry: pytree of arrays that go from layer to layer.
      poison: False where an op also reads a layer's values beside a kernel, as those of a norm before it.
    """

    def poisoned(weights):
        return _poisoned(weights) if poison else weights

    @jax.jit
    def loop(carry, stack):
        def body(carry, layer):
            values, number = layer
            if implementation == "xla":
                weights = slices(poisoned(stack), values, number)
            else:
                weights = slices(stack, poisoned(values), number)
            return call(weights, carry, implementation)

        return jax.lax.scan(body, carry, (stack, jnp.arange(len(layers), dtype=jnp.int32)))

    looped = loop(carry, stacked(layers))
    alone = jax.jit(lambda weights, carry: call(weights, carry, implementation))
    expected = []
    for weights in layers:
        carry, outputs = alone(weights, carry)
        expected.append(outputs)
    same_bytes(looped, (carry, stacked(expected)))


def check_kernel(run, layers):
    """A kernel in a loop over a stack has the bits that it has with the weights of each layer alone.

    `run(weights, layer=..)` calls the kernel, and `layers` has the weights of each layer.
    """

    @jax.jit
    def loop(stack):
        return jax.lax.map(lambda layer: run(stack, layer=layer), jnp.arange(len(layers), dtype=jnp.int32))

    alone = jax.jit(run)
    same_bytes(stacked([alone(weights) for weights in layers]), loop(stacked(layers)))


def stacked(layers):
    """The layers' weights, pytrees of one structure, with a leading axis of layers."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def slices(stack, values, layer):
    """`LayerSlice` of each weight; `values` has those of `stack` at `layer`."""
    return jax.tree.map(
        lambda value, stack: LayerSlice(value, stack, layer),
        values,
        stack,
        is_leaf=lambda x: isinstance(x, QuantizedWeight),
    )


def _poisoned(weights):
    """NaN in place of every number, also of quantized ones, and -1 in place of every integer."""

    def poison(array):
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return jnp.full_like(array, jnp.nan)
        return ~jnp.zeros_like(array)

    return jax.tree.map(poison, weights)


def looped(call):
    """Returns a function of (carry, *stacks) that calls `carry = call(carry, layer, *stacks)` for each layer."""

    def run(carry, *stacks):
        return jax.lax.fori_loop(0, LAYERS, lambda layer, carry: call(carry, layer, *stacks), carry)

    return run


def check_not_copied(compiled, *stacks):
    """Asserts that a compiled loop passes its stacks on, and makes neither them nor a layer of them anew.

    It looks for arrays of their types and sizes, so activations should have other sizes.
    """
    names = {"bfloat16": "bf16", "float32": "f32", "int32": "s32"}
    sizes = {(names[x.dtype.name], math.prod(x.shape[axis:])) for x in stacks for axis in range(2)}
    text = compiled.as_text()
    assert " while(" in text, "no loop"
    for kind, shape, operation in re.findall(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", text):
        if (kind, math.prod(map(int, filter(None, shape.split(","))))) in sizes:
            assert operation in ("parameter", "get-tuple-element", "bitcast"), f"{operation} of {kind}[{shape}]"


def readers_of_stacks(text: str, layers: int) -> set[str]:
    """The opcodes of an optimised HLO text that read arrays with a leading axis of so many layers, or views of them."""
    lines = re.findall(r"^\s*(?:ROOT )?(%\S+) = (.*?) ([\w-]+)\((.*)$", text, re.MULTILINE)
    stacks = {name for name, kind, _, _ in lines if re.match(rf"\w+\[{layers},\d", kind)}
    opcodes = set()
    for name, _, opcode, operands in lines:
        if stacks.intersection(re.findall(r"%[\w.-]+", operands)):
            opcodes.add(opcode)
            if opcode == "bitcast":
                stacks.add(name)
    return opcodes
