"""`device list|show|unlock`: who has a device, and who waits for it."""

from typing import Annotated, Any

import typer

from scriptdispatch.cli import complete, pages
from scriptdispatch.cli.confirm import Yes, confirm
from scriptdispatch.cli.screen import Cell, Column
from scriptdispatch.cli.session import Session, command, wrong
from scriptdispatch.cli.signs import clean
from scriptdispatch.cli.times import age, short_span
from scriptdispatch.clock import SystemClock

app = typer.Typer(no_args_is_help=True)
DeviceId = Annotated[
    str, typer.Argument(metavar="DEVICE", help="The device's id, e.g. dev-001.", autocompletion=complete.devices)
]


@command(app, "list")
def list_devices(
    session: Session,
    state: Annotated[str | None, typer.Option("--state", help="Only those that are busy, or waiting.")] = None,
    limit: pages.Limit = 50,
    cursor: pages.Cursor = None,
    every: pages.Every = False,
) -> None:
    """Devices with a lock or with tasks waiting in their lane."""
    if state not in (None, "busy", "waiting"):
        raise wrong("--state", f"{state!r} is not known: busy or waiting")
    size = pages.LARGEST if every else limit
    page = pages.read(lambda place: session.client.devices(state, limit=size, cursor=place), cursor, every)
    if session.screen.json:
        session.screen.document(page)
        return
    now = SystemClock().now()
    columns = [Column("DEVICE"), Column("STATE"), Column("HELD BY"), Column("FOR", right=True)]
    columns += [Column("FENCE", right=True), Column("LANE", right=True)]
    rows = [_row(device, now) for device in page["items"]]
    session.screen.table(columns, rows, empty="No device is busy and no task waits for one.")
    pages.note(session.screen, page)


@command(app, "show")
def show(session: Session, device: DeviceId) -> None:
    """One device: online, who holds it, and its lane."""
    found = session.client.device(device)
    if session.screen.json:
        session.screen.document(found)
        return
    lock, lane = found.get("lock"), found.get("lane") or []
    session.screen.parts((f"{clean(found['id'])}  ", "bold"), *_presence(found), ("  ", ""), *_holder(lock))
    places = [f"{row.get('position')} …{row['task_id'][-8:]}{_about(row)}" for row in lane[:10]]
    more = f" · and {len(lane) - 10:,} more" if len(lane) > 10 else ""
    session.screen.line("Lane  " + (" · ".join(places) + more if places else "nobody waits"))


@command(app, "unlock")
def unlock(
    session: Session,
    device: DeviceId,
    reason: Annotated[str | None, typer.Option("--reason", help="Why; kept in the task's history.")] = None,
    fence: Annotated[int | None, typer.Option("--fence", help="Only if this fencing token still holds it.")] = None,
    yes: Yes = False,
) -> None:
    """Take the device from whoever holds it: its task fails with LOCK_RELEASED, the next one may start."""
    if not reason or not reason.strip():
        raise wrong("--reason", "say why the lock is broken, e.g. --reason 'replaced board'")
    confirm(f"Take {clean(device)} from whoever holds it? A script that runs there goes on, beside the next one.", yes)
    # What is released is the holder seen now: one that came a moment later is not hit.
    seen = session.client.device(device)
    token = fence if fence is not None else (seen.get("lock") or {}).get("fencing_token")
    answer = session.client.unlock(device, reason=reason, fencing_token=token)
    if session.screen.json:
        session.screen.document(answer)
        return
    task = answer.get("task_id") or (seen.get("lock") or {}).get("task_id")
    parts = [f"Unlocked {clean(device)}" + (f" (fence {token})" if token is not None else "")]
    if task:
        parts.append(f": {task[-8:]} {answer.get('status') or 'failed'}, LOCK_RELEASED")
    waiting = [row["task_id"] for row in seen.get("lane") or []]
    session.screen.done("".join(parts) + (f"; next …{waiting[0][-8:]}" if waiting else ""))


def _row(device: dict[str, Any], now: Any) -> list[Cell]:
    lock: dict[str, Any] = device.get("lock") or {}
    length = int(device.get("waiting") or 0)
    state = "busy" if lock else "waiting" if length else "free"
    holder = lock.get("task_id") or lock.get("holder")
    return [
        Cell(clean(device["id"]), device["id"]),
        Cell({"busy": "◐ busy", "waiting": "○ waiting"}.get(state, "free"), state, {"busy": "blue"}.get(state, "")),
        Cell(_who(lock) if lock else "–", holder),
        Cell(age(lock.get("since"), now), lock.get("since")),
        Cell(str(lock["fencing_token"]) if lock.get("fencing_token") is not None else "–", lock.get("fencing_token")),
        Cell(f"{length:,}", length),
    ]


def _presence(found: dict[str, Any]) -> list[tuple[str, str]]:
    central = found.get("central")
    if central is None:
        return [("? " + clean(found.get("central_error") or "unknown to central control"), "yellow")]
    return [("● online", "green")] if central.get("online", True) else [("● offline", "red")]


def _who(lock: dict[str, Any]) -> str:
    return f"…{lock['task_id'][-8:]}" if lock.get("task_id") else clean(lock.get("holder"))


def _holder(lock: dict[str, Any] | None) -> list[tuple[str, str]]:
    if not lock:
        return [("free", "green")]
    span = short_span(lock["age_seconds"]) if lock.get("age_seconds") is not None else ""
    fence = f"  fence {lock['fencing_token']}" if lock.get("fencing_token") is not None else ""
    return [("◐ busy", "blue"), (f"  {_who(lock)} {span}{fence}", "")]


def _about(row: dict[str, Any]) -> str:
    """Priority and name, where the server tells them."""
    return "".join(f" {clean(row[key])}" for key in ("priority", "name") if row.get(key))
