"""The XLA flags with which models should decode. docs/notes/decode_steps.md and docs/numerics.md have measurements."""

import os
import sys


# Rematerialization is disabled because XLA counts the donated KV cache three times, concludes that memory is short, and
# computes projections again. A step with 8 requests of a million tokens, compiled for an H100, had 252 matrix products
# instead of 172.
#
# Platform-dependent math is disabled because matrix products by AMX or AVX-512 would make a model generate another text
# on another kind of CPU.
FLAGS = {"xla_disable_hlo_passes": "rematerialization", "xla_cpu_enable_platform_dependent_math": "false"}


def set_xla_flags() -> None:
    """Adds `FLAGS` to the environment variable XLA_FLAGS. They apply to all programs that this process compiles.

    Call it before JAX first uses a device, because XLA reads the variable only once. Flags that are set already stay as
    they are. The command line calls it. Your own program should call it, too, if it decodes on a GPU.

    Raises:
      RuntimeError: JAX has used a device already, and the variable lacks a flag.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    new = [f"--{name}={value}" for name, value in FLAGS.items() if name not in flags]
    if new and jax_has_started():
        raise RuntimeError(
            f"JAX has started, so XLA would not see {' '.join(new)}: call set_xla_flags() before anything that makes "
            "an array or asks for devices, or set the environment variable XLA_FLAGS before Python starts"
        )
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()


def jax_has_started() -> bool:
    """Returns whether JAX has used a device in this process, without importing JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", bool)()
