"""SwiGLU with a limit, of sums of gate and up projection that are rounded to bfloat16 first."""

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.matmul.quantized_weights import ROWS, SHIFT
from pallas_kernels.mgpu import mlir


def swiglu(sums: jax.Array, limit: float) -> jax.Array:
    """Returns [N, 32] float32 of 2**-32 times sums [64, N], whose gate and up rows meet in a thread."""
    sums = (sums * 2.0**SHIFT).reshape(ROWS // 16, 2, 8, -1)
    gate, up = (round_bfloat16(sums[:, half]).reshape(ROWS // 2, -1).T for half in range(2))
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def emit_swiglu(gate: ir.Value, up: ir.Value, limit: float) -> ir.Value:
    """Returns a value of `swiglu` from a thread's two sums."""
    low, high, f32 = mlir.f32(-limit), mlir.f32(limit), mlir.f32_type()

    def rounded(x):
        return arith.extf(f32, arith.truncf(ir.BF16Type.get(), arith.mulf(x, mlir.f32(2.0**SHIFT))))

    gate = arith.minimumf(rounded(gate), high)
    up = arith.minimumf(arith.maximumf(rounded(up), low), high)
    silu = arith.divf(gate, arith.addf(mlir.f32(1.0), math.exp(arith.negf(gate))))
    return arith.mulf(silu, up)
