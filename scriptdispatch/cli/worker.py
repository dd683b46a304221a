"""`worker list` and `node list`: who does the work."""

from typing import Any

import typer

from scriptdispatch.cli.screen import Cell, Column
from scriptdispatch.cli.session import Session, command
from scriptdispatch.cli.signs import clean
from scriptdispatch.cli.times import age
from scriptdispatch.clock import SystemClock

workers = typer.Typer(no_args_is_help=True)
nodes = typer.Typer(no_args_is_help=True)
_STYLES = {"ready": "green", "starting": "yellow", "stopping": "yellow", "offline": "red"}
_NO_NODE = "No node has been seen: start one with `scriptdispatch serve` (or everything with `scriptdispatch dev`)."


@workers.callback()
def _workers() -> None:
    """Worker processes."""


@nodes.callback()
def _nodes() -> None:
    """Nodes of the cluster."""


@command(workers, "list")
def list_workers(session: Session) -> None:
    """All workers, offline ones of the last 7 days too."""
    rows = session.client.workers()
    if session.screen.json:
        session.screen.document({"items": rows})
        return
    now = SystemClock().now()
    columns = [Column("WORKER"), Column("STATUS"), Column("PID", right=True), Column("LOAD", right=True)]
    columns += [
        Column("BEAT", right=True),
        Column("UP", right=True),
        Column("RESTARTS", right=True),
        Column("NODE", flexible=True),
    ]
    session.screen.table(columns, [_worker(row, now) for row in rows], empty=_NO_NODE)


@command(nodes, "list")
def list_nodes(session: Session) -> None:
    """All nodes of the last 7 days."""
    rows = session.client.nodes()
    if session.screen.json:
        session.screen.document({"items": rows})
        return
    now = SystemClock().now()
    columns = [Column("NODE", flexible=True), Column("ID"), Column("ROLE"), Column("PID", right=True)]
    columns += [Column("WORKERS", right=True), Column("LAG", right=True), Column("BEAT", right=True), Column("VERSION")]
    session.screen.table(columns, [_node(row, now) for row in rows], empty=_NO_NODE)


def _worker(row: dict[str, Any], now: Any) -> list[Cell]:
    status = str(row.get("status"))
    node = str(row.get("node_id") or "")
    return [
        Cell(clean(row.get("name") or row["id"][-8:]), row["id"]),
        Cell(clean(status), status, _STYLES.get(status, "")),
        Cell(str(row.get("pid")), row.get("pid")),
        Cell(f"{row.get('load'):,}/{row.get('capacity'):,}", f"{row.get('load')}/{row.get('capacity')}"),
        Cell(age(row.get("last_heartbeat_at"), now), row.get("last_heartbeat_at")),
        Cell(age(row.get("started_at"), now), row.get("started_at")),
        Cell(str(row.get("restarts", 0)), row.get("restarts", 0)),
        Cell(node[-8:], node),
    ]


def _node(row: dict[str, Any], now: Any) -> list[Cell]:
    count = int(row.get("workers") or 0)
    role = "offline" if row.get("status") == "offline" else "leader" if row.get("leader") else "follower"
    lag = row.get("consumer_lag")
    return [
        Cell(clean(row.get("name")), row.get("name")),
        Cell(row["id"][-8:], row["id"]),
        Cell(role, role, {"leader": "green", "offline": "red"}.get(role, "")),
        Cell(str(row.get("pid")), row.get("pid")),
        Cell(str(count), count),
        Cell("–" if lag is None else f"{lag:,}", lag),
        Cell(age(row.get("last_heartbeat_at"), now), row.get("last_heartbeat_at")),
        Cell(clean(row.get("version")), row.get("version")),
    ]
