"""The command line: `onelayer demo | recover | conditions | claims | report | export`."""

from __future__ import annotations

from typing import Annotated

import typer

import onelayer
from onelayer.cli import conditions, lab, recovery
from onelayer.cli.terminal import Command, Commands, out

app: typer.Typer = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="What one attention layer can learn, and how to learn one attention layer.",
)
app.command(cls=Command)(recovery.demo)
app.command("recover", cls=Command)(recovery.recover_command)
app.command("conditions", cls=Command)(conditions.conditions_command)
app.add_typer(lab.claims, name="claims")
app.command(cls=Command)(lab.report)
app.command(cls=Command)(lab.export)


def main() -> None:
    """The entry point of `onelayer`."""
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        out.print(onelayer.__version__, highlight=False)
        raise typer.Exit
