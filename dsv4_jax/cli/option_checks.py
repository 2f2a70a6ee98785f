"""Checks of options, whose errors name the option. Importing this module does not import JAX."""

import dataclasses
import math
import re
import tempfile
from pathlib import Path
from typing import Any, Literal

from dsv4_jax.config import DSV4Config


# {option: its minimum}, the same in all commands. If an option has several numbers, each must reach the minimum.
MINIMUMS = dict.fromkeys(("decode_from", "drafts", "grace_seconds", "max_waiting", "request_seconds", "skew"), 0)
MINIMUMS |= dict.fromkeys(
    (
        "beams",
        "block_tokens",
        "calls",
        "chunk",
        "context",
        "conversations",
        "index_topk",
        "max_new_tokens",
        "max_query_tokens",
        "max_requests",
        "n_best",
        "prompts",
        "requests",
        "token_budget",
        "turns",
    ),
    1,
)


def check_context(config: DSV4Config, tokens: int, option: str) -> None:
    """Raises ValueError if a request of `tokens` tokens is longer than the model's context.

    The error begins with the text `option`, which names the options that determine the number of tokens.
    """
    if tokens > (limit := config.max_position_embeddings):
        raise ValueError(
            f"{option}: a request of {tokens} tokens, prompt and new ones, is longer than the model's context, "
            f"max_position_embeddings={limit}"
        )


def check_minimums(command: Any) -> None:
    """Raises ValueError, which names the option, if an option of a command is below its minimum, infinite or NaN."""
    for name, minimum in MINIMUMS.items():
        option = getattr(command, name, None)
        for value in option if isinstance(option, tuple) else (option,):
            if value is not None and not minimum <= value < math.inf:  # also true for NaN
                raise ValueError(f"{name}={value} must be at least {minimum}")


def check_file(option: str, path: Path | None, use: Literal["read", "written"]) -> None:
    """Raises ValueError, which names the option, if its file cannot be used. Leaves the disk as it is.

    Args:
      option: name of the option.
      path: the option's file; None is not checked.
      use: what the command does with the file.
    """
    try:
        if path is None:
            return
        if use == "written" and not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        else:
            path.open("rb" if use == "read" else "ab").close()
    except OSError as error:
        raise ValueError(f"--{option} {path} cannot be {use}: {error.strerror}") from None


def explain(error: Exception, command: Any) -> str:
    """Returns an error's message for users of the command line.

    Text such as "max_requests=0" becomes "--max-requests 0" if the command has this option.
    """
    options = {field.name for field in dataclasses.fields(command)}

    def option(match):
        """Returns the option in place of the match NAME=VALUE, or the match if there is no such option."""
        name, value = match.groups()
        if name not in options:
            return match[0]
        return f"--{name.replace('_', '-')}" + ("" if value == "True" else f" {value}")

    return re.sub(r"(?<![\w.-])([a-z]\w*)=('[^']*'|[\w.+-]*\w)", option, str(error))
