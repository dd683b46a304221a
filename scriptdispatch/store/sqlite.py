"""The store in one SQLite file, safe with many processes. Writes are jobs of the file's group commit, always durable.

What is written is in `sqlite_writes`, what is asked in `sqlite_reads`, the tables are in `sqlite_schema`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from scriptdispatch import crashpoints
from scriptdispatch.clock import Clock
from scriptdispatch.domain.changes import Applied, Change, ChangeExecution, InsertTask
from scriptdispatch.domain.model import Execution, History, LogLine, Quarantined, Script, Status, StoredLine, Task, Token
from scriptdispatch.sqlite import Connection, Database, version
from scriptdispatch.store import sqlite_reads as reads
from scriptdispatch.store import sqlite_schema as schema
from scriptdispatch.store import sqlite_writes as writes
from scriptdispatch.store.port import LogQuery, Moment, Remembered, Stats, TaskFilter
from scriptdispatch.store.sqlite_rows import (
    EXECUTION,
    HISTORY,
    LOG,
    QUARANTINE,
    REMEMBERED,
    SCRIPT,
    TASK,
    TOKEN,
    Table,
    fetch,
    from_ms,
    to_json,
    to_ms,
)
from scriptdispatch.store.sqlite_schema import QUARANTINE_TALLY

R = TypeVar("R", bound=msgspec.Struct)
LINES_PER_DELETE: Final = 2_000  # in one transaction: others wait for the write lock meanwhile

_QUARANTINE: Final = f"INSERT INTO quarantine ({QUARANTINE.select}) VALUES ({QUARANTINE.places}) ON CONFLICT DO NOTHING"
_REMEMBER: Final = (
    f"INSERT INTO idempotency (owner, key, {REMEMBERED.select}) VALUES (?, ?, {REMEMBERED.places}) ON CONFLICT DO NOTHING"
)
_RECALL: Final = f"SELECT {REMEMBERED.select} FROM idempotency WHERE owner = ? AND key = ?"
_TAKE_OVER: Final = "UPDATE idempotency SET begun_at = ? WHERE owner = ? AND key = ? AND begun_at = ? AND status IS NULL"
_ANSWER: Final = "UPDATE idempotency SET status = ?, answer = ? WHERE owner = ? AND key = ?"
_FORGET: Final = "DELETE FROM idempotency WHERE owner = ? AND key = ?"
_PURGE_REMEMBERED: Final = "DELETE FROM idempotency INDEXED BY idempotency_age WHERE begun_at < ?"
_SAVE_TOKEN: Final = f"INSERT OR REPLACE INTO token ({TOKEN.select}) VALUES ({TOKEN.places})"


class SqliteStore:
    """See `port.Store`. Shares its `Database` with queue, locks and stream; the last to close ends it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def open(self) -> None:
        await self._database.open(())
        await self._database.write(schema.create)

    async def close(self) -> None:
        await self._database.close()

    async def ping(self) -> str:
        await self._database.read(lambda db: fetch(db, "SELECT value FROM meta WHERE name = 'schema'"))
        return f"SQLite {version()}, {self._database.path.name}"

    # --- writes

    async def commit(self, changes: Sequence[Change], *, term: int | None = None, soon: bool = False) -> list[Applied]:
        if not changes and term is None:
            return []
        steps = [writes.prepare(change) for change in changes]

        def job(db: Connection) -> list[Applied]:
            if term is not None:
                writes.check_term(db, term)
            return [step(db) for step in steps]

        return await self._database.write(job)

    async def confirm(self, inserts: Sequence[InsertTask], outcomes: Sequence[Applied]) -> None:
        """They are durable already."""

    async def append_logs(
        self, lines: Sequence[LogLine], *, max_per_execution: int, there: Mapping[str, int] | None = None
    ) -> int:
        if not lines:
            return 0
        now = to_ms(self._clock.now())
        rows = [[now, *LOG.row(line)] for line in lines]
        return await self._database.write(lambda db: writes.append_lines(db, lines, rows, max_per_execution))

    async def append_and_close(
        self,
        lines: Sequence[LogLine],
        closing: Sequence[ChangeExecution],
        *,
        max_per_execution: int,
        there: Mapping[str, int] | None = None,
    ) -> list[Applied]:
        async def append() -> None:
            if not lines:
                return
            await self.append_logs(lines, max_per_execution=max_per_execution, there=there)
            await crashpoints.reach("closer.after_C1", crashpoints.subjects(line.task_id for line in lines))

        outcomes, _ = await asyncio.gather(self.commit(closing), append())  # asked for together they share a transaction
        return outcomes

    async def quarantine(self, items: Sequence[Quarantined]) -> None:
        rows = [QUARANTINE.row(item) for item in items]
        await self._database.write(lambda db: db.executemany(_QUARANTINE, rows) and None)

    async def unquarantine(self, id: str) -> bool:
        return await self._change("DELETE FROM quarantine WHERE id = ?", id) > 0

    async def remember(self, owner: str, key: str, request: Remembered) -> Remembered | None:
        row = [owner, key, *REMEMBERED.row(request)]

        def job(db: Connection) -> Remembered | None:
            db.execute(_REMEMBER, row)
            if db.changes():
                return None
            return REMEMBERED.from_row(fetch(db, _RECALL, (owner, key))[0])

        return await self._database.write(job)

    async def take_over(self, owner: str, key: str, begun_at: datetime, now: datetime) -> bool:
        return await self._change(_TAKE_OVER, to_ms(now), owner, key, to_ms(begun_at)) > 0

    async def answer(self, owner: str, key: str, status: int, body: bytes) -> None:
        await self._change(_ANSWER, status, body, owner, key)

    async def forget(self, owner: str, key: str) -> None:
        await self._change(_FORGET, owner, key)

    async def save_token(self, token: Token) -> None:
        await self._change(_SAVE_TOKEN, *TOKEN.row(token))

    async def purge(self, finished_before: datetime, limit: int) -> int:
        """Lines first and in pieces, each its own transaction. Whoever dies between leaves a task that is found again."""
        removed = 0
        for task_id in await self._database.read(lambda db: writes.purgeable(db, finished_before, limit)):
            await self._delete_lines_of(task_id)
            removed += await self._delete_task(task_id, finished_before)
        return removed

    async def _delete_lines_of(self, task_id: str) -> None:
        while await self._database.write(lambda db: writes.delete_lines(db, task_id, LINES_PER_DELETE)):
            pass

    async def _delete_task(self, task_id: str, before: datetime) -> int:
        return await self._database.write(lambda db: writes.delete_task(db, task_id, before))

    async def purge_logs(self, before: datetime, limit: int) -> int:
        removed = 0
        while removed < limit:
            piece = min(LINES_PER_DELETE, limit - removed)
            gone = await self._delete_old_lines(before, piece)
            removed += gone
            if gone < piece:
                break
        return removed

    async def _delete_old_lines(self, before: datetime, piece: int) -> int:
        return await self._database.write(lambda db: writes.delete_old_lines(db, before, piece))

    async def purge_remembered(self, before: datetime) -> int:
        return await self._change(_PURGE_REMEMBERED, to_ms(before))

    async def warnings(self) -> list[str]:
        return []

    # --- reads: tasks

    async def tasks(self, ids: Sequence[str], *, settled: bool = False) -> list[Task | None]:
        return await self._by_ids(TASK, reads.TASKS_BY_ID, ids)

    async def list_tasks(self, where: TaskFilter, limit: int) -> list[Task]:
        queries = reads.task_queries(where, limit)
        return await self._database.read(lambda db: reads.list_tasks(db, queries, limit))

    async def find_id(self, tail: str) -> list[str]:
        if len(tail) < 8:
            return []
        return [id for (id,) in await self._rows(reads.FIND_ID, tail[-8:], len(tail), tail)]

    async def history(self, task_id: str) -> list[History]:
        return [HISTORY.from_row(row) for row in await self._rows(reads.HISTORY_OF, task_id)]

    async def scripts(self, ids: Sequence[str]) -> list[Script | None]:
        return await self._by_ids(SCRIPT, reads.SCRIPTS_BY_ID, ids)

    async def due_tasks(self, until: datetime, after: Moment | None, limit: int) -> list[Moment]:
        at, id = (to_ms(after[0]), after[1]) if after else (-(1 << 62), "")
        return [(from_ms(due), task) for due, task in await self._rows(reads.DUE, to_ms(until), at, id, limit)]

    async def statuses(self, ids: Sequence[str]) -> dict[str, Status]:
        return dict(await self._rows(reads.STATUSES_BY_ID, to_json(list(ids)))) if ids else {}

    async def tasks_under_way(self, after: str | None, limit: int) -> list[Task]:
        return await self._database.read(lambda db: reads.under_way(db, after or "", limit))

    async def cancels_to_ask(self, limit: int) -> list[Task]:
        return await self._many(TASK, reads.TO_CANCEL, limit)

    async def counts(self) -> dict[str, int]:
        return {name: n for name, n in await self._rows(reads.COUNTS) if name != QUARANTINE_TALLY}

    async def oldest_due(self) -> datetime | None:
        rows = await self._rows(reads.OLDEST_DUE, to_ms(self._clock.now()))
        return from_ms(rows[0][0]) if rows else None

    async def stats(self, since: datetime, until: datetime) -> Stats:
        return await self._database.read(lambda db: reads.stats(db, since, until))

    # --- reads: executions

    async def executions(self, ids: Sequence[str]) -> list[Execution | None]:
        return await self._by_ids(EXECUTION, reads.EXECUTIONS_BY_ID, ids)

    async def executions_of(self, task_id: str) -> list[Execution]:
        return await self._many(EXECUTION, reads.EXECUTIONS_OF, task_id)

    async def open_executions(
        self,
        *,
        devices: Sequence[str] | None = None,
        worker_ids: Sequence[str] | None = None,
        unstamped_before: datetime | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Execution]:
        sql, values = reads.open_query(devices, worker_ids, unstamped_before, after, limit)
        return await self._many(EXECUTION, sql, *values)

    async def overdue_executions(self, now: datetime, limit: int) -> list[Execution]:
        return await self._many(EXECUTION, reads.OVERDUE, to_ms(now), limit)

    async def closed_executions(self, after: Moment, until: datetime, limit: int) -> list[Moment]:
        rows = await self._rows(reads.CLOSED, to_ms(after[0]), after[1], to_ms(until), limit)
        return [(from_ms(at), id) for at, id in rows]

    # --- reads: the rest

    async def logs(self, query: LogQuery) -> list[StoredLine]:
        return await self._database.read(lambda db: reads.logs(db, query))

    async def log_totals(self, task_id: str) -> tuple[int, int]:
        ((stored, dropped),) = await self._rows(reads.LOG_TOTALS, task_id)
        return stored, dropped

    async def quarantined(self, limit: int, before_id: str | None = None) -> list[Quarantined]:
        return await self._many(QUARANTINE, reads.QUARANTINED, before_id or reads.LAST, limit)

    async def quarantined_one(self, id: str) -> Quarantined | None:
        found = await self._many(QUARANTINE, reads.QUARANTINED_ONE, id)
        return found[0] if found else None

    async def quarantine_count(self) -> int:
        count: int = dict(await self._rows(reads.COUNTS))[QUARANTINE_TALLY]
        return count

    async def tokens(self) -> list[Token]:
        return await self._many(TOKEN, f"SELECT {TOKEN.select} FROM token ORDER BY id")

    # --- how all of them go about it

    async def _change(self, sql: str, *values: Any) -> int:
        def job(db: Connection) -> int:
            db.execute(sql, values)
            return db.changes()

        return await self._database.write(job)

    async def _rows(self, sql: str, *values: Any) -> list[Any]:
        return await self._database.read(lambda db: fetch(db, sql, values))

    async def _many(self, table: Table[R], sql: str, *values: Any) -> list[R]:
        return await self._database.read(lambda db: [table.from_row(row) for row in fetch(db, sql, values)])

    async def _by_ids(self, table: Table[R], sql: str, ids: Sequence[str]) -> list[R | None]:
        if not ids:
            return []
        found = {row[0]: table.from_row(row) for row in await self._rows(sql, to_json(list(ids)))}
        return [found.get(id) for id in ids]
