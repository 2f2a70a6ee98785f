"""Lists assignments such as `a, b = x, y`: each value gets a line of its own. A swap, `a, b = b, a`, may stay."""

import ast
import pathlib
import subprocess
import sys


def is_packed(node: ast.AST) -> bool:
    """Returns whether a statement assigns several values that are written out, and does not only permute them."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    values = {ast.unparse(value) for value in node.value.elts}
    return any(
        isinstance(target, ast.Tuple) and {ast.unparse(element) for element in target.elts} != values
        for target in node.targets
    )


listing = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
packed = [
    f"{path}:{node.lineno}: {ast.unparse(node)}"
    for path in listing.stdout.splitlines()
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text()))
    if is_packed(node)
]
sys.exit("\n".join(["Write one assignment a line:", *packed]) if packed else 0)
