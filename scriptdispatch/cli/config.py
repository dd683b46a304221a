"""`config`: the settings in force, and where each comes from."""

from typing import Any

import typer

from scriptdispatch.cli import flags
from scriptdispatch.cli.screen import Cell, Column
from scriptdispatch.cli.session import Session, command
from scriptdispatch.cli.signs import clean


def register(app: typer.Typer) -> None:
    @command(app, "config", server=False)
    def config(session: Session, config: flags.ConfigFile = None, more: flags.More = None) -> None:
        """What is in force here (flags over environment over file), secrets masked."""
        from scriptdispatch import settings

        chosen = flags.gather(more)
        file = flags.settings_file(config, chosen)
        values = settings.masked(settings.load(chosen, file))
        found = settings.given(chosen, file)
        sources = {name: found[name].origin if name in found else "default" for name in values}
        if session.screen.json:
            session.screen.document({name: {"value": value, "from": sources[name]} for name, value in values.items()})
            return
        columns = [Column("SETTING"), Column("VALUE", flexible=True), Column("FROM")]
        rows = [_row(name, value, sources[name]) for name, value in values.items()]
        session.screen.table(columns, rows, empty="")


def _row(name: str, value: Any, source: str) -> list[Cell]:
    if value is None or value == []:
        text = "–"
    else:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [Cell(name, name), Cell(clean(text), value), Cell(source, source, "" if source == "default" else "cyan")]
