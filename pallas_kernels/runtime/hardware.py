"""Facts about the GPUs that the kernels are written for (Hopper), and about the GPU at hand."""

import jax


# Number of streaming multiprocessors (SMs) of an H100 and an H200. Kernels divide their work by this constant, not by
# the number of SMs of the device, so that sums are added in the same order and have the same bits on every device.
MULTIPROCESSORS = 132
# {number of blocks in a cluster: number of such clusters that run at once}, for blocks that fill a multiprocessor. The
# blocks of a cluster run in one group (GPC) of up to 18 multiprocessors, so some multiprocessors can stay idle. On an
# H100 and an H200, tests showed that 16 clusters of 8 blocks do not run at once, nor do 32 clusters of 4 blocks.
CLUSTERS_AT_ONCE = {1: MULTIPROCESSORS, 2: 66, 3: 40, 4: 30, 8: 14}
# Number of bytes of shared memory for a block's arrays: the maximum of 227 KiB, less 1 KiB for Mosaic's barriers.
SHARED_BYTES = 226 << 10


def why_no_mosaic_gpu() -> str | None:
    """Returns None if the Mosaic GPU kernels run on the default device, else the reason why they do not.

    The kernels need an NVIDIA GPU of compute capability 9.x (Hopper) as JAX's default backend. Older and newer GPUs
    lack the instruction `wgmma`.
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return f"the default backend is {backend!r}, not an NVIDIA GPU"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", None))
    if capability.split(".")[0] != "9":
        return f"{device.device_kind} has compute capability {capability}; the kernels need 9.x (Hopper)"
    return None


def runs_all_blocks_at_once() -> bool:
    """Returns whether the default device runs `MULTIPROCESSORS` blocks at once.

    Without a GPU the result is True, because kernels are then compiled for a GPU but not run.
    """
    return getattr(jax.devices()[0], "core_count", MULTIPROCESSORS) >= MULTIPROCESSORS
