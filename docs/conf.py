"""Configuration of Sphinx: Markdown pages by MyST, the API reference from docstrings."""

from __future__ import annotations

from raypipe import __version__

project = "raypipe"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"raypipe {__version__}"
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# Docstrings are plain text with code in single backticks, as Markdown has it.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
