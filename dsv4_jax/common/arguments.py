"""Checks of plain arguments, which raise errors such as "NAME=VALUE must be at least 1".

The command line replaces NAME=VALUE by its option, see `cli.options.Command.explain`.
"""

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any


def check(holds: bool, message: str) -> None:
    """Raises ValueError with the message if `holds` is False."""
    if not holds:
        raise ValueError(message)


def check_whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Checks an integer argument and returns it as an int.

    Args:
      name: name of the argument, for errors.
      value: an int, or an integer scalar of NumPy or JAX.
      least: smallest valid value; None for no limit.
      most: largest valid value; None for no limit.

    Raises:
      TypeError: the value is no integer, or a bool.
      ValueError: the value is out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a whole number")
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    if most is not None and number > most:
        raise ValueError(f"{name}={number} must be at most {most}")
    return number


def check_type(name: str, value: Any, types: Any, kind: str) -> None:
    """Raises TypeError with the message "NAME=VALUE must be KIND" unless the value is an instance of `types`."""
    if not isinstance(value, types):
        raise TypeError(f"{name}={value!r} must be {kind}")


def check_flag(name: str, value: Any, reason: str = "") -> None:
    """Raises TypeError unless the value is a bool; `reason` ends the message "NAME=VALUE must be True or False"."""
    check_type(name, value, bool, f"True or False{reason}")


def check_choice(name: str, value: Any, *choices: Any, reason: str = "") -> None:
    """Checks that an argument has one of the values `choices`.

    Raises ValueError with the message "NAME=VALUE must be .. or ..", followed by `reason`.
    """
    check(value in choices, f"{name}={value!r} must be {' or '.join(map(repr, choices))}{reason}")


def adapter_index(name: str, names: Sequence[str]) -> int:
    """Returns the index of an adapter among a model's `adapter_names`.

    Raises ValueError if the model has no adapter of this name.
    """
    check(name in names, f"{name=} must be one of the model's adapters: {', '.join(names) or 'none'}")
    return names.index(name)


def check_real(name: str, value: Any) -> float:
    """Returns a real number as a float, which is infinite if it overflows. The caller checks the range.

    Raises TypeError if the value is no real number, or a bool.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_positive(name: str, value: Any) -> float:
    """Returns a finite number above 0 as a float.

    Raises TypeError if the value is no real number, and ValueError if it is not finite or not above 0.
    """
    number = check_real(name, value)
    check(0 < number < math.inf, f"{name}={value!r} must be a finite number above 0")
    return number


def check_temperature(temperature: Any) -> float:
    """Checks a sampling temperature, and returns it as a float.

    It must be 0 or from 1e-5 to 1e5, a range in which scaled logits stay finite in float32. Raises TypeError if it is
    no real number, and ValueError if it is out of range.
    """
    value = check_real("temperature", temperature)
    check(value == 0 or 1e-5 <= value <= 1e5, f"temperature={value} must be 0 (greedy) or positive, from 1e-5 to 1e5")
    return value


def check_top_k(top_k: Any) -> int:
    """Checks `top_k`, the number of largest logits to keep, and returns it as an int.

    Raises TypeError if it is no integer, and ValueError if it is not from 0 to 2**31 - 1.
    """
    return check_whole("top_k", top_k, 0, 2**31 - 1)


def check_top_p(top_p: Any) -> float:
    """Checks the probability `top_p`, and returns it as a float.

    Raises TypeError if it is no real number, and ValueError if it is above 1 or below 2**-126, the smallest normal
    float32.
    """
    value = check_real("top_p", top_p)
    check(2.0**-126 <= value <= 1, f"top_p={value} must be in (0, 1]")
    return value


def check_dtype(name: str, array: Any, *dtypes: str) -> None:
    """Raises TypeError, which names the argument `name`, unless the array has one of the dtypes, given by name."""
    if array.dtype.name not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype.name}, it must be {' or '.join(dtypes)}")
