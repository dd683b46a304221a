"""`config`: the settings in force, and where each comes from."""

import os
import tomllib
from pathlib import Path
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
        from scriptdispatch.settings import load, masked

        given = flags.gather(more)
        values = masked(load(given, config))
        sources = origins(given, config)
        if session.screen.json:
            session.screen.document({name: {"value": value, "from": sources[name]} for name, value in values.items()})
            return
        columns = [Column("SETTING"), Column("VALUE", flexible=True), Column("FROM")]
        rows = [_row(name, value, sources[name]) for name, value in values.items()]
        session.screen.table(columns, rows, empty="")


def origins(given: dict[str, Any], file: Path | None) -> dict[str, str]:
    """For each setting: flag, environment, the file's name, or default."""
    from scriptdispatch.settings import FILE, PREFIX, Settings

    path = file or Path(FILE)
    in_file = tomllib.loads(path.read_text()) if path.exists() else {}
    environment = {key.upper() for key in os.environ}
    sources = {}
    for name in Settings.model_fields:
        variable = PREFIX + name.upper()
        sources[name] = (
            "flag" if name in given
            else variable if variable in environment
            else str(path) if name in in_file
            else "default"
        )  # fmt: skip
    return sources


def _row(name: str, value: Any, source: str) -> list[Cell]:
    if value is None or value == []:
        text = "–"
    else:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [Cell(name, name), Cell(clean(text), value), Cell(source, source, "" if source == "default" else "cyan")]
