"""`/tasks`: create, look, cancel. Thin: what happens is in `services`."""

from datetime import datetime
from typing import Annotated, Any, cast

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from scriptdispatch import ids
from scriptdispatch.domain.model import ERROR_CODES, STATUSES, Priority, Script, Status, Task
from scriptdispatch.errors import Refused, Unavailable
from scriptdispatch.services import facts, views
from scriptdispatch.services.bodies import ActionBody, BatchBody, TaskBody
from scriptdispatch.services.dry_run import dry_run_view
from scriptdispatch.services.fields import invalid, parse_time
from scriptdispatch.services.idempotency import Answer, Work
from scriptdispatch.services.reading import read_task
from scriptdispatch.store.port import TaskFilter
from scriptdispatch.web.exchange import answer, checked, encode, read_body, read_json
from scriptdispatch.web.parts import Parts, Web, Who
from scriptdispatch.web.problems import refusal_dict
from scriptdispatch.web.routes import Route

TAIL = 8  # an id may be given by its last characters, from so many on


async def create_task(request: Request, web: Web, who: Who) -> Response:
    """Creates a task: 201. With an `Idempotency-Key` a repeat gets the first answer again."""
    body = await read_json(request)

    async def work(seed: str, repeat: bool) -> Answer:
        task = await web.creator.create(body, who.name, id=single_id(seed), repeat=repeat)
        return Answer(status=201, body=encode(await _created_view(web, task)))

    return await _idempotent(request, web, who.id, body, work)


def single_id(seed: str) -> str:
    """Keeps the seed's counter within its millisecond, so that tasks of one process keep the order of their requests."""
    return ids.derived_id(seed, int(seed[15:18], 16))


async def _created_view(web: Parts, task: Task) -> dict[str, Any]:
    """The task is stored, so the answer is 201 even if the store goes away before it can be read again."""
    try:
        return await task_view(web, task)
    except Unavailable:
        return views.task_view(task, facts.only_time(task, web.backends.clock.now()))


async def create_batch(request: Request, web: Web, who: Who) -> Response:
    """Creates up to 1,000 tasks. One that is refused does not sink the rest."""
    body = await read_json(request)
    bodies = checked(body, BatchBody).tasks

    async def work(seed: str, repeat: bool) -> Answer:
        chosen = [ids.derived_id(seed, index) for index in range(len(bodies))]
        outcomes = await web.creator.create_many(bodies, who.name, ids=chosen, repeat=repeat)
        now = web.backends.clock.now()
        items = [_outcome(index, outcome, now) for index, outcome in enumerate(outcomes)]
        created = sum(isinstance(outcome, Task) for outcome in outcomes)
        content = {"items": items, "created": created, "failed": len(items) - created}
        return Answer(status=200, body=encode(content), created=created > 0)

    return await _idempotent(request, web, who.id, body, work)


def _outcome(index: int, outcome: Task | Refused, now: datetime) -> dict[str, Any]:
    if isinstance(outcome, Refused):
        return {"index": index, "status": outcome.status, "error": refusal_dict(outcome)}
    view = views.task_view(outcome, facts.only_time(outcome, now))
    return {"index": index, "status": 201, "task": view}


async def _idempotent(request: Request, web: Parts, owner: str, body: Any, work: Work) -> Response:
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise invalid("Idempotency-Key", "must be given once")
    if keys:
        found = await web.idempotency.run(owner, keys[0], request.url.path, body, work)
    else:
        found = await work(ids.new_id(), False)
    headers = {"Idempotent-Replayed": "true"} if found.replayed else None
    return Response(found.body, found.status, headers, media_type="application/json")


async def check_task(request: Request, web: Web) -> Response:
    """A dry run of create: stores nothing."""
    return answer(await dry_run_view(web.creator, web.backends, await read_json(request)))


class TaskQuery(BaseModel):
    status: str | None = Field(None, description="comma list")
    ids: str | None = Field(None, description="comma list, at most 100")
    device_id: str | None = Field(None, max_length=200)
    type: str | None = Field(None, max_length=200)
    priority: Priority | None = None
    label: list[str] = Field(default=[], max_length=32, description="k:v, repeatable")
    error_code: str | None = Field(None, max_length=100)
    dedupe_key: str | None = Field(None, max_length=200)
    created_after: str | None = None
    created_before: str | None = None
    limit: int = Field(50, ge=1, le=500)
    cursor: str | None = None


async def list_tasks(web: Web, query: Annotated[TaskQuery, Query()]) -> Response:
    """Newest first, without the scripts' contents."""
    found = await web.backends.store.list_tasks(_filter(query), query.limit + 1)
    page = found[: query.limit]
    waiting = await facts.why_waiting(web.backends, page)
    items = [views.task_view(task, waiting.get(task.id)) for task in page]
    return answer({"items": items, "next_cursor": page[-1].id if len(found) > query.limit else None})


