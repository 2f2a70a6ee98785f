"""Sphinx: API pages from docstrings, guides in MyST, notebooks with the outputs they were committed with."""

import shutil
from pathlib import Path


# Pages must lie below this folder: notebooks and benchmarks are copied beside it (git ignores the copies), so that the
# links between them hold.
HERE = Path(__file__).parent
for folder, pattern in (("notebooks", "*.ipynb"), ("benchmarks", "*")):
    shutil.rmtree(HERE / folder, ignore_errors=True)
    (HERE / folder).mkdir()
    for file in (HERE.parent / folder).glob(pattern):
        shutil.copy2(file, HERE / folder)

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
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
