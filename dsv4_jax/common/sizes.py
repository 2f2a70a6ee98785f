"""Functions that parse and format sizes of memory."""

import re
from decimal import Decimal


_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_CASELESS = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_bytes(size: int | str, name: str = "memory") -> int:
    """Parses an amount of memory. Returns whole bytes, rounded down.

    Args:
      size: a number of bytes, or text with a unit, such as "80GiB" (2**30 bytes each), "500MB" (10**6 bytes each),
        "1.5 GiB" or "4096B". The case of letters does not matter.
      name: name of the argument, for errors.

    Raises:
      TypeError: `size` is neither an int nor a str.
      ValueError: the text is not a number with a known unit, or the amount is below one byte.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{name}={size!r} must be an int (bytes) or text such as '80GiB'")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size, re.IGNORECASE | re.ASCII)
        if match is None or match[2].lower() not in _CASELESS:
            raise ValueError(
                f"{name}={size!r} must be a number with one of the units {', '.join(_UNITS)}, such as '80GiB'"
            )
        num_bytes = int(Decimal(match[1]) * _CASELESS[match[2].lower()])
    else:
        num_bytes = size
    if num_bytes < 1:
        raise ValueError(f"{name}={size!r} must be at least one byte")
    return num_bytes


def readable_bytes(count: int) -> str:
    """Formats a number of bytes in the largest binary unit that it reaches: "584 B", "14.71 MiB"."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.2f} {' KMGT'[power]}iB"
