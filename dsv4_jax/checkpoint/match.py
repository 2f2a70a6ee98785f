"""Matches the tensors of a checkpoint with the table of a model's weights, and reports every mismatch."""

import dataclasses
import difflib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Weight, is_draft, is_draft_copy, is_image_part
from dsv4_jax.checkpoint.other_quantization import find_other_quantization
from dsv4_jax.checkpoint.reader import StoredTensor
from dsv4_jax.checkpoint.storage import QuantizedTensor, join_scales
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import fp8_kind


_log = logging.getLogger(__name__)
_MAX_LISTED = 10  # maximum number of problems of each kind in a message; a wrong config causes tens of thousands
_MAX_COMPARED = 200  # maximum number of names that a name is compared with


def match_weights(
    path: Path, stored: Mapping[str, StoredTensor], config: DSV4Config
) -> tuple[list[Weight], dict[str, StoredTensor | QuantizedTensor]]:
    """Returns the table of the model's weights in the checkpoint's naming, and the tensors by name.

    Args:
      path: the checkpoint, for messages and to find its config.json.
      stored: its tensors by name.
      config: configuration of the model.

    Returns:
      (the weights of the model, with the names of their tensors; the tensors by name, in which a quantized weight
      includes its scale). Some tensors are left out:

      * Tensors of draft layers, if the configuration has no draft layers. This is logged.
      * Tensors for images, if the configuration is that of V4.1 (`delays_pre`). This is logged. The routers' biases for
        tokens of images are kept if the configuration has such a token.
      * The draft layers' copies of the embedding and the head.

    Raises:
      ValueError: tensors are missing, extra, mis-shaped, of the wrong kind or have wrong scales (all in one message),
        or another tool has quantized them.
    """
    # {what tensors are for: function that says whether a tensor's name is of this kind; None = such tensors are kept}.
    left_out = {
        "multi-token prediction": is_draft if not config.num_nextn_predict_layers else None,
        "images": functools.partial(is_image_part, biases=config.image_token_id is None) if config.delays_pre else None,
    }
    for part, is_part in left_out.items():
        if is_part is not None and (unused := [name for name in stored if is_part(name)]):
            _log.info("%d tensors of %s (%s, ...) are not used", len(unused), part, unused[0])
            stored = {name: x for name, x in stored.items() if not is_part(name)}
    # Draft layers share the model's embedding and head, of which a file may hold copies.
    stored = {name: x for name, x in stored.items() if not is_draft_copy(name)}
    tensors, wrong_scales = join_scales(stored, fp8_kind(config.weight_block))
    try:
        table = list(keys.weights(config, keys.detect_naming(config, stored)))
        for number, weight in enumerate(table):
            if config.tie_word_embeddings and weight.path == keys.HEAD and weight.sources[0] not in stored:
                table[number] = dataclasses.replace(weight, sources=table[0].sources)  # those of the embedding
        _refuse_mismatches(table, tensors, wrong_scales)
    except ValueError:
        if (method := find_other_quantization(path, stored)) is None:
            raise
        raise ValueError(
            f"{path} is quantized by another method: {method}. Give the release's FP8 and FP4, or a checkpoint in "
            "bfloat16 or float32"
        ) from None
    return table, tensors


def _refuse_mismatches(table, stored, wrong_scales):
    """Raises one ValueError that lists all differences between the needed and the stored tensors, if there are any.

    Args:
      table: the weights of the model.
      stored: the tensors by name.
      wrong_scales: {name: problem} of the quantized tensors that `stored` lacks because their scale does not fit.
    """
    needed = {source: weight for weight in table for source in weight.sources}
    missing = [name for name in needed if name not in stored and name not in wrong_scales]
    extra = [name for name in stored if name not in needed]
    shapes = []
    kinds = []
    for name, weight in needed.items():
        if name not in stored:
            continue
        tensor = stored[name]
        if tensor.shape != weight.source_shape:
            shapes.append(f"{name} is {list(tensor.shape)}, needed {list(weight.source_shape)}")
        is_ids = weight.dtype == "I64"
        if tensor.dtype.startswith(("I", "U")) != is_ids:
            needs = "integers" if is_ids else "floating-point numbers"
            kinds.append(f"{name} is stored as {tensor.dtype}, needed are {needs}")
        if isinstance(tensor, QuantizedTensor) and (tensor.dtype == "FP8_ROWS") != (weight.dtype == "FP8_ROWS"):
            kinds.append(f"{name} has scales of the kind {tensor.dtype}, needed is {weight.dtype}")
    problems = {
        "missing": _with_nearest(missing, extra),
        "extra": _with_nearest(extra, missing),
        "of another shape": shapes,
        "of another kind": kinds,
        "without the right scale": list(wrong_scales.values()),
    }
    sections = [f"{len(lines)} {title}:{listing(lines)}" for title, lines in problems.items() if lines]
    if sections:
        raise ValueError("the checkpoint does not fit the configuration.\n" + "\n".join(sections))


def _with_nearest(names, others):
    """Returns the names. Adds similar names of `others`, if there are any, to the first 10, which `listing` shows."""
    lines = []
    for name in names[:_MAX_LISTED]:
        match = difflib.get_close_matches(name, others[:_MAX_COMPARED], n=1, cutoff=0.8)
        lines.append(f"{name} (near: {match[0]})" if match else name)
    return lines + names[_MAX_LISTED:]


def listing(lines: list[str]) -> str:
    """Returns up to 10 lines as text, each indented on a new line. A last line says how many lines are left out."""
    more = [f"... and {len(lines) - _MAX_LISTED} more"] if len(lines) > _MAX_LISTED else []
    return "".join(f"\n  {line}" for line in lines[:_MAX_LISTED] + more)
