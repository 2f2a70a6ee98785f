"""XLA flags for decoding; measurements are in docs/notes/decode_steps.md and docs/numerics.md."""

import os
import sys


# XLA counts a donated cache three times, concludes that memory is short, and rematerializes projections. Compiled for
# an H100, a step with 8 requests of a million tokens had 252 products instead of 172.
#
# On a CPU, products that depend on its kind (AMX, AVX-512) would give another text on another CPU.
FLAGS = {"xla_disable_hlo_passes": "rematerialization", "xla_cpu_enable_platform_dependent_math": "false"}


def set_xla_flags() -> None:
    """Adds `FLAGS` to the environment variable XLA_FLAGS, for programs compiled from now on in this process.

    Call it before JAX first uses a device: XLA reads the variable once. Flags that are set already stay as they are.
    The command line calls it; a program of your own that decodes on a GPU should.

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
    """Returns whether JAX has used a device in this process. Does not import JAX."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", bool)()
