"""Configuration of the documentation, which `make docs` builds into build/docs."""

import sys
from pathlib import Path

import onelayer

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
import gallery_arguments

project = "onelayer"
author = "The onelayer developers"
copyright = author
version = release = onelayer.__version__

extensions = [
    "command_line_page",  # this and the next two: docs/_ext
    "docstrings",
    "mathml",
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["figures"]
templates_path = ["_templates"]

# Docstrings write code in single backticks: a link if it is a public name, code otherwise.
default_role = "obj"
nitpicky = True
nitpick_ignore_regex = [("py:obj", ".*")]
suppress_warnings = ["config.cache"]

smartquotes = False  # docstrings quote values: "auto" has to stay as it is typed
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # links to headings, as in page.md#heading

autodoc_typehints = "none"  # numpydoc sections say types in words
autosummary_generate = True
numpydoc_show_class_members = False  # the template of classes lists them

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": rf"/(?!{'|'.join(gallery_arguments.SHOWN_ONLY)})\w+\.py$",  # what is run
    "reset_argv": "gallery_arguments.arguments",
    "download_all_examples": False,  # archives hold dates, so no two builds would be the same
    "min_reported_time": 3600,  # times differ from build to build
    "write_computation_times": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}

html_theme = "pydata_sphinx_theme"
html_title = "onelayer"
html_static_path = ["_static"]
html_css_files = ["onelayer.css"]
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the browser asks for
html_theme_options = {
    "logo": {"text": "onelayer"},
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc", "sg_download_links"],
    "show_toc_level": 2,
}
