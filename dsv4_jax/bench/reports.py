"""Files with the results of benchmarks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report as JSON, with its measured numbers rounded to six digits."""
    rounded = json.loads(json.dumps(report), parse_float=lambda text: float(f"{float(text):.6g}"))
    path.write_text(report_text(rounded))


def report_text(report: Mapping[str, Any]) -> str:
    """Formats a report as JSON: a line for each field, and for each item of a field that is a list."""
    fields = []
    for name, value in report.items():
        text = json.dumps(value)
        if value and isinstance(value, list):
            rows = [f"  {json.dumps(row)}" for row in value]
            text = "\n".join(["[", ",\n".join(rows), " ]"])
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
