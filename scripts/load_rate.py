"""Measures how fast a checkpoint in the release's storage is loaded, from a file system in memory."""

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import tyro

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.checkpoint.save import release_tensors, write_release
from dsv4_jax.config import HCA, DSV4Config
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh
from dsv4_jax.safetensors_header import DTYPES, TensorHeader


def load_rate(folder: Path, layers: int = 3, mesh: str = "model=1", times: int = 2) -> None:
    """Writes the first layers of V4-Flash, embedding and head with random values to a folder, and loads them.

    Args:
      folder: is removed afterwards; in /dev/shm the files' pages are in memory.
      layers: of the model, 3.6 GB each.
      mesh: devices to cut the model over.
      times: how often it is loaded.
    """
    config = DSV4Config.v4_flash()
    kinds = dict(layer_types=config.layer_types[:layers], mlp_layer_types=config.mlp_layer_types[:layers])
    rate = config.compress_rate_hca if HCA in kinds["layer_types"] else 0
    config = dataclasses.replace(
        config, num_hidden_layers=layers, compress_rate_hca=rate, num_nextn_predict_layers=0, **kinds
    )
    try:
        write_release(config, folder, random_tensors(config))
        size = sum(path.stat().st_size for path in folder.iterdir())
        devices = make_mesh(parse_mesh(mesh))
        for _ in range(times):
            start = time.perf_counter()
            model = load_checkpoint(folder, config, weights="stored", mesh=devices)
            seconds = time.perf_counter() - start
            print(f"{size / 1e9:.2f} GB in {seconds:.2f} s: {size / 1e9 / seconds:.2f} GB/s onto {mesh}", flush=True)
            jax.tree.map(lambda x: x.delete(), model)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def random_tensors(config: DSV4Config) -> Iterator[np.ndarray]:
    """A value for each of `release_tensors`, of which none is NaN: slices of one array of random bytes."""
    rng = np.random.default_rng(0)
    largest = max(tensor.nbytes for entries in release_tensors(config) for tensor in entries)
    some = rng.integers(256, size=1 << 24, dtype=np.uint8)
    bytes_ = np.tile(some, -(-largest // some.size) + 1)
    finite, scales = np.where(bytes_ & 0x7F == 0x7F, 0, bytes_).astype(np.uint8), 116 + bytes_[: 1 << 25] % 3
    for entries in release_tensors(config):
        for tensor in entries:
            yield _random(tensor, config, rng, bytes_, finite, scales)


def _random(tensor: TensorHeader, config, rng, codes, finite, scales):
    if tensor.dtype in ("BF16", "F32"):
        # One value in many places: no rate depends on it.
        return np.broadcast_to(np.asarray(rng.normal(0, 0.02), DTYPES[tensor.dtype]), tensor.shape)
    if tensor.dtype == "I64":
        return (np.arange(np.prod(tensor.shape)) % config.n_routed_experts).reshape(tensor.shape)
    source = dict(I8=codes, F8_E4M3=finite, F8_E8M0=scales)[tensor.dtype]
    first = int(rng.integers(source.size - tensor.nbytes + 1))
    return source[first : first + tensor.nbytes].reshape(tensor.shape)


if __name__ == "__main__":
    tyro.cli(load_rate)
