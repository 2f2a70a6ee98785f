"""Checks of plain arguments. Messages are `NAME=VALUE must be ...`; the command line puts its option in their place."""

import math
import numbers
import operator
from typing import Any


def check(holds: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not holds:
        raise ValueError(message)


def check_whole(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Returns a whole number, an int or an integer scalar of NumPy or JAX, as an int.

    Raises TypeError, with the argument's name, for other values, and ValueError for one that is out of the inclusive
    range from `least` to `most`, where None is no limit.
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


def check_real(name: str, value: Any) -> float:
    """Returns a real number as a float; raises TypeError for other values. The caller checks the range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_positive(name: str, value: Any) -> float:
    """Returns a finite number above 0 as a float; raises TypeError if it is no number, and ValueError otherwise."""
    number = check_real(name, value)
    check(0 < number < math.inf, f"{name}={value!r} must be a finite number above 0")
    return number


def check_temperature(temperature: Any) -> float:
    """Returns a sampling temperature as a float: 0, or in a range that keeps logits finite in float32."""
    value = check_real("temperature", temperature)
    check(value == 0 or 1e-5 <= value <= 1e5, f"temperature={value} must be 0 (greedy) or positive, from 1e-5 to 1e5")
    return value


def check_top_k(top_k: Any) -> int:
    """Returns the number of best logits to keep, 0 or more, as an int."""
    return check_whole("top_k", top_k, 0, 2**31 - 1)


def check_top_p(top_p: Any) -> float:
    """Returns a probability that is not 0 in float32 as a float."""
    value = check_real("top_p", top_p)
    check(2.0**-126 <= value <= 1, f"top_p={value} must be in (0, 1]")
    return value


def check_dtype(name: str, array: Any, *dtypes: str) -> None:
    """Raises TypeError unless the array has one of the dtypes."""
    if array.dtype.name not in dtypes:
        raise TypeError(f"{name} has dtype {array.dtype.name}, it must be {' or '.join(dtypes)}")
