"""The question before something that cannot be undone."""

import sys
from typing import Annotated

import typer

from scriptdispatch.cli.session import wrong

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str, yes: bool) -> None:
    """Asks on a terminal; elsewhere nothing is destroyed without `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise wrong("--yes", "this cannot be undone and nobody is there to ask; repeat it with --yes")
    sys.stderr.write(f"{question} [y/N]: ")  # not on stdout, which is for data
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(1)
