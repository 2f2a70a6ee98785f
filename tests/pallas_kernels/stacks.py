"""Shared by the tests of kernels whose weights are stacked over equal layers."""

import math
import re

import jax
import jax.numpy as jnp

from dsv4_jax.quant import LayerSlice, QuantizedWeight
from tests.ops.pools import same_bytes


LAYERS = 3


def check_layers(implementation, call, draw, carry=None):
    """Compares every byte of a loop over stacked weights with calls of separate weights.

    What an implementation must not read is poisoned: stacks for "xla", a layer's values for kernels.

    Args:
      implementation: the name that `call` gets.
      call: (weights, carry, implementation) -> (carry, outputs), an op.
      draw: number of a layer -> its weights, a pytree of arrays.
      carry: pytree of arrays that go from layer to layer.
    """
    layers = [draw(layer) for layer in range(LAYERS)]
    stacks = jax.tree.map(lambda *weights: jnp.stack(weights), *layers)

    def poisoned(weight):
        return jnp.full_like(weight, jnp.nan if jnp.issubdtype(weight.dtype, jnp.inexact) else -1)

    @jax.jit
    def loop(carry, stacks):
        def step(carry, layer):
            values, number = layer

            def slice_of(value, stack):
                if implementation == "xla":
                    return LayerSlice(value, poisoned(stack), number)
                return LayerSlice(poisoned(value), stack, number)

            return call(jax.tree.map(slice_of, values, stacks), carry, implementation)

        return jax.lax.scan(step, carry, (stacks, jnp.arange(LAYERS, dtype=jnp.int32)))

    separate = jax.jit(lambda weights, carry: call(weights, carry, implementation))
    looped, expected = loop(carry, stacks), []
    for weights in layers:
        carry, outputs = separate(weights, carry)
        expected.append(outputs)
    same_bytes(looped, (carry, jax.tree.map(lambda *outputs: jnp.stack(outputs), *expected)))


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


def stacked(layers):
    """The layers' weights, pytrees of one structure, with a leading axis of layers."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def check_kernel(run, layers):
    """A kernel in a loop over a stack has the bits that it has with the weights of each layer alone.

    `run(weights, layer=..)` calls the kernel, and `layers` has the weights of each layer.
    """

    def loop(stack):
        return jax.lax.map(lambda layer: run(stack, layer=layer), jnp.arange(len(layers), dtype=jnp.int32))

    _same_layers(run, loop, layers)


def check_op(run, layers):
    """As `check_kernel`, of an op: `run(weights)` gets a `LayerSlice` of each weight in a scan over the layers."""

    def loop(stack):
        def body(carry, layer):
            return carry, run(slices(stack, *layer))

        return jax.lax.scan(body, None, (stack, jnp.arange(len(layers), dtype=jnp.int32)))[1]

    _same_layers(run, loop, layers)


def slices(stack, values, layer):
    """`LayerSlice` of each weight; `values` has those of `stack` at `layer`."""
    return jax.tree.map(
        lambda value, stack: LayerSlice(value, stack, layer),
        values,
        stack,
        is_leaf=lambda x: isinstance(x, QuantizedWeight),
    )


def _same_layers(run, loop, layers):
    alone = jax.jit(run)
    same_bytes(stacked([alone(weights) for weights in layers]), jax.jit(loop)(stacked(layers)))


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
