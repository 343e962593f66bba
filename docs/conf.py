"""The site that `make site` builds: the pages of the repository, and the API from its docstrings."""

import re
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

import gradwire

project = "Gradwire"
html_title = f"{project} {gradwire.__version__}"
html_theme = "furo"
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/**.md", "papers/docs/*.md", "records/*.md"]
exclude_patterns = [".*", "runs"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
default_role = "py:obj"  # `name` in a docstring is a link if the name has an entry
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["ray"]  # which is no dependency of `dev`

MENU = {
    "Begin": "docs/README docs/tutorial/* examples/README",
    "How to": "docs/how-to/*",
    "Reference": "docs/reference/* docs/reference/*/*",
    "Explanation": "docs/explanation/*",
    "Measured": "papers/docs/* records/*",
    "Project": "* examples/*/*",
}


def add_menu(app: Any, page: str, source: list[str]) -> None:
    """Append the menu of the site to its first page; a repository browser shows the page without one."""
    if page == root_doc:
        for caption, pages in MENU.items():
            entries = "\n".join(pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{entries}\n```\n"


def to_rst(app: Any, what: str, name: str, described: Any, options: Any, lines: list[str]) -> None:
    """Write a docstring as reStructuredText: its sections, and a block of code after a paragraph."""
    text = re.sub(r"^(\S.*\n)\n(?=    )", r"\1\n::\n\n", "\n".join(lines), flags=re.M)
    lines[:] = GoogleDocstring(text, Config(napoleon_use_ivar=True)).lines()


def setup(app: Any) -> None:
    app.connect("source-read", add_menu)
    app.connect("autodoc-process-docstring", to_rst)
