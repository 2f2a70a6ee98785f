"""README's tables have the numbers of the committed files."""

import re

import pytest
from benchmark_tables import KINDS, PAGES, rewrite


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name or page.name)
def test_tables_have_the_numbers_of_their_files(page):
    text = page.read_text()
    assert rewrite(text) == text, "run: python scripts/benchmark_tables.py"
    # No table of ops is written by hand.
    made = re.findall(r"^<!-- table: (?:ops|sums|alone|chosen|peers|beside) ", text, re.MULTILINE)
    assert len(made) == text.count("\n| op |")


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_each_kind_is_written_anew(kind):
    """Another number, another device and, where a file gives the cases, a missing row."""
    (text,) = (text for text in (page.read_text() for page in PAGES) if f"<!-- table: {kind} " in text)
    begin = text.index(f"<!-- table: {kind} ")
    end = text.index("\n\n", text.index("\n| --", begin))
    comment, _, _, header, line, *rows = text[begin:end].split("\n")
    first = re.sub(r"\d+\.\d+|\d+%", "9", rows[0])
    kept = rows[1:] if kind in ("chosen", "peers", "beside") else rows[2:]
    stale = "\n".join([comment, "NVIDIA H1000:", "", header, line, first, *kept])
    changed = text[:begin] + stale + text[end:]
    assert changed != text and rewrite(changed) == text
