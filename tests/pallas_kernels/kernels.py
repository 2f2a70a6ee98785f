"""Shared by the tests of Mosaic-GPU kernels: what they are compared with, and compiling without a GPU."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.quant import kv_format
from tests.ops.pools import same_bytes


FORMATS = {name: kv_format(name) for name in ("v4", "per_entry")}
ROW_FORMATS = FORMATS | {"v41": kv_format("v41")}  # of kernels that read or write single rows
NOPE = 448
ROPE = 64
DIM = NOPE + ROPE
LAYOUTS = {name: fmt.entries(NOPE, ROPE).layout for name, fmt in FORMATS.items()}


def window_pools(fmt, *leading):
    """(layout, (nope, rope, scale)) of pools of window rows, as ShapeDtypeStructs; rope is None in "v41"."""
    codec = fmt.window(NOPE, ROPE)
    return codec.layout, row_pools(codec, *leading)


def row_pools(codec, *leading):
    """(nope, rope, scale) of pools of a codec's rows, as ShapeDtypeStructs; rope is None in "v41"."""
    rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*leading, *s.shape), s.dtype), codec.struct)
    return rows.nope, rows.rope, rows.scale


def check(op, implementation, *args, **kwargs):
    """Runs an op as kernel and as reference and compares every byte."""
    cpu = jax.devices("cpu")[0]
    expected = _jitted(op, implementation="xla", **kwargs)(*jax.device_put(args, cpu))
    got = _jitted(op, implementation=implementation, **kwargs)(*args)
    same_bytes(expected, got)


def check_repeats(op, *args, count=300, **kwargs):
    """Equal calls of a kernel return equal bits; one that overwrites values before they are read fails now and then."""
    run = _jitted(op, implementation="mosaic_gpu", **kwargs)
    expected = jax.tree.leaves(run(*args))

    @jax.jit
    def differs(got):
        return jnp.stack([(x != y).any() for x, y in zip(got, expected, strict=True)]).any()

    assert not np.any([differs(jax.tree.leaves(run(*args))) for _ in range(count)])


@functools.cache
def _jitted(op, **kwargs):
    return jax.jit(functools.partial(op, **kwargs))


def compile_in_process(script: str) -> str:
    """Runs Python that calls `compile_for_h100(name, function, *shapes, **jit options)`; what it and ptxas printed.

    In a process of its own: the CUDA plugin must not become the backend of this one. Fails where a kernel adds pairs of
    16-bit integers: ptxas 13.0 takes a constant among them for 0.
    """
    pytest.importorskip("jax_cuda13_plugin", reason="the CUDA plugin's wheels are not installed: uv sync --group aot")
    env = os.environ | dict(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1")
    code = "from tests.pallas_kernels.h100 import compile_for_h100\n" + script
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert not (sums := re.findall(r"^\s*(?:add|sub)\.[su]16x2.*$", said, re.MULTILINE)), sums
    return said


def registers(script: str) -> dict[str, int]:
    """Registers a thread of each kernel that the script compiles, by name; fails where one spills."""
    found = {}
    name = None
    for line in compile_in_process(script).splitlines():
        if match := re.match(r"kernel (\S+)", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            assert match.groups() == ("0", "0"), f"{name} spills: {line}"
        elif match := re.search(r"Used (\d+) registers", line):
            found[name] = max(found.get(name, 0), int(match[1]))
    return found
