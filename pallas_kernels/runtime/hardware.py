"""What the hardware can run: every such question is answered here."""

import jax


# Of an H100 and an H200. Fixed, not asked: work is divided by it, and with it the order of sums, so that results have
# the same bits on every device.
MULTIPROCESSORS = 132


def why_no_mosaic_gpu() -> str | None:
    """None where the Mosaic-GPU kernels run, else the reason why they do not.

    They need an NVIDIA GPU of compute capability 9.x (Hopper) as JAX's default backend: newer ones do not have `wgmma`.
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
    """Whether the default device runs as many blocks of threads at once as there are multiprocessors in an H200.

    True where there is no GPU, and a kernel is compiled for one.
    """
    return getattr(jax.devices()[0], "core_count", MULTIPROCESSORS) >= MULTIPROCESSORS
