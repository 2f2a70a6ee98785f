"""Sum over the GPUs of one process: each stores its values into the memory of all others, and adds up what came.

How they find each other is said in `mgpu.mailbox`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import bfloat16_words as words, mailbox, mlir
from pallas_kernels.mgpu.mailbox import BLOCKS, ROUNDS, UNIT
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_VALUES = ROUNDS * BLOCKS * THREADS * UNIT


@cached_trace()
def all_reduce(x: jax.Array, table: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The sum over the GPUs that `table` names, in their order in float32 and rounded once: the same bits on all.

    Every GPU has to call it, with values of the same shape, as often and in the same order.

    Args:
      x: [...] bfloat16, a multiple of 8 and at most 524,288 values.
      table, interpret: as for `mailbox.check_table`.

    Returns:
      [...] bfloat16.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    check_array("x", x, jnp.bfloat16, *x.shape)
    ranks = mailbox.check_table(table, interpret=interpret)
    check_rules(
        {
            f"a multiple of {UNIT} values up to {MAX_VALUES}, got {x.size}": (
                0 < x.size <= MAX_VALUES and x.size % UNIT == 0
            ),
        }
    )
    units = x.size // UNIT
    blocks = min(BLOCKS, math.ceil(units / THREADS))
    run = kernel(
        functools.partial(_body, units=units, blocks=blocks, ranks=ranks),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        kernel_name="all_reduce",
        grid=(blocks,),
        grid_names=("block",),
        interpret=interpret,
    )
    return run(x, table)


def _body(x, table, out, *, units, blocks, ranks):
    def emit(block, x, table, out):
        block, thread = U32(mlir.scalar(block)), U32(mlir.thread())
        x, out = map(mlir.global_pointer, (x, out))

        def step(i):
            unit = (block + i * blocks) * THREADS + thread

            def at(pointer):
                return mlir.at(pointer, mlir.to_i64((unit * (2 * UNIT)).value))

            return unit < units, lambda: words.load_four(at(x)), lambda four: words.store_four(at(out), four)

        mailbox.exchange(block, table, [step(i) for i in range(math.ceil(units / (blocks * THREADS)))], ranks=ranks)

    mlir.inline(emit, lax.axis_index("block"), x, table, out)
