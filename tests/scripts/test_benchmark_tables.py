"""The tables of the pages have the numbers of the committed files, which support the pages' claims."""

import json
import re
import shutil

import pytest
from benchmark_claims import ROOT, wrong_claims
from benchmark_tables import KINDS, PAGES, main, rewrite


def test_tables_and_claims_are_those_of_the_files():
    main(check=True)


def test_a_wrong_claim_is_named(tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "serve.json"
    report = json.loads(path.read_text())
    report["results"][1]["same_tokens"] = False
    path.write_text(json.dumps(report))
    assert wrong_claims(tmp_path) == ["serve: the prefix cache changes no token"]


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
