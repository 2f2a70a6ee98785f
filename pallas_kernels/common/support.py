"""What the hardware can run: every such question is answered here."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.common.lowered import lowered


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


def traced_once(*static: str, writes: bool = False) -> Callable[[Callable], Callable]:
    """Decorates a kernel's public function: a program that calls it with the same shapes again traces it once.

    To lower a kernel takes seconds, and a model has dozens of layers; see also `lowered`. Under `jax.vmap` its calls
    run one after another: attention through a batched gather came out wrong on a GPU, with 32 requests. `static` names
    the arguments, beside `interpret`, that are no arrays. `jax.vmap` does not take a function that `writes` in place.
    """

    def decorate(function):
        @functools.wraps(function)
        def call(*args, interpret=False, **kwargs):
            leaves, structure = jax.tree.flatten((args, kwargs))
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

            def on_arrays(*arrays):
                merged = list(leaves)
                for i, array in zip(places, arrays, strict=True):
                    merged[i] = array
                args, kwargs = jax.tree.unflatten(structure, merged)
                return function(*args, interpret=interpret, **kwargs)

            arrays = [leaves[i] for i in places]
            if not interpret:
                others = [leaf for i, leaf in enumerate(leaves) if i not in places]
                on_arrays = lowered(on_arrays, f"{function.__module__} {function.__qualname__} {structure} {others}")
            if not writes:
                return jax.custom_batching.sequential_vmap(on_arrays)(*arrays)
            # Keeps slices of operands out of the call: XLA fuses one with it and forgets that it writes in place.
            return on_arrays(*jax.lax.optimization_barrier(arrays))

        return jax.jit(call, static_argnames=(*static, "interpret"))

    return decorate
