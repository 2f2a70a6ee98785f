"""Makes the outputs of an executed notebook fit to commit: `python docs/clean_outputs.py notebooks/NAME.ipynb ...`.

Drops the times of the run and the kernel's version, and joins what was printed piece by piece.
"""

import json
import sys
from pathlib import Path


def clean(notebook: dict) -> None:
    """Changes the parsed notebook in place."""
    notebook["metadata"].pop("language_info", None)
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        outputs = []
        for output in cell.get("outputs", []):
            before = outputs[-1] if outputs else {}
            if output.get("name") and before.get("name") == output["name"]:
                before["text"] = "".join([*before["text"], *output["text"]]).splitlines(keepends=True)
            else:
                outputs.append(output)
        if "outputs" in cell:
            cell["outputs"] = outputs


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        content = json.loads(path.read_text())
        clean(content)
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
