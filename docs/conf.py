"""Sphinx configuration: `make docs` builds the pages into `build/docs`.

Nothing is loaded from the network, neither while building nor by the pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE.parent), str(_HERE / "_extensions")]

import rpc  # noqa: E402

project = "TensorWire"
author = "the TensorWire developers"
copyright = "the TensorWire developers, Apache License 2.0"
version = release = rpc.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "public_names",
    "repository_links",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_extensions"]
needs_sphinx = "8.1"
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False

copybutton_prompt_text = r"^\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"TensorWire {version}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
pygments_style = "friendly"
pygments_dark_style = "monokai"
