"""Write the reference of the command line from the help of its commands, before every build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context
from typer.cli import get_docs_for_click
from typer.main import get_command

from onelayer.cli import app as commands

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LIST = re.compile(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n")  # with descriptions that are cut off
PAGE = "reference/generated/command-line.md"


def page() -> str:
    """Return the help of all commands as Markdown."""
    command = get_command(commands)
    text = get_docs_for_click(obj=command, ctx=Context(command), name="onelayer")
    text = LIST.sub("", text)
    return f"{text.replace('# `onelayer`', '# Command line', 1).strip()}\n"


def write(app: Sphinx) -> None:
    """Write the page, unless the file has this text: it would count as changed."""
    path, text = Path(app.srcdir, PAGE), page()
    if not path.exists() or path.read_text("utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
