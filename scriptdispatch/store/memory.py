"""The store in this process's memory, with the exact semantics of the others: for fast tests and simulation.

Nothing here awaits, so each call is atomic. Nothing is shared between processes, and nothing outlives this one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from scriptdispatch.clock import Clock
from scriptdispatch.domain.changes import Applied, Change, ChangeExecution, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import (
    EXECUTABLE,
    FINAL,
    STATUSES,
    UNDER_WAY,
    Execution,
    History,
    LogLine,
    Quarantined,
    Script,
    Status,
    StoredLine,
    Task,
    Token,
)
from scriptdispatch.errors import StaleTerm
from scriptdispatch.store.port import LogQuery, Moment, Remembered, Stats, TaskFilter
from scriptdispatch.store.summary import HISTORY_KEPT, NEWEST, build_stats

_WON: Final = Applied(won=True)
_LOST: Final = Applied(won=False)


def holds(record: Struct, expect: Mapping[str, Any]) -> bool:
    """Is the record as a change expects it (see `domain.changes`)?"""
    for name, wanted in expect.items():
        value = getattr(record, name)
        if value not in wanted if isinstance(wanted, tuple) else value != wanted:
            return False
    return True


def passes(task: Task, where: TaskFilter) -> bool:
    """Is the task among those that the filter asks for?"""
    code = task.error.code if task.error else None
    wanted = [
        (where.device_id, task.device_id),
        (where.type, task.type),
        (where.priority, task.priority),
        (where.error_code, code),
        (where.dedupe_key, task.dedupe_key),
    ]
    return (
        all(wish is None or wish == value for wish, value in wanted)
        and (not where.statuses or task.status in where.statuses)
        and (not where.ids or task.id in where.ids)
        and all(task.labels.get(name) == value for name, value in where.labels)
        and (where.created_after is None or task.created_at >= where.created_after)
        and (where.created_before is None or task.created_at < where.created_before)
        and (where.before_id is None or task.id < where.before_id)
    )


class MemoryStore:
    """See `port.Store`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._term: int | None = None
        self._tasks: dict[str, Task] = {}
        self._dedupe: dict[str, str] = {}
        self._history: dict[str, list[History]] = {}
        self._scripts: dict[str, Script] = {}
        self._executions: dict[str, Execution] = {}
        self._rows_of: dict[str, list[str]] = {}  # task -> its executions, by attempt
        self._open: dict[str, None] = {}  # ids of open rows
        self._holder: dict[str, str] = {}  # device -> its open row
        self._highest: dict[str, tuple[int, str]] = {}  # device -> highest fence, and the row that has it
        self._lines: dict[int, tuple[datetime, LogLine]] = {}  # cursor -> arrival, line
        self._cursors_of: dict[str, list[int]] = {}  # task -> its lines
        self._seen: set[tuple[str, int]] = set()
        self._cursor = 0
        self._quarantine: dict[str, Quarantined] = {}
        self._remembered: dict[tuple[str, str], Remembered] = {}
        self._tokens: dict[str, Token] = {}

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def ping(self) -> str:
        return "in memory of one process"

    # --- writes

    async def commit(self, changes: Sequence[Change], *, term: int | None = None, soon: bool = False) -> list[Applied]:
        if term is not None:
            if self._term is not None and self._term > term:
                raise StaleTerm(f"term {term} is over: term {self._term} has written already")
            self._term = term
        return [self._apply(change) for change in changes]

    def _apply(self, change: Change) -> Applied:
        if isinstance(change, ChangeTask):
            return self._change_task(change)
        if isinstance(change, ChangeExecution):
            return self._change_execution(change)
        if isinstance(change, InsertExecution):
            return self._insert_execution(change.execution)
        return self._insert_task(change)

    def _change_task(self, change: ChangeTask) -> Applied:
        task = self._tasks.get(change.task_id)
        if task is None or not holds(task, change.expect):
            return _LOST
        self._tasks[task.id] = replace(task, **change.set)
        if change.history is not None:
            self._add_history(task.id, change.history)
        return _WON

    def _change_execution(self, change: ChangeExecution) -> Applied:
        row = self._executions.get(change.execution_id)
        if row is None or not holds(row, change.expect):
            return _LOST
        row = self._executions[row.id] = replace(row, **change.set)
        if not row.active and row.id in self._open:
            del self._open[row.id]
            if row.device_id is not None:
                del self._holder[row.device_id]
        return _WON

    def _insert_task(self, change: InsertTask) -> Applied:
        task = change.task
        if task.id in self._tasks:
            return _WON
        if task.dedupe_key is not None:
            holder = self._dedupe.setdefault(task.dedupe_key, task.id)
            if holder != task.id:
                return Applied(won=False, holder=holder)
        self._tasks[task.id] = task
        if change.script is not None:
            self._scripts.setdefault(change.script.id, change.script)
        self._add_history(task.id, change.history)
        return _WON

    def _insert_execution(self, row: Execution) -> Applied:
        if ours := self._executions.get(row.id):
            return Applied(won=True, attempt=ours.attempt, fencing_token=ours.fencing_token)
        if row.active and row.device_id is not None and row.device_id in self._holder:
            return Applied(won=False, holder=self._holder[row.device_id])
        siblings = self._rows_of.setdefault(row.task_id, [])
        attempt = self._executions[siblings[-1]].attempt + 1 if siblings else 1
        fence = None if row.device_id is None else self._highest.get(row.device_id, (0, ""))[0] + 1
        self._executions[row.id] = replace(row, attempt=attempt, fencing_token=fence)
        siblings.append(row.id)
        if row.device_id is not None and fence is not None:
            self._highest[row.device_id] = (fence, row.id)
        if row.active:
            self._open[row.id] = None
            if row.device_id is not None:
                self._holder[row.device_id] = row.id
        return Applied(won=True, attempt=attempt, fencing_token=fence)

    def _add_history(self, task_id: str, history: History) -> None:
        rows = self._history.setdefault(task_id, [])
        rows.append(history)
        del rows[:-HISTORY_KEPT]

    async def confirm(self, inserts: Sequence[InsertTask], outcomes: Sequence[Applied]) -> None:
        """They are durable already."""

    async def append_logs(
        self, lines: Sequence[LogLine], *, max_per_execution: int, there: Mapping[str, int] | None = None
    ) -> int:
        now = self._clock.now()
        stored: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for line in lines:
            if line.seq is not None and (line.execution_id, line.seq) in self._seen:
                continue
            row = self._executions.get(line.execution_id)
            if (row.log_lines if row else 0) + stored[line.execution_id] >= max_per_execution:
                dropped[line.execution_id] += 1
                continue
            stored[line.execution_id] += 1
            self._store_line(line, now)
        for id in {*stored, *dropped} & self._executions.keys():
            row = self._executions[id]
            self._executions[id] = replace(
                row, log_lines=row.log_lines + stored[id], log_dropped=row.log_dropped + dropped[id]
            )
        return stored.total()

    def _store_line(self, line: LogLine, now: datetime) -> None:
        self._cursor += 1
        self._lines[self._cursor] = (now, line)
        self._cursors_of.setdefault(line.task_id, []).append(self._cursor)
        if line.seq is not None:
            self._seen.add((line.execution_id, line.seq))

    async def append_and_close(
        self,
        lines: Sequence[LogLine],
        closing: Sequence[ChangeExecution],
        *,
        max_per_execution: int,
        there: Mapping[str, int] | None = None,
    ) -> list[Applied]:
        await self.append_logs(lines, max_per_execution=max_per_execution, there=there)
        return await self.commit(closing)

    async def quarantine(self, items: Sequence[Quarantined]) -> None:
        for item in items:
            self._quarantine.setdefault(item.id, item)

    async def unquarantine(self, id: str) -> bool:
        return self._quarantine.pop(id, None) is not None

    async def remember(self, owner: str, key: str, request: Remembered) -> Remembered | None:
        first = self._remembered.setdefault((owner, key), request)
        return None if first is request else first

    async def take_over(self, owner: str, key: str, begun_at: datetime, now: datetime) -> bool:
        first = self._remembered.get((owner, key))
        if first is None or first.status is not None or first.begun_at != begun_at:
            return False
        self._remembered[owner, key] = replace(first, begun_at=now)
        return True

    async def answer(self, owner: str, key: str, status: int, body: bytes) -> None:
        if first := self._remembered.get((owner, key)):
            self._remembered[owner, key] = replace(first, status=status, answer=body)

    async def forget(self, owner: str, key: str) -> None:
        self._remembered.pop((owner, key), None)

    async def save_token(self, token: Token) -> None:
        self._tokens[token.id] = token

    async def purge(self, finished_before: datetime, limit: int) -> int:
        old = [
            task
            for task in self._tasks.values()
            if task.status in FINAL and task.finished_at is not None and task.finished_at < finished_before
        ]
        old.sort(key=lambda task: (task.finished_at, task.id))
        gone = [task for task in old[:limit] if not any(id in self._open for id in self._rows_of.get(task.id, ()))]
        for task in gone:
            self._remove(task)
        for device_id in {task.device_id for task in gone} - {None}:
            self._drop_rows_below(str(device_id))
        return len(gone)

    def _remove(self, task: Task) -> None:
        del self._tasks[task.id]
        self._history.pop(task.id, None)
        if task.dedupe_key is not None:
            self._dedupe.pop(task.dedupe_key, None)
        for cursor in self._cursors_of.pop(task.id, ()):
            self._drop_line(cursor)
        for id in list(self._rows_of.get(task.id, ())):
            if self._executions[id].device_id is None:
                self._drop_row(id)

    def _drop_rows_below(self, device_id: str) -> None:
        """Rows whose task is gone, but for the one with the device's highest fence."""
        highest = self._highest.get(device_id, (0, ""))[1]
        for row in [row for row in self._executions.values() if row.device_id == device_id]:
            if row.task_id not in self._tasks and row.id != highest and not row.active:
                self._drop_row(row.id)

    def _drop_row(self, id: str) -> None:
        row = self._executions.pop(id)
        siblings = self._rows_of[row.task_id]
        siblings.remove(id)
        if not siblings:
            del self._rows_of[row.task_id]

    def _drop_line(self, cursor: int) -> None:
        _, line = self._lines.pop(cursor)
        if line.seq is not None:
            self._seen.discard((line.execution_id, line.seq))

    async def purge_logs(self, before: datetime, limit: int) -> int:
        old = [cursor for cursor, (arrival, _) in self._lines.items() if arrival < before][:limit]
        for cursor in old:
            task_id = self._lines[cursor][1].task_id
            self._cursors_of[task_id].remove(cursor)
            self._drop_line(cursor)
        return len(old)

    async def purge_remembered(self, before: datetime) -> int:
        old = [key for key, first in self._remembered.items() if first.begun_at < before]
        for key in old:
            del self._remembered[key]
        return len(old)

    async def warnings(self) -> list[str]:
        return []

    # --- reads: tasks

    async def tasks(self, ids: Sequence[str], *, settled: bool = False) -> list[Task | None]:
        return [self._tasks.get(id) for id in ids]

    async def list_tasks(self, where: TaskFilter, limit: int) -> list[Task]:
        return self._sorted(lambda task: passes(task, where), attrgetter("id"), limit, newest_first=True)

    async def find_id(self, tail: str) -> list[str]:
        if len(tail) < 8:
            return []
        return sorted((id for id in self._tasks if id.endswith(tail)), reverse=True)[:5]

    async def history(self, task_id: str) -> list[History]:
        return list(self._history.get(task_id, ()))

    async def scripts(self, ids: Sequence[str]) -> list[Script | None]:
        return [self._scripts.get(id) for id in ids]

    async def due_tasks(self, until: datetime, after: Moment | None, limit: int) -> list[Moment]:
        executable = (task for task in self._tasks.values() if task.status in EXECUTABLE)
        due = sorted((at, task.id) for task in executable if (at := task.next_run_at) is not None and at <= until)
        return [place for place in due if after is None or place > after][:limit]

    async def statuses(self, ids: Sequence[str]) -> dict[str, Status]:
        return {id: self._tasks[id].status for id in ids if id in self._tasks}

    async def tasks_under_way(self, after: str | None, limit: int) -> list[Task]:
        return self._sorted(lambda task: task.status in UNDER_WAY and task.id > (after or ""), attrgetter("id"), limit)

    async def cancels_to_ask(self, limit: int) -> list[Task]:
        def wanted(task: Task) -> bool:
            return task.cancel_requested and task.cancel_requested_at is not None and task.status in UNDER_WAY

        return self._sorted(wanted, attrgetter("cancel_requested_at", "id"), limit)

    def _sorted(
        self, wanted: Callable[[Task], bool], key: Callable[[Task], Any], limit: int, *, newest_first: bool = False
    ) -> list[Task]:
        found = [task for task in self._tasks.values() if wanted(task)]
        return sorted(found, key=key, reverse=newest_first)[:limit]

    async def counts(self) -> dict[str, int]:
        return {**dict.fromkeys(STATUSES, 0), **Counter(task.status for task in self._tasks.values())}

    async def oldest_due(self) -> datetime | None:
        first = await self.due_tasks(self._clock.now(), None, 1)
        return first[0][0] if first else None

    async def stats(self, since: datetime, until: datetime) -> Stats:
        tasks = _newest(self._tasks.values(), since, until)
        rows = _newest(self._executions.values(), since, until)[:NEWEST]
        ended = [
            (task.finished_at.replace(second=0, microsecond=0), task.status, task.error.code if task.error else None, 1)
            for task in tasks
            if task.finished_at
        ]
        durations = [_duration_ms(task) for task in tasks[:NEWEST]]
        return build_stats(ended, [(row.wait_ms, row.push_ms, row.run_ms) for row in rows], durations)

    # --- reads: executions

    async def executions(self, ids: Sequence[str]) -> list[Execution | None]:
        return [self._executions.get(id) for id in ids]

    async def executions_of(self, task_id: str) -> list[Execution]:
        return [self._executions[id] for id in self._rows_of.get(task_id, ())]

    async def open_executions(
        self,
        *,
        devices: Sequence[str] | None = None,
        worker_ids: Sequence[str] | None = None,
        unstamped_before: datetime | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Execution]:
        rows = [
            row
            for row in map(self._executions.__getitem__, self._open)
            if (devices is None or row.device_id in devices)
            and (worker_ids is None or row.worker_id in worker_ids)
            and (unstamped_before is None or (row.sending_at is None and row.created_at < unstamped_before))
            and row.id > (after or "")
        ]
        return sorted(rows, key=attrgetter("id"))[:limit]

    async def overdue_executions(self, now: datetime, limit: int) -> list[Execution]:
        rows = [row for row in map(self._executions.__getitem__, self._open) if row.deadline_at and row.sending_at]
        late = [row for row in rows if row.deadline_at is not None and row.deadline_at < now]
        return sorted(late, key=attrgetter("deadline_at", "id"))[:limit]

    async def closed_executions(self, after: Moment, until: datetime, limit: int) -> list[Moment]:
        ended = sorted((row.finished_at, row.id) for row in self._executions.values() if row.finished_at is not None)
        return [(at, id) for at, id in ended if after < (at, id) and at < until][:limit]

    # --- reads: the rest

    async def logs(self, query: LogQuery) -> list[StoredLine]:
        cursors = self._cursors_of.get(query.task_id, ())
        found = [StoredLine(cursor=cursor, line=self._lines[cursor][1]) for cursor in cursors]
        found = [stored for stored in found if _asked_for(stored, query)]
        if query.tail is not None:
            return found[-query.tail :] if query.tail > 0 else []
        if query.before is not None and query.after is None:
            return found[-query.limit :] if query.limit > 0 else []
        return found[: query.limit]

    async def log_totals(self, task_id: str) -> tuple[int, int]:
        rows = await self.executions_of(task_id)
        return sum(row.log_lines for row in rows), sum(row.log_dropped for row in rows)

    async def quarantined(self, limit: int, before_id: str | None = None) -> list[Quarantined]:
        found = [item for item in self._quarantine.values() if before_id is None or item.id < before_id]
        return sorted(found, key=attrgetter("id"), reverse=True)[:limit]

    async def quarantined_one(self, id: str) -> Quarantined | None:
        return self._quarantine.get(id)

    async def quarantine_count(self) -> int:
        return len(self._quarantine)

    async def tokens(self) -> list[Token]:
        return sorted(self._tokens.values(), key=attrgetter("id"))


def _newest(records: Iterable[Any], since: datetime, until: datetime) -> list[Any]:
    """Those that ended in the span, the newest first."""
    ended = [record for record in records if record.finished_at is not None and since <= record.finished_at < until]
    return sorted(ended, key=attrgetter("finished_at"), reverse=True)


def _duration_ms(task: Task) -> int | None:
    if task.finished_at is None or task.first_started_at is None:
        return None
    return (task.finished_at - task.first_started_at) // timedelta(milliseconds=1)


def _asked_for(stored: StoredLine, query: LogQuery) -> bool:
    return (
        (query.after is None or stored.cursor > query.after)
        and (query.before is None or stored.cursor < query.before)
        and (query.execution_id is None or stored.line.execution_id == query.execution_id)
        and (query.stream is None or stored.line.stream == query.stream)
        and (not query.contains or query.contains in stored.line.content)
    )
