"""Where commands print, and how they give up."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.markup import escape

out = Console()
err = Console(stderr=True)  # progress and errors, so that what a command prints can be piped


def fail(message: str, code: int = 2) -> NoReturn:
    """End with a message and an exit status: 2 for a wrong call, 130 for an interruption."""
    err.print(f"[red]onelayer:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)
