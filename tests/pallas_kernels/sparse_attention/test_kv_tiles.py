"""Dequantization of DeepSeek-V4.1's rows on the way to shared memory, for all codes and scales."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from tests.pallas_kernels.kernels import registers


LAYOUTS = RowLayout(ROW_DIM, 0, 32), RowLayout(ROW_DIM, 0, 16, codes="e2m1")
ROWS = 128  # number of window rows that have all pairs of a code and a scale, and of such entries
UNITS = ROWS // UNIT + 1  # number of units of each; the last one has no rows


def decode_units(rings, pools, *, interpret=False):
    """Returns (rows [2 * UNITS * 16, 512] bfloat16, biases [2 * UNITS, 16] float32), window rows and then entries."""

    def body(rings_gmem, pools_gmem, rows_gmem, biases_gmem, *, tile_smem, bias_smem):
        unit = jax.lax.axis_index("unit")
        use_second = (unit >= UNITS).astype(jnp.int32)
        row = (unit - UNITS * use_second) * UNIT + kv_tiles.iota()
        row = jnp.where(row < ROWS, row, -1)
        loaded = kv_tiles.load_unit(rings_gmem, pools_gmem, use_second, row, LAYOUTS)
        store = functools.partial(kv_tiles.store_unit, tile_smem, bias_smem, jnp.int32(0))
        pl.when(unit < UNITS)(lambda: store(loaded, row, LAYOUTS[0]))
        pl.when(unit >= UNITS)(lambda: store(loaded[:2], row, LAYOUTS[1]))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_smem, rows_gmem.at[pl.ds(unit * UNIT, UNIT)])
        plgpu.copy_smem_to_gmem(bias_smem, biases_gmem.at[unit])
        plgpu.wait_smem_to_gmem(0)

    launch = kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((2 * UNITS * UNIT, ROW_DIM), jnp.bfloat16),
            jax.ShapeDtypeStruct((2 * UNITS, UNIT), jnp.float32),
        ),
        kernel_name="decode_units",
        grid={"unit": 2 * UNITS},
        scratch_types={
            "tile_smem": plgpu.SMEM((UNIT, ROW_DIM), jnp.bfloat16, transforms=TRANSFORMS),
            "bias_smem": plgpu.SMEM((UNIT,), jnp.float32),
        },
        interpret=interpret,
    )
    return launch(rings, pools)


def all_pairs(codes, scales, per_scale):
    """Returns rows (codes, scales) with every pair of a code byte and a scale byte, in random order.

    `per_scale` is the number of code bytes that share a scale.
    """
    pairs = np.stack(np.meshgrid(scales, codes, indexing="ij"), axis=-1).reshape(-1, per_scale, 2)
    pairs = np.random.default_rng(0).permutation(pairs).reshape(ROWS, -1, per_scale, 2).astype(np.uint8)
    return pairs[..., 1].reshape(ROWS, -1), pairs[:, :, 0, 0]


def as_pools(codes, scales):
    return jnp.asarray(codes)[None, None], None, jnp.asarray(scales)[None, None]


def e4m3(codes):
    """Returns the values of E4M3 codes in float64; those of NaN, 0x7F and 0xFF, are +-480, as kernels read them."""
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.where(np.isnan(values), np.where(codes < 0x80, 480.0, -480.0), values)


WINDOW_CODES, WINDOW_SCALES = all_pairs(np.arange(256), np.arange(256), 32)
ENTRY_CODES, ENTRY_SCALES = all_pairs(np.arange(256), np.arange(128), 8)


def expected_rows():
    """Returns the exact products, rounded once to bfloat16, with zeros for rows that do not exist."""
    factors = np.exp2(WINDOW_SCALES.astype(np.float64) - 127)
    factors = np.where(WINDOW_SCALES == 255, np.inf, np.where(WINDOW_SCALES == 0, 0, factors))
    nibbles = np.stack([ENTRY_CODES & 15, ENTRY_CODES >> 4], axis=-1).reshape(ROWS, -1)
    entries = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
    none = np.zeros((UNIT, ROW_DIM))
    with np.errstate(invalid="ignore", over="ignore"):
        window = e4m3(WINDOW_CODES) * np.repeat(factors, 32, axis=1)
        entries = entries * np.repeat(e4m3(ENTRY_SCALES), 16, axis=1)
        return np.concatenate([window, none, entries, none]).astype(ml_dtypes.bfloat16)


def decoded(interpret):
    pools = as_pools(WINDOW_CODES, WINDOW_SCALES), as_pools(ENTRY_CODES, ENTRY_SCALES)
    rows, biases = jax.jit(lambda *pools: decode_units(*pools, interpret=interpret))(*pools)
    exists = np.arange(2 * UNITS * UNIT).reshape(2 * UNITS, UNIT) % (UNITS * UNIT) < ROWS
    np.testing.assert_array_equal(np.asarray(biases), np.where(exists, 0, -np.inf))
    return np.asarray(rows)


def test_all_codes_and_scales_interpreted():
    """But those of NaN, which the interpreter does not read as 480, and of subnormal numbers, which XLA flushes."""
    rows = decoded(True)
    expected = expected_rows()
    differ = np.zeros(rows.shape, bool)
    extreme = (WINDOW_SCALES < 10) | (WINDOW_SCALES == 255)
    differ[:ROWS] = ((WINDOW_CODES & 0x7F) == 0x7F) | np.repeat(extreme, 32, axis=1)
    differ[UNITS * UNIT :][:ROWS] = np.repeat(ENTRY_SCALES == 0x7F, 16, axis=1)
    np.testing.assert_array_equal(rows.view(np.uint16)[~differ], expected.view(np.uint16)[~differ])


@pytest.mark.gpu
def test_all_codes_and_scales_on_gpu():
    rows = decoded(False)
    expected = expected_rows()
    is_nan = np.isnan(expected.astype(np.float32))  # zero times the infinite scale
    np.testing.assert_array_equal(np.isnan(rows.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(rows.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import jax, jax.numpy as jnp
from tests.pallas_kernels.sparse_attention.test_kv_tiles import LAYOUTS, ROWS, decode_units
pools = [
    tuple(jax.ShapeDtypeStruct((1, 1, ROWS, n), dtype) if n else None for _, dtype, n in layout.columns)
    for layout in LAYOUTS
]
compile_for_h100("units", decode_units, *pools)
""")
    assert used["units"] <= 80
