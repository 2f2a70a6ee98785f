"""Shared by the tests of kernels that read one layer of weights that are stacked over layers."""

import re

import jax
import jax.numpy as jnp

from dsv4_jax.quant import LayerSlice, QuantizedWeight
from tests.ops.pools import same_bytes


LAYERS = 3


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
