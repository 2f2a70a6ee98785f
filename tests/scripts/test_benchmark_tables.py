"""The tables of the pages have the numbers of the committed files, which have a line for each row."""

import json
import re

import pytest
from benchmark_tables import KINDS, PAGES, ROOT, main, rewrite

from dsv4_jax.bench.reports import report_text, write_report


FILES = sorted((ROOT / "benchmarks").glob("*.json"))


def test_tables_are_those_of_the_files():
    main(check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_has_a_line_for_each_row(path):
    text = path.read_text()
    assert text == report_text(json.loads(text))


def test_a_report_is_rounded(tmp_path):
    path = tmp_path / "report.json"
    write_report(
        path, {"device": "cpu", "rate": 1234567.891, "count": 12345678, "ops": [], "results": [{"a": (1, 0.5)}, {}]}
    )
    assert path.read_text().splitlines() == [
        "{",
        ' "device": "cpu",',
        ' "rate": 1234570.0,',
        ' "count": 12345678,',
        ' "ops": [],',
        ' "results": [',
        '  {"a": [1, 0.5]},',
        "  {}",
        " ]",
        "}",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name or page.name)
def test_no_table_of_ops_is_written_by_hand(page):
    text = page.read_text()
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
