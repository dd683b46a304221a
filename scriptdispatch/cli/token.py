"""`token create|list|revoke`: who may use the API. `--local` works on the store itself, to begin with."""

import asyncio
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from scriptdispatch.cli.confirm import Yes, confirm
from scriptdispatch.cli.flags import settings_file
from scriptdispatch.cli.screen import Cell, Column
from scriptdispatch.cli.session import Session, command, wrong
from scriptdispatch.cli.signs import clean
from scriptdispatch.cli.times import parse_when, rfc3339, shown
from scriptdispatch.clock import SystemClock

app = typer.Typer(no_args_is_help=True)
SCOPES = ("task:read", "task:write", "device:read", "lock:force", "type:write", "log:write", "admin")
Local = Annotated[bool, typer.Option("--local", help="Straight on the store, without a server (to begin with).")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Settings file, with --local.", dir_okay=False)]
StoreUrl = Annotated[str | None, typer.Option("--store-url", help="The store, with --local.")]


@command(app, "create")
def create(
    session: Session,
    name: Annotated[str, typer.Option("--name", help="Who or what will use it.")],
    scope: Annotated[list[str] | None, typer.Option("--scope", help=f"One of {', '.join(SCOPES)}; repeatable.")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="30d, or a time; never unless given.")] = None,
    local: Local = False,
    config: ConfigFile = None,
    store_url: StoreUrl = None,
) -> None:
    """Make a token. Its secret is shown this once."""
    scopes = _scopes(scope)
    until = _expiry(expires)
    if local:
        made = asyncio.run(_create_locally(name, scopes, until, config, store_url))
    else:
        made = session.client.create_token(name, scopes, rfc3339(until) if until else None)
    if session.screen.json:
        session.screen.document(made)
        return
    end = f", until {shown(made.get('expires_at'), utc=session.screen.utc)}" if made.get("expires_at") else ""
    session.screen.done(f"Created token {clean(made['id'])} ({clean(name)}: {', '.join(scopes)}{end})")
    session.screen.line(str(made["token"]))
    session.screen.note("It is shown this once: keep it, e.g. as SCRIPTDISPATCH_TOKEN.")
    if not (session.token or os.environ.get("SCRIPTDISPATCH_TOKEN")):
        session.screen.note(
            "From the first token on the API asks everybody for one: central control needs one, too "
            "(`scriptdispatch dev` gives its lab one at the next start)."
        )


@command(app, "list")
def list_tokens(session: Session) -> None:
    """All tokens, without their secrets."""
    rows = session.client.tokens()
    if session.screen.json:
        session.screen.document({"items": rows})
        return
    columns = [
        Column("ID"),
        Column("STATE"),
        Column("SCOPES", flexible=True),
        Column("EXPIRES"),
        Column("NAME", flexible=True),
    ]
    cells = [_row(row, session.screen.utc) for row in rows]
    session.screen.table(columns, cells, empty="No token is stored: make one with `scriptdispatch token create --name …`.")


@command(app, "revoke")
def revoke(
    session: Session,
    id: Annotated[str, typer.Argument(metavar="ID", help="As shown by `token list`.")],
    cancel_tasks: Annotated[bool, typer.Option("--cancel-tasks", help="Cancel what it created and still waits.")] = False,
    yes: Yes = False,
) -> None:
    """End a token at once. Tasks that it created stay, unless --cancel-tasks is given."""
    tasks = " What it created and still waits is canceled." if cancel_tasks else ""
    confirm(f"Revoke token {clean(id)}? Whoever uses it is locked out at once.{tasks}", yes)
    answer = session.client.revoke_token(id, cancel_tasks=cancel_tasks)
    if session.screen.json:
        session.screen.document(answer)
    else:
        canceled = f", {answer['tasks_canceled']:,} tasks canceled" if cancel_tasks else ""
        session.screen.done(f"Revoked token {clean(id)}{canceled}")


def _scopes(given: list[str] | None) -> list[str]:
    if not given:
        raise wrong("--scope", f"say what it may do: one or more of {', '.join(SCOPES)}")
    scopes = [part.strip() for value in given for part in value.split(",") if part.strip()]
    for one in scopes:
        if one not in SCOPES:
            raise wrong("--scope", f"{one!r} is not known: one of {', '.join(SCOPES)}")
    return scopes


def _expiry(text: str | None) -> datetime | None:
    if text is None:
        return None
    now = SystemClock().now()
    try:
        return parse_when(text if "-" in text or text.startswith("+") else f"+{text}", now)
    except ValueError as error:
        raise wrong("--expires", str(error)) from None


def _row(row: dict[str, Any], utc: bool) -> list[Cell]:
    expires = row.get("expires_at")
    state = "revoked" if row.get("revoked_at") else "expired" if _over(expires) else "valid"
    scopes = ",".join(row.get("scopes") or [])
    return [
        Cell(clean(row["id"]), row["id"]),
        Cell(state, state, {"valid": "green"}.get(state, "red")),
        Cell(clean(scopes), scopes),
        Cell(shown(expires, utc=utc) if expires else "never", expires),
        Cell(clean(row.get("name")), row.get("name")),
    ]


def _over(expires: str | None) -> bool:
    return bool(expires) and datetime.fromisoformat(str(expires)) <= SystemClock().now()


async def _create_locally(
    name: str, scopes: list[str], until: datetime | None, config: Path | None, store_url: str | None
) -> dict[str, Any]:
    from scriptdispatch.services.tokens import TokenBook
    from scriptdispatch.settings import load
    from scriptdispatch.wiring import connect

    given = {"store_url": store_url}
    backends = await connect(load(given, settings_file(config, given)))
    try:
        token, text = await TokenBook(backends.store, backends.clock, ()).create(name, scopes, until)
    finally:
        await backends.close()
    expires_at = rfc3339(until) if until else None
    return {"id": token.id, "name": name, "scopes": token.scopes, "expires_at": expires_at, "token": text}
