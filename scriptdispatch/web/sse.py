"""The streams: one task's log with its progress and state, and the events of the whole system (SPEC 4.3).

A log stream is driven by events and reads the store itself, at least every second, so an event that was lost delays a
line by a second and loses nothing. A stream never outlives its token, nor the process.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

from starlette.responses import StreamingResponse

from scriptdispatch.domain.model import FINAL, Task
from scriptdispatch.errors import Unavailable
from scriptdispatch.queue.port import Event
from scriptdispatch.services.fields import format_time
from scriptdispatch.services.tokens import Principal
from scriptdispatch.services.views import error_view, line_view, masker, timeless
from scriptdispatch.store.port import LogQuery
from scriptdispatch.web.exchange import encode
from scriptdispatch.web.hub import Watch
from scriptdispatch.web.parts import Parts

PAGE = 200
SAFETY_S = 1.0
COMMENT_S = 15.0
LINGER_S = 3.0  # lines may come a little after the result
MOST_TASKS = 200
COMMENT = b": still here\n\n"


def response(chunks: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)


def sse(event: str, data: Any, id: int | None = None) -> bytes:
    head = f"event: {event}\n" if id is None else f"event: {event}\nid: {id}\n"
    return head.encode() + b"data: " + encode(data) + b"\n\n"


class LogStream:
    """One reader of one task. Made and ended by `chunks`."""

    def __init__(self, parts: Parts, who: Principal, task_id: str, after: int) -> None:
        self._parts, self._who, self._task_id = parts, who, task_id
        self._cursor = after
        self._told: dict[str, Any] = {}
        self._spoke_at = parts.backends.clock.uptime()

    async def chunks(self, opened: AbstractContextManager[Watch]) -> AsyncIterator[bytes]:
        with opened as watch:
            yield b"retry: 1000\n\n"
            try:
                async for chunk in self._live(watch):
                    self._spoke_at = self._parts.backends.clock.uptime()
                    yield chunk
            except Unavailable as error:  # the answer has begun: the client sees an event, and comes again
                yield sse("error", {"detail": str(error)})

    async def _live(self, watch: Watch) -> AsyncIterator[bytes]:
        while await self._may_go_on():
            # The task first, then the lines: what was stored before its end is read after its end was seen.
            [task] = await self._parts.backends.store.tasks([self._task_id])
            if task is None:
                return
            async for chunk in self._lines(task):
                yield chunk
            for chunk in self._changes(task):
                yield chunk
            left_s = self._left_s(task)
            if left_s <= 0:
                yield sse("end", {"status": task.status, "finished_at": format_time(task.finished_at)}, self._cursor)
                return
            await watch.wait(min(SAFETY_S, left_s))
            if self._parts.backends.clock.uptime() - self._spoke_at >= COMMENT_S:
                yield COMMENT

    async def _may_go_on(self) -> bool:
        return not self._parts.hub.closing and await self._parts.tokens.still_valid(self._who)

    async def _lines(self, task: Task) -> AsyncIterator[bytes]:
        clean = masker(task)
        while True:
            query = LogQuery(task_id=task.id, after=self._cursor, limit=PAGE)
            page = await self._parts.backends.store.logs(query)
            for line in page:
                self._cursor = line.cursor
                yield sse("log", line_view(line, clean), line.cursor)
            if len(page) < PAGE:
                return

    def _changes(self, task: Task) -> list[bytes]:
        clean = masker(task)
        state = {
            "status": task.status,
            "attempt": task.attempt,
            "round": task.round,
            "push": task.push,
            "retry_count": task.retry_count,
            "cancel_requested": task.cancel_requested,
            "execution_id": task.execution_id,
            "error": clean(error_view(task.error)),
            "result": clean(task.result),
            "next_run_at": format_time(task.next_run_at),
            "finished_at": format_time(task.finished_at),
        }
        progress = {"progress": task.progress, "step": clean(task.step)}
        found = []
        for kind, now in (("progress", progress), ("state", state)):
            if self._told.get(kind) != now:
                self._told[kind] = now
                found.append(sse(kind, now, self._cursor))
        return found

    def _left_s(self, task: Task) -> float:
        """Until the stream ends; for a task that is not final, for ever."""
        if task.status not in FINAL:
            return float("inf")
        ended_at = task.finished_at or task.updated_at
        return LINGER_S - (self._parts.backends.clock.now() - ended_at).total_seconds()


async def is_over(parts: Parts, task: Task, after: int) -> bool:
    """A resume after `end`: the task is long final, and has no line that the client has not seen."""
    if task.status not in FINAL:
        return False
    ended_at = task.finished_at or task.updated_at
    if (parts.backends.clock.now() - ended_at).total_seconds() < LINGER_S:
        return False
    return not await parts.backends.store.logs(LogQuery(task_id=task.id, after=after, limit=1))


class EventStream:
    """`/events`. With a window (in seconds) one message per window holds the latest of each changed task."""

    def __init__(self, parts: Parts, who: Principal, window_s: float | None) -> None:
        self._parts, self._who, self._window_s = parts, who, window_s

    async def chunks(self, opened: AbstractContextManager[Watch]) -> AsyncIterator[bytes]:
        clock = self._parts.backends.clock
        with opened as watch:
            yield b"retry: 1000\n\n"
            spoke_at = clock.uptime()
            while not self._parts.hub.closing and await self._parts.tokens.still_valid(self._who):
                if watch.events:
                    spoke_at = clock.uptime()
                    for chunk in self._told(watch):
                        yield chunk
                    if self._window_s is not None:
                        await Watch(None).wait(self._window_s)  # nothing rings it: the window passes
                elif clock.uptime() - spoke_at >= COMMENT_S:
                    spoke_at = clock.uptime()
                    yield COMMENT
                else:
                    await watch.wait(SAFETY_S)

    def _told(self, watch: Watch) -> list[bytes]:
        events = [timeless(event) for event in watch.events]
        watch.events.clear()
        if self._window_s is None:
            return [sse(str(event.get("event", "event")), event) for event in events]
        return [sse("batch", merge(events))]


def merge(events: list[Event]) -> dict[str, Any]:
    """The latest event of each task, and all others; `reset`: something was dropped, look again."""
    latest: dict[str, Event] = {}
    others: list[Event] = []
    for event in events:
        kind, task_id = str(event.get("event")), event.get("task_id")
        if kind.startswith("task.") and isinstance(task_id, str):
            latest.pop(task_id, None)
            latest[task_id] = event
        elif kind != "reset":
            others.append(event)
    tasks = list(latest.values())
    return {
        "tasks": tasks[-MOST_TASKS:],
        "events": others[-MOST_TASKS:],
        "more": len(tasks) > MOST_TASKS or len(others) > MOST_TASKS,
        "reset": any(event.get("event") == "reset" for event in events),
    }
