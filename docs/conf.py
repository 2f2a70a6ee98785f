"""Sphinx: API pages from docstrings, guides in MyST, notebooks with the outputs they were committed with."""

import os
import re
import shutil
from pathlib import Path


# Sphinx wants its pages below this folder, so notebooks and benchmarks are copied into it (git ignores the copies).
HERE = Path(__file__).parent
COPIED = {"notebooks": "*.ipynb", "benchmarks": "*"}
for folder, pattern in COPIED.items():
    shutil.rmtree(HERE / folder, ignore_errors=True)
    (HERE / folder).mkdir()
    for file in (HERE.parent / folder).glob(pattern):
        shutil.copy2(file, HERE / folder)


def adapt_links(app, docname: str, source: list[str]) -> None:
    """Rewrites links that hold in a checkout, so that they lead to the copies where there is one."""
    page = HERE / docname
    original = HERE.parent / docname if docname.startswith(tuple(COPIED)) else page

    def adapt(link: re.Match[str]) -> str:
        target = (original.parent / link[1]).resolve()
        if not target.exists():
            return link[0]
        path = target.relative_to(HERE.parent)
        built = HERE / path if path.parts[0] in COPIED else target
        file = "" if built.is_relative_to(HERE) else "path:"  # a file to download, not a page
        return f"]({file}{os.path.relpath(built, page.parent)}"

    source[0] = re.sub(r"\]\(([^)#:\s]+)", adapt, source[0])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapt_links)


project = "dsv4_jax"
author = "the dsv4_jax developers"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "dsv4_jax"
html_copy_source = False

nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "deflist"]

# A single backtick in a docstring is a name: a link where there is such an object, code where there is none.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
# NumPy's `dtype` in a signature is also the short name of several attributes.
suppress_warnings = ["ref.python"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
