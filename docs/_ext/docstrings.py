"""Adapt docstrings to the reference, where they are read as reStructuredText."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx


CODE = re.compile(r"(``.*?``|`.*?`)")
MARKUP = re.compile(r"\||(?<=\w)_(?!\w)")  # of a substitution, |x|, and of a link, name_


def skip_foreign(
    _app: Sphinx, _what: str, _name: str, value: Any, skipped: bool, _options: Any
) -> bool:
    """Skip members that come from another package, whose documentation has pages of its own."""
    home = getattr(getattr(value, "fget", value), "__module__", None)
    if home is None:  # methods of built-in classes, such as dict
        return bool(skipped) or inspect.isroutine(value)
    return bool(skipped) or not str(home).startswith("onelayer")


def escape(
    _app: Sphinx, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]
) -> None:
    """Escape bars and final underscores, which docstrings mean as they are, except in code."""
    in_doctest = False
    for number, line in enumerate(lines):
        in_doctest = line.lstrip().startswith(">>>") or (in_doctest and line.strip() != "")
        if not in_doctest:
            parts = CODE.split(line)  # code is at odd places
            parts[::2] = [MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
            lines[number] = "".join(parts)


def setup(app: Sphinx) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-skip-member", skip_foreign)
    app.connect("autodoc-process-docstring", escape, priority=900)  # after numpydoc
    return {"parallel_read_safe": True, "parallel_write_safe": True}
