"""The command line: `onelayer demo | recover | conditions | claims | report | export`."""

from __future__ import annotations

from typing import Annotated

import typer

import onelayer
from onelayer.cli import conditions, lab, recovery
from onelayer.cli.terminal import out

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="What one attention layer can learn, and how to learn one attention layer.",
)
app.command()(recovery.demo)
app.command("recover")(recovery.recover_command)
app.command("conditions")(conditions.conditions_command)
app.add_typer(lab.claims, name="claims")
app.command()(lab.report)
app.command()(lab.export)


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