def _filter(query: TaskQuery) -> TaskFilter:
    statuses = tuple(part for part in (query.status or "").split(",") if part)
    for status in statuses:
        if status not in STATUSES:
            raise invalid("status", f"{status[:50]!r} is none of {', '.join(STATUSES)}")
    if query.error_code is not None and query.error_code not in ERROR_CODES:
        raise invalid("error_code", f"{query.error_code[:50]!r} is none of {', '.join(ERROR_CODES)}")
    wanted = tuple(part for part in (query.ids or "").split(",") if part)
    if len(wanted) > 100:
        raise invalid("ids", "at most 100")
    if query.cursor is not None and not ids.is_id(query.cursor):
        raise invalid("cursor", "must be the next_cursor of a page")
    return TaskFilter(
        statuses=cast("tuple[Status, ...]", statuses),
        ids=wanted,
        device_id=query.device_id,
        type=query.type,
        priority=query.priority,
        labels=tuple(_label(text) for text in query.label),
        error_code=query.error_code,
        dedupe_key=query.dedupe_key,
        created_after=_time("created_after", query.created_after),
        created_before=_time("created_before", query.created_before),
        before_id=query.cursor,
    )


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon or not key:
        raise invalid("label", "must be k:v")
    return key, value


def _time(field: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return parse_time(text)
    except ValueError as error:
        raise invalid(field, str(error)) from None


async def find_task(web: Parts, task_id: str) -> Task:
    """By its id, or by the last 8 or more characters of it. To be shown, not to decide on (see `services.reading`)."""
    task_id = task_id.lower()
    task = await read_task(web.backends, task_id) if ids.is_id(task_id) else None
    if task is None and TAIL <= len(task_id) < 36:
        task = await _by_tail(web, task_id)
    if task is None:
        raise Refused(404, "task_not_found", f"there is no task {task_id[:100]}")
    return task


async def _by_tail(web: Parts, tail: str) -> Task | None:
    if not all(sign in "0123456789abcdef-" for sign in tail):
        return None
    found = await web.backends.store.find_id(tail)
    if len(found) > 1:
        detail = f"several tasks end in {tail}: {', '.join(found)}"
        raise Refused(409, "illegal_state", detail, current="ambiguous", candidates=found)
    return await read_task(web.backends, found[0]) if found else None


async def task_view(web: Parts, task: Task) -> dict[str, Any]:
    waiting = await facts.why_waiting(web.backends, [task])
    return views.task_view(task, waiting.get(task.id), await script_of(web, task))


async def script_of(web: Parts, task: Task) -> Script | None:
    return await web.scripts.get(task.script_id) if task.script_id is not None else None


async def get_task(task_id: str, web: Web) -> Response:
    """One task with its script."""
    return answer(await task_view(web, await find_task(web, task_id)))


async def get_executions(task_id: str, web: Web) -> Response:
    """Its attempts, first one first."""
    task = await find_task(web, task_id)
    clean = views.masker(task)
    rows = await web.backends.store.executions_of(task.id)
    return answer({"items": [views.execution_view(row, clean) for row in rows]})


async def get_history(task_id: str, web: Web) -> Response:
    """Who changed what and why, oldest first, the last 500."""
    task = await find_task(web, task_id)
    clean = views.masker(task)
    return answer({"items": [views.history_view(row, clean) for row in await web.backends.store.history(task.id)]})


async def get_script(task_id: str, web: Web) -> Response:
    """The script as it was given, before params are filled in."""
    script = await script_of(web, await find_task(web, task_id))
    if script is None:
        raise Refused(404, "not_found", "this task has no script")
    return answer({"id": script.id, **views.script_view(script)})


async def cancel_task(request: Request, task_id: str, web: Web, who: Who, force: bool = False) -> Response:
    """200: canceled. 202: it was sent already, central control is asked."""
    body = await read_body(request, ActionBody, optional=True)
    return await _cancel(web, task_id, who.name, body, force)


async def delete_task(task_id: str, web: Web, who: Who, force: bool = False, reason: str = "") -> Response:
    """The same as cancel."""
    return await _cancel(web, task_id, who.name, checked({"reason": reason}, ActionBody), force)


async def _cancel(web: Parts, task_id: str, actor: str, body: ActionBody, force: bool) -> Response:
    found = await find_task(web, task_id)
    task, done = await web.actions.cancel(
        found.id, actor=actor, reason=body.reason, force=force, expected_status=body.expected_status
    )
    return answer(await task_view(web, task), 200 if done else 202)


ROUTES = [
    Route(method="POST", path="/tasks", endpoint=create_task, scope="task:write", body=TaskBody, status=201),
    Route(method="POST", path="/tasks/batch", endpoint=create_batch, scope="task:write", body=BatchBody),
    Route(method="POST", path="/tasks/check", endpoint=check_task, scope="task:write", body=TaskBody),
    Route(method="GET", path="/tasks", endpoint=list_tasks, scope="task:read", query=[*TaskQuery.model_fields]),
    Route(method="GET", path="/tasks/{task_id}", endpoint=get_task, scope="task:read"),
    Route(method="GET", path="/tasks/{task_id}/executions", endpoint=get_executions, scope="task:read"),
    Route(method="GET", path="/tasks/{task_id}/history", endpoint=get_history, scope="task:read"),
    Route(method="GET", path="/tasks/{task_id}/script", endpoint=get_script, scope="task:read"),
    Route(method="POST", path="/tasks/{task_id}/cancel", endpoint=cancel_task, scope="task:write", query=["force"],
          body=ActionBody),
    Route(method="DELETE", path="/tasks/{task_id}", endpoint=delete_task, scope="task:write", query=["force", "reason"]),
]  # fmt: skip
