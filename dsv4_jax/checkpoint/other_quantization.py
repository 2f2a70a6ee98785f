"""Names the quantization method of checkpoints that other tools have quantized and that cannot be loaded."""

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsv4_jax.config.config_json import read_json


# `_METHODS` maps ends of tensor names, which no release has, to the method that writes such names. The first end that
# occurs decides.
_METHODS = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_scale_inv": "FP8 with float32 scales",
    ".weight_scale": "compressed-tensors or ModelOpt",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "_blocks": "MXFP4",
}
_MAX_LENGTH = 40  # maximum number of characters that are shown of a field of config.json


def find_other_quantization(path: Path, names: Collection[str]) -> str | None:
    """Returns the name of the method by which another tool has quantized a checkpoint.

    The name comes from `quantization_config` in config.json. If this is absent or names the release's method, "fp8",
    the ends of the tensors' names tell the method.

    Args:
      path: the checkpoint's folder, or a file in it.
      names: names of the checkpoint's tensors.

    Returns:
      The name, or None if the checkpoint seems unquantized or quantized as the release is.
    """
    guess = next((method for end, method in _METHODS.items() if any(name.endswith(end) for name in names)), None)
    declared: Any = None
    with contextlib.suppress(ValueError):
        declared = read_json(path).get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") in (None, "fp8"):
        return guess
    words = [declared.get(key) for key in ("quant_method", "format", "quant_algo")]
    return ", ".join(word[:_MAX_LENGTH] for word in words if isinstance(word, str)) or guess
