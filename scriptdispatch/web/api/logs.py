"""`/tasks/{id}/logs`: pages, plain text, and the live stream."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from scriptdispatch.domain.model import StoredLine, Task
from scriptdispatch.services import views
from scriptdispatch.services.fields import format_time, invalid
from scriptdispatch.store.port import LogQuery
from scriptdispatch.web.api.tasks import find_task
from scriptdispatch.web.exchange import answer
from scriptdispatch.web.parts import Parts, Web, Who
from scriptdispatch.web.routes import Route
from scriptdispatch.web.sse import LogStream, is_over, response

LAST_CURSOR = 2**62
Cursor = Annotated[int | None, Field(ge=0, le=LAST_CURSOR)]


class LinesQuery(BaseModel):
    after: Cursor = None
    before: Cursor = None
    tail: int | None = Field(None, ge=1, le=5000)
    limit: int = Field(500, ge=1, le=5000)
    execution_id: str | None = Field(None, max_length=200)
    stream: str | None = Field(None, max_length=200)
    q: str | None = Field(None, min_length=1, max_length=500, description="lines that contain this text")


async def get_logs(task_id: str, web: Web, query: Annotated[LinesQuery, Query()]) -> Response:
    """A page of lines in order of arrival, over all executions.

    `total` and `dropped` are those of the task's whole log, whatever `execution_id`, `stream` and `q` ask for."""
    task = await find_task(web, task_id)
    given = [name for name in ("after", "before", "tail") if getattr(query, name) is not None]
    if "tail" in given and len(given) > 1:
        raise invalid("tail", f"cannot be combined with {given[0]}")
    found = await web.backends.store.logs(_log_query(task, query))
    total, dropped = await web.backends.store.log_totals(task.id)
    clean = views.masker(task)
    first, last = _ends(found, query)
    return answer(
        {
            "items": [views.line_view(line, clean) for line in found],
            "total": total,
            "dropped": dropped,
            "next_cursor": last,
            "prev_cursor": first,
        }
    )


def _log_query(task: Task, query: LinesQuery) -> LogQuery:
    return LogQuery(
        task_id=task.id,
        after=query.after,
        before=query.before,
        tail=query.tail,
        limit=query.limit,
        execution_id=query.execution_id,
        stream=query.stream,
        contains=query.q,
    )


def _ends(found: list[StoredLine], query: LinesQuery) -> tuple[str | None, str | None]:
    """(prev_cursor, next_cursor). An empty page leaves the reader where it was, so it may ask again for newer lines."""
    if found:
        return str(found[0].cursor), str(found[-1].cursor)
    here = query.after if query.after is not None else query.before
    return (None, None) if here is None else (str(here), str(here))


async def download_logs(task_id: str, web: Web) -> Response:
    """All lines as plain text: time, stream, content."""
    task = await find_task(web, task_id)
    headers = {"Content-Disposition": f'attachment; filename="{task.id}.log"'}
    return StreamingResponse(_text(web, task), media_type="text/plain; charset=utf-8", headers=headers)


async def _text(web: Parts, task: Task) -> AsyncIterator[bytes]:
    """Page by page, so memory stays small however long the log is."""
    clean, after = views.masker(task), 0
    while page := await web.backends.store.logs(LogQuery(task_id=task.id, after=after, limit=500)):
        lines = (f"{format_time(s.line.time)} {s.line.stream} {clean(s.line.content)}\n" for s in page)
        yield "".join(lines).encode(errors="replace")
        after = page[-1].cursor


async def stream_logs(request: Request, task_id: str, web: Web, who: Who, after: int | None = None) -> Response:
    """Server-sent events: `log`, `progress`, `state`, `end`. Resumes by `after` or `Last-Event-ID`; 204 after `end`."""
    task = await find_task(web, task_id)
    start = _resume_at(request, after)
    if start is not None and await is_over(web, task, start):
        return Response(status_code=204)
    web.hub.check_room()
    return response(LogStream(web, who, task.id, start or 0).chunks(web.hub.watch(task.id)))


def _resume_at(request: Request, after: int | None) -> int | None:
    """A reconnecting browser repeats its first address, so what it says of the last event is newer than `after`."""
    text = request.headers.get("last-event-id", "").strip()
    if not text:
        if after is not None and not 0 <= after <= LAST_CURSOR:
            raise invalid("after", "must be the id of an event")
        return after
    if not (text.isascii() and text.isdigit() and int(text) <= LAST_CURSOR):
        raise invalid("Last-Event-ID", "must be the id of an event")
    return int(text)


ROUTES = [
    Route(method="GET", path="/tasks/{task_id}/logs", endpoint=get_logs, scope="task:read",
          query=[*LinesQuery.model_fields]),
    Route(method="GET", path="/tasks/{task_id}/logs/download", endpoint=download_logs, scope="task:read"),
    Route(method="GET", path="/tasks/{task_id}/logs/stream", endpoint=stream_logs, scope="task:read", query=["after"]),
]  # fmt: skip
