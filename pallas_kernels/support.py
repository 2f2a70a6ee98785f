"""What the hardware can run: every such question is answered here."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def why_no_mosaic_gpu() -> str | None:
    """None where Mosaic-GPU kernels run, else the reason why they do not.

    They need an NVIDIA GPU of compute capability 9.0 or newer (Hopper, Blackwell) as JAX's default backend.
    """
    backend = jax.default_backend()
    if backend != "gpu":
        return f"the default backend is {backend!r}, not an NVIDIA GPU"
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability is None or float(capability) < 9.0:
        return f"{device.device_kind} has compute capability {capability}; 9.0 (Hopper) is needed"
    return None


def interpret_params(interpret: bool):
    """What `plgpu.kernel` wants as `interpret`: False, or the interpreter's settings with the race detector on."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else False


def traced_once(*static: str) -> Callable[[Callable], Callable]:
    """Decorates a kernel's public function: a program that calls it with the same shapes again traces it once.

    To lower a kernel takes seconds, and a model has dozens of layers.

    Args:
      static: names of the arguments, beside `interpret`, that are no arrays.
    """
    return functools.partial(jax.jit, static_argnames=(*static, "interpret"))
