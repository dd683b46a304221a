"""Workers, nodes, stats, events, reconcile, version."""

import asyncio
from datetime import date, datetime
from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from scriptdispatch import __version__
from scriptdispatch.services import views
from scriptdispatch.services.fields import invalid
from scriptdispatch.web.exchange import answer
from scriptdispatch.web.parts import Web, Who
from scriptdispatch.web.routes import Route
from scriptdispatch.web.sse import EventStream, response


async def list_workers(web: Web) -> Response:
    """Live ones first, then those that ended within 7 days."""
    nodes, gone = await asyncio.gather(web.backends.leases.nodes(), web.backends.leases.gone_workers())
    shown = {worker.id: views.worker_view(worker, alive=False) for worker in gone}
    for node, alive in nodes:
        shown |= {worker.id: views.worker_view(worker, alive=alive) for worker in node.workers}
    items = sorted(shown.values(), key=lambda worker: (worker["status"] == "offline", worker["name"]))
    return answer({"items": items})


async def list_nodes(web: Web) -> Response:
    """All nodes of the last 7 days, newest first."""
    leases = web.backends.leases
    nodes, leader, breaker = await asyncio.gather(leases.nodes(), leases.leader(), leases.breaker())
    word = "open" if breaker.open else "closed"
    return answer({"items": [views.node_view(node, alive=alive, leader=leader, breaker=word) for node, alive in nodes]})


async def get_stats(web: Web, day: str | None = None) -> Response:
    """Counts now; rates and times over the last hour, or over one day (UTC)."""
    wanted = None if day is None else _day(day)
    return answer(await web.stats.view(wanted))


def _day(text: str) -> date:
    try:
        found = datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise invalid("day", "must be YYYY-MM-DD") from None
    if len(text) != 10 or not 2000 <= found.year < 9999:
        raise invalid("day", "must be YYYY-MM-DD, from 2000 on")
    return found


async def stream_events(
    web: Web, who: Who, batch: Annotated[int | None, Query(ge=50, le=10_000, description="milliseconds")] = None
) -> Response:
    """Server-sent events of the whole system, from now on."""
    web.hub.check_room()
    return response(EventStream(web, who, None if batch is None else batch / 1000).chunks(web.hub.watch()))


async def reconcile(web: Web) -> Response:
    """Queue, lanes and locks against the store, now: counts of what was found and mended."""
    return answer(await web.reconciler.run_all())


async def version() -> Response:
    return answer({"name": "scriptdispatch", "version": __version__})


ROUTES = [
    Route(method="GET", path="/workers", endpoint=list_workers, scope="task:read"),
    Route(method="GET", path="/nodes", endpoint=list_nodes, scope="task:read"),
    Route(method="GET", path="/stats", endpoint=get_stats, scope="task:read", query=["day"]),
    Route(method="GET", path="/events", endpoint=stream_events, scope="task:read", query=["batch"]),
    Route(method="POST", path="/reconcile", endpoint=reconcile, scope="admin"),
    Route(method="GET", path="/version", endpoint=version, scope="any"),
]
