"""Measures how fast a checkpoint in the release's storage is loaded, from a file system in memory."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from dsv4_jax.bench.reports import write_report
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.save import describe_storage, tensor_headers, write_checkpoint
from dsv4_jax.cli.model_options import ModelOptions
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.config_json import release_config
from dsv4_jax.expert_pages import ExpertMemory
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh


def load_rate(
    folder: Path,
    layers: int = 3,
    mesh: str = "model=1",
    expert_memory: str | None = None,
    times: int = 2,
    report: Path | None = None,
) -> None:
    """Writes the first layers of V4-Flash, embedding and head with random values to a folder, and loads them.

    Args:
      folder: folder for the files, removed afterwards; in /dev/shm their pages are in memory.
      layers: number of layers, 3.6 GB each; all 43 are 156 GB.
      mesh: devices to shard the model over.
      expert_memory: how much memory of one GPU experts may take, such as 10GB; the other experts lie in host memory.
      times: number of times that the checkpoint is loaded.
      report: JSON file to write the numbers to.
    """
    config = DSV4Config.v4_flash().first_layers(layers)
    try:
        content = describe_storage(release_config(config), "quantized", config.weight_block)
        write_checkpoint(folder, content, stored_tensors(config), random_tensors(config))
        size = sum(path.stat().st_size for path in folder.iterdir())
        expert_budget = ModelOptions(expert_memory=expert_memory).expert_bytes()  # before JAX starts
        devices = make_mesh(parse_mesh(mesh))
        loads = []
        for _ in range(times):
            start = time.perf_counter()
            with PeakMemory() as memory:
                placement: dict[str, Any] = {"mesh": devices}
                if expert_budget is not None:
                    placement = {"expert_memory": ExpertMemory(None if expert_budget == "auto" else expert_budget)}
                model = load_checkpoint(folder, config, weights="quantized", **placement)
                jax.block_until_ready(model)
            seconds = time.perf_counter() - start
            loads.append({"seconds": seconds, "rate": size / seconds, "host_bytes": memory.peak})
            print(
                f"{size / 1e9:.2f} GB in {seconds:.2f} s: {size / 1e9 / seconds:.2f} GB/s "
                f"onto {expert_memory or mesh}, with {memory.peak / 1e9:.2f} GB of host memory beside the files' pages",
                flush=True,
            )
            jax.tree.map(lambda x: x.delete(), model)
        if report is not None:
            result = {
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "mesh": mesh,
                "bytes": size,
                "loads": loads,
            }
            result |= {"expert_memory": expert_memory} if expert_memory else {}
            write_report(report, result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PeakMemory:
    """Measures the peak of this process's anonymous memory in a `with` block. Linux only.

    Attributes:
      peak: largest number of bytes in the block beyond the bytes before it. If devices are CPUs, it includes the model.
    """

    def __enter__(self) -> "PeakMemory":
        self._first = _anonymous_bytes()
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self):
        while not self._done.wait(0.02):
            self.peak = max(self.peak, _anonymous_bytes() - self._first)


def _anonymous_bytes():
    (kibibytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kibibytes)


def stored_tensors(config: DSV4Config) -> list[list[TensorHeader]]:
    """Returns the headers of a release's tensors, in lists: a tensor's header, then the header of its scales."""
    return [entries for weight in weights(config, "release") for entries in tensor_headers(weight, "quantized")]


def random_tensors(config: DSV4Config) -> Iterator[np.ndarray]:
    """Yields a value for each of `stored_tensors`, without NaN: slices of one array of random bytes."""
    rng = np.random.default_rng(0)
    largest = max(tensor.nbytes for entries in stored_tensors(config) for tensor in entries)
    some = rng.integers(256, size=1 << 24, dtype=np.uint8)
    bytes_ = np.tile(some, -(-largest // some.size) + 1)
    finite = np.where(bytes_ & 0x7F == 0x7F, 0, bytes_).astype(np.uint8)
    scales = 116 + bytes_[: 1 << 25] % 3
    for entries in stored_tensors(config):
        for tensor in entries:
            yield _random(tensor, config, rng, bytes_, finite, scales)


def _random(tensor: TensorHeader, config, rng, codes, finite, scales):
    if tensor.dtype in ("BF16", "F32"):
        # One value everywhere: the rate does not depend on values.
        return np.broadcast_to(np.asarray(rng.normal(0, 0.02), DTYPES[tensor.dtype]), tensor.shape)
    if tensor.dtype == "I64":
        return (np.arange(np.prod(tensor.shape)) % config.n_routed_experts).reshape(tensor.shape)
    source = {"I8": codes, "F8_E4M3": finite, "F8_E8M0": scales}[tensor.dtype]
    start = int(rng.integers(source.size - tensor.nbytes + 1))
    return source[start : start + tensor.nbytes].reshape(tensor.shape)


if __name__ == "__main__":
    tyro.cli(load_rate)
