"""All-reduce over the GPUs of one process: y = sum of x over the GPUs, in float32, in the order of their ranks.

The grid has up to 128 blocks of one warpgroup. A thread exchanges units of 8 values with the same thread of the same
block on every other GPU. The thread stores its values in the mailboxes of all GPUs. Then it waits for the values of all
GPUs in the mailbox of this GPU, adds them up and stores the sum. `mgpu.mailbox` describes the protocol. Blocks of one
GPU do not wait for each other.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import bfloat16_words as words, mailbox, mlir
from pallas_kernels.mgpu.mailbox import BLOCKS, ROUNDS, UNIT
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_VALUES = ROUNDS * BLOCKS * THREADS * UNIT  # maximum number of values of x


@cached_trace()
def all_reduce(x: jax.Array, table: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Returns the sum of x over the GPUs, added in float32 in the order of ranks and rounded to bfloat16.

    All GPUs get the same bits. Every GPU has to make the same calls in the same order, with x of the same shape.

    Args:
      x: [...] bfloat16, this GPU's term. The number of values is a multiple of 8 and at most 524,288.
      table: [2 * (2 + GPUs)] uint32, this GPU's table of mailboxes, see `mailbox.check_table`.
      interpret: must be False, because the interpreter simulates one GPU only.

    Returns:
      The sum, [...] bfloat16.

    Raises:
      NotImplementedError: `interpret` is set, or the kernel does not take this shape, dtype or number of GPUs.
    """
    check_array("x", x, jnp.bfloat16, *x.shape)
    mailbox.check_table(table, interpret=interpret)
    valid_size = 0 < x.size <= MAX_VALUES and x.size % UNIT == 0
    check_rules({f"a multiple of {UNIT} values up to {MAX_VALUES}, got {x.size}": valid_size})
    units = x.size // UNIT
    blocks = min(BLOCKS, math.ceil(units / THREADS))
    launch = kernel(
        functools.partial(_body, units=units, blocks=blocks),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        kernel_name="all_reduce",
        grid={"block": blocks},
        interpret=interpret,
    )
    return launch(x, table)


def _body(x_gmem, table_gmem, y_gmem, *, units, blocks):
    def emit(block, x_gmem, table_gmem, y_gmem):
        def unit_of_round(i):
            unit = (block + i * blocks) * THREADS + mlir.thread()

            def address(ref):
                return mlir.at(mlir.global_pointer(ref), mlir.to_i64(unit * (2 * UNIT)))

            return mailbox.Unit(
                active=unit < units,
                load=lambda: words.load_four(address(x_gmem)),
                store=lambda total: words.store_four(address(y_gmem), total),
            )

        rounds = math.ceil(units / (blocks * THREADS))
        mailbox.exchange(block, blocks, table_gmem, [unit_of_round(i) for i in range(rounds)])

    mlir.inline(emit, lax.axis_index("block"), x_gmem, table_gmem, y_gmem)
