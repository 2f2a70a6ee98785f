"""Names the methods of checkpoints that were quantized by other tools, whose tensors cannot be read here."""

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsv4_jax.config.config_json import read_json


# Ends of tensor names that no release has, and the methods that write them, the most specific ends first.
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
_MAX_LENGTH = 40  # of a method's name in config.json


def find_other_quantization(path: Path, names: Collection[str]) -> str | None:
    """Returns the name of the method that has quantized a checkpoint; None if it is the release's or there is none.

    Args:
      path: the checkpoint's folder, or a file in it. The `quantization_config` of its config.json names the method.
      names: names of the checkpoint's tensors, which tell the method if config.json does not.
    """
    by_names = next((method for end, method in _METHODS.items() if any(name.endswith(end) for name in names)), None)
    declared: Any = None
    with contextlib.suppress(ValueError):
        declared = read_json(path).get("quantization_config")
    if not isinstance(declared, dict) or declared.get("quant_method") in (None, "fp8"):
        return by_names
    words = [declared.get(key) for key in ("quant_method", "format", "quant_algo")]
    return ", ".join(word[:_MAX_LENGTH] for word in words if isinstance(word, str)) or by_names
