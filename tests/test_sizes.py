"""Amounts of memory as people write them."""

import inspect

import pytest

from dsv4_jax.common.sizes import parse_bytes, readable_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096B", 4096),
        ("7B", 7),
        ("80GiB", 80 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        (" 3 kib ", 3 * 2**10),
        ("2KB", 2000),
        ("1tb", 10**12),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "80", "GiB", "20 gigs", "-1GiB", "1e9", "1,5GiB", "nan", "٣GiB"])
def test_unreadable_amounts_name_the_units(text):
    with pytest.raises(ValueError, match=r"must be a number with one of the units B, KB, MB, GB, TB, KiB"):
        parse_bytes(text)


@pytest.mark.parametrize("amount", [0, -5, "0GiB", "0.2B"])
def test_amounts_are_positive(amount):
    with pytest.raises(ValueError, match="must be at least one byte"):
        parse_bytes(amount)


@pytest.mark.parametrize("amount", [1.5, None, True, b"1GiB"])
def test_other_types_are_refused(amount):
    # Unwrapped: in tests the annotations are checked, and would refuse them first with another message.
    with pytest.raises(TypeError, match="must be an int"):
        inspect.unwrap(parse_bytes)(amount)


@pytest.mark.parametrize(
    ("count", "text"), [(584, "584 B"), (1024, "1.00 KiB"), (80 * 2**30, "80.00 GiB"), (2**60, "1048576.00 TiB")]
)
def test_readable_bytes(count, text):
    assert readable_bytes(count) == text
