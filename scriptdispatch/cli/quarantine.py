"""`quarantine list|show|replay|delete`: execution-log messages that could not be used."""

from typing import Annotated, Any

import typer

from scriptdispatch.cli import pages
from scriptdispatch.cli.confirm import Yes, confirm
from scriptdispatch.cli.screen import Cell, Column
from scriptdispatch.cli.session import Session, command
from scriptdispatch.cli.signs import clean
from scriptdispatch.cli.times import age, shown
from scriptdispatch.clock import SystemClock

app = typer.Typer(no_args_is_help=True)
MessageId = Annotated[str, typer.Argument(metavar="ID", help="As shown by `quarantine list`.")]


@command(app, "list")
def list_messages(
    session: Session,
    limit: pages.Limit = 50,
    cursor: pages.Cursor = None,
    every: pages.Every = False,
) -> None:
    """Messages in quarantine, newest first."""
    size = pages.LARGEST if every else limit
    page = pages.read(lambda place: session.client.quarantine(limit=size, cursor=place), cursor, every)
    if session.screen.json:
        session.screen.document(page)
        return
    now = SystemClock().now()
    columns = [Column("ID", flexible=True), Column("REASON"), Column("AGE", right=True), Column("DETAIL", flexible=True)]
    rows = [
        [
            Cell(clean(row["id"]), row["id"]),
            Cell(clean(row["reason"]), row["reason"], "yellow"),
            Cell(age(row.get("at"), now), row.get("at")),
            Cell(clean(row.get("detail") or ""), row.get("detail")),
        ]
        for row in page["items"]
    ]
    session.screen.table(columns, rows, empty="Nothing is in quarantine.")
    pages.note(session.screen, page)


@command(app, "show")
def show(session: Session, id: MessageId) -> None:
    """One message as it came, and why it could not be used."""
    found = session.client.quarantined(id)
    if session.screen.json:
        session.screen.document(found)
        return
    session.screen.parts((clean(found["id"]), "bold"), (f"  {clean(found['reason'])}", "yellow"))
    session.screen.line(f"Why   {clean(found.get('detail') or '–')}")
    session.screen.line(f"Came  {shown(found.get('at'), utc=session.screen.utc)}")
    session.screen.line(f"Body  {clean(found.get('body') or '–')}")


@command(app, "replay")
def replay(session: Session, id: MessageId) -> None:
    """Put a message back into the stream, as if it came now."""
    answer = session.client.replay(id)
    _say(session, answer, f"Replayed {clean(id)}")


@command(app, "delete")
def delete(session: Session, id: MessageId, yes: Yes = False) -> None:
    """Remove a message for good."""
    confirm(f"Remove message {clean(id)} for good?", yes)
    answer = session.client.unquarantine(id)
    _say(session, answer, f"Removed {clean(id)}")


def _say(session: Session, answer: dict[str, Any], text: str) -> None:
    if session.screen.json:
        session.screen.document(answer)
    else:
        session.screen.done(text)
