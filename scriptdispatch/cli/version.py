"""`version`: what is installed here. Asks no server."""

import typer

from scriptdispatch import __version__
from scriptdispatch.cli.session import Session, command


def register(app: typer.Typer) -> None:
    @command(app, "version", server=False)
    def version(session: Session) -> None:
        """The version of this program."""
        if session.screen.json:
            session.screen.document({"version": __version__})
        else:
            session.screen.line(f"scriptdispatch {__version__}")
