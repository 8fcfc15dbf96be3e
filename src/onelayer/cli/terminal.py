"""Where commands print, and how they end after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

out: Console = Console()
err: Console = Console(
    stderr=True
)  # progress and errors, so that what a command prints can be piped


class _PlainFlags:
    """Help that shows no type for flags, which take no value; typer shows <bool>."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return found


class Command(_PlainFlags, TyperCommand):
    """A command of `onelayer`."""


class Commands(_PlainFlags, TyperGroup):
    """A group of commands of `onelayer`."""


def say(text: str, console: Console = out) -> None:
    """Print text as it is: without markup, colours or line breaks of its own."""
    console.print(escape(text), highlight=False, soft_wrap=True)


def fail(message: str, code: int = 2) -> NoReturn:
    """Exit with a message and a status: 2 for a wrong call, 130 for an interruption."""
    err.print(f"[red]onelayer:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


@contextmanager
def plain_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """Report errors of the caller or the machine, and Ctrl-C, as one line without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:  # typer would exit without a message
        fail(interrupted, code=130)


def check_folder(output: Path) -> None:
    """Refuse a file in a folder that does not exist, before the work rather than after it."""
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is not a folder, expected one to write {output.name} to")
