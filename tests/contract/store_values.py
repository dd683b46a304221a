"""What the contract suite of the stores feeds them: a clock that stands still, records, and the first steps of a task."""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import Applied, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import Execution, History, LogLine, Script, Task
from scriptdispatch.store.port import Store

NOW = datetime(2026, 11, 18, 12, 0, 0, 123_000, tzinfo=UTC)
_numbers = itertools.count(1)


class HeldClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time

    def uptime(self) -> float:
        return self.time.timestamp()

    def advance(self, **span: float) -> datetime:
        self.time += timedelta(**span)
        return self.time


def fresh_id(at: datetime = NOW) -> str:
    """An id as the product makes them: in the order of their times, and of their making within one millisecond."""
    ms, n = round(at.timestamp() * 1000), next(_numbers)
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7{n >> 12 & 0xFFF:03x}-8{n & 0xFFF:03x}-{n * 2654435761 % (1 << 48):012x}"


def make_task(**values: Any) -> Task:
    at = values.get("created_at", NOW)
    id = values.pop("id", None) or fresh_id(at)
    defaults: dict[str, Any] = {
        "id": id,
        "name": "restart",
        "device_id": f"dev-{id}",
        "lane_key": f"2-0-{id}",
        "next_run_at": at,
        "created_at": at,
        "updated_at": at,
    }
    return Task(**{**defaults, **values})


def make_row(task: Task, **values: Any) -> Execution:
    defaults: dict[str, Any] = {
        "id": fresh_id(),
        "task_id": task.id,
        "round": task.round,
        "device_id": task.device_id,
        "script_id": task.script_id,
        "timeout_seconds": task.timeout_seconds,
        "worker_id": "worker-1",
        "node_id": "node-1",
        "from_status": task.status,
        "previous_execution_id": task.execution_id,
        "created_at": NOW,
    }
    return Execution(**{**defaults, **values})


def make_script(content: str = "echo hello") -> Script:
    return Script(id=f"script-{content}", language="shell", content=content, sha256="0" * 64, created_at=NOW)


def make_line(row: Execution, seq: int | None, content: str = "hello", **values: Any) -> LogLine:
    defaults: dict[str, Any] = {"time": NOW, "stream": "stdout"}
    return LogLine(task_id=row.task_id, execution_id=row.id, seq=seq, content=content, **{**defaults, **values})


def note(reason: str) -> History:
    return History(at=NOW, kind="INFO", actor="tester", reason=reason)


async def insert_task(store: Store, *, script: Script | None = None, **values: Any) -> Task:
    task = make_task(**values)
    assert (await one(store, InsertTask(task=task, script=script, history=note("created")))).won
    return task


async def insert_row(store: Store, task: Task, **values: Any) -> Execution:
    """The row as the store has it: with its numbers."""
    row = make_row(task, **values)
    assert (await one(store, InsertExecution(execution=row))).won
    return await get_row(store, row.id)


async def start(store: Store, task: Task, **values: Any) -> tuple[Task, Execution]:
    """W3 and W4."""
    row = await insert_row(store, task, **values)
    assert (await one(store, lifecycle.start(task, row, NOW))).won
    return await get_task(store, task.id), row


async def finish(store: Store, task: Task, at: datetime, status: str = "success", **values: Any) -> Task:
    change = {"status": status, "finished_at": at, "next_run_at": None, **values}
    assert (await one(store, ChangeTask(task_id=task.id, expect={}, set=change))).won
    return await get_task(store, task.id)


async def one(store: Store, change: Any, **values: Any) -> Applied:
    (applied,) = await store.commit([change], **values)
    return applied


async def get_task(store: Store, id: str) -> Task:
    (task,) = await store.tasks([id])
    assert task is not None
    return task


async def get_row(store: Store, id: str) -> Execution:
    (row,) = await store.executions([id])
    assert row is not None
    return row
