"""The SQLite store alone: every statement walks an index, and many processes on one file have one winner."""

import inspect
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import InsertTask
from scriptdispatch.domain.model import Error, Quarantined, Token
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.sqlite import Database
from scriptdispatch.store.port import LogQuery, Remembered, Store, TaskFilter
from scriptdispatch.store.sqlite import SqliteStore
from tests.contract.store_racers import claim, insert_rows, race
from tests.contract.store_values import (
    NOW,
    HeldClock,
    finish,
    fresh_id,
    get_task,
    insert_task,
    make_line,
    make_row,
    make_script,
    make_task,
    note,
    start,
)
from tests.contract.test_store_reads import FILTERS

# Few rows, ever; or a list that the caller gave; or a constant.
SMALL = ("tally", "token", "meta", "j VIRTUAL TABLE", "json_each VIRTUAL TABLE", "CONSTANT ROW", "(subquery")


class WatchedDatabase(Database):
    """Notes every statement with its values."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: dict[str, Any] = {}

    async def read(self, job: Callable[[Any], Any], **rest: Any) -> Any:
        return await super().read(lambda db: job(self._watch(db)), **rest)

    async def write(self, job: Callable[[Any], Any], **rest: Any) -> Any:
        return await super().write(lambda db: job(self._watch(db)), **rest)

    def _watch(self, db: Any) -> Any:
        def note(cursor: Any, sql: str, values: Any) -> bool:
            self.seen.setdefault(sql, values)
            return True

        db.exec_trace = note
        return db


@pytest.fixture
def database(tmp_path: Path) -> WatchedDatabase:
    return WatchedDatabase(tmp_path / "store.db")


@pytest.fixture
async def store(database: WatchedDatabase) -> AsyncIterator[SqliteStore]:
    made = SqliteStore(database, HeldClock())
    await made.open()
    yield made
    await made.close()


def plan(db: apsw.Connection, sql: str, values: Any) -> list[str]:
    return [str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)]


async def test_a_new_file_is_its_owners_alone_with_all_that_stands_beside_it(
    store: SqliteStore, database: WatchedDatabase
) -> None:
    await insert_task(store)
    found = {path.name: path.stat().st_mode & 0o777 for path in database.path.parent.glob("store.db*") if path.is_file()}
    assert len(found) >= 3
    assert set(found.values()) == {0o600}, found


async def call_everything(store: SqliteStore) -> set[str]:
    """Every method of the port, so that every statement is seen; answers their names."""
    called: set[str] = set()

    def via(name: str) -> Any:
        called.add(name)
        return getattr(store, name)

    task = await insert_task(store, script=make_script(), labels={"a": "b"}, dedupe_key="k", device_id="dev-1")
    task, row = await start(store, task)
    assert await via("warnings")() == []
    await via("commit")([lifecycle.stamp(row, "w", NOW, 1)], term=1)
    await via("commit")([lifecycle.request_cancel(task, "me", "", NOW)])
    insert = InsertTask(task=make_task(), script=None, history=note("created"))
    await via("confirm")([insert], await via("commit")([insert], soon=True))
    await via("append_logs")([make_line(row, n) for n in range(3)], max_per_execution=2)
    await via("append_and_close")([make_line(row, n) for n in range(2, 9)], [], max_per_execution=5)
    await via("quarantine")([Quarantined(id="q", at=NOW, reason="r", detail="d", body=b"")])
    await via("unquarantine")("q")
    await via("remember")("me", "k", Remembered(seed="s", request_hash="h", begun_at=NOW))
    await via("remember")("me", "k", Remembered(seed="s", request_hash="h", begun_at=NOW))
    await via("take_over")("me", "k", NOW, NOW)
    await via("answer")("me", "k", 200, b"")
    await via("forget")("me", "k")
    await via("save_token")(Token(id="t", name="n", hash="h", scopes=[], created_at=NOW))
    for where in (*FILTERS.values(), TaskFilter(ids=(task.id,)), TaskFilter(ids=(task.id,), labels=(("a", "b"),))):
        await via("list_tasks")(where, 10)
        await via("list_tasks")(
            TaskFilter(**{**{n: getattr(where, n) for n in where.__struct_fields__}, "before_id": "z"}), 5
        )
    for asked in ({}, {"after": 1}, {"before": 9}, {"tail": 5}, {"after": 1, "before": 9, "execution_id": "e"},
                  {"stream": "stdout", "contains": "x"}):  # fmt: skip
        await via("logs")(LogQuery(task_id=task.id, **asked))  # type: ignore[arg-type]
    for narrowed in ({}, {"devices": ["dev-1"]}, {"worker_ids": ["w"]}, {"unstamped_before": NOW}, {"after": "a"},
                     {"devices": ["d"], "worker_ids": ["w"], "unstamped_before": NOW, "after": "a"}):  # fmt: skip
        await via("open_executions")(**narrowed)
    await via("tasks")([task.id])
    await via("find_id")(task.id[-8:])
    await via("history")(task.id)
    await via("scripts")(["s"])
    await via("due_tasks")(NOW, None, 5)
    await via("statuses")([task.id])
    await via("due_tasks")(NOW, (NOW, "a"), 5)
    await via("tasks_under_way")(None, 5)
    await via("cancels_to_ask")(5)
    await via("counts")()
    await via("oldest_due")()
    await via("stats")(NOW, NOW)
    await via("executions")([row.id])
    await via("executions_of")(task.id)
    await via("overdue_executions")(NOW, 5)
    await via("closed_executions")((NOW, "a"), NOW + timedelta(seconds=1), 5)
    await via("log_totals")(task.id)
    await via("quarantined")(5)
    await via("quarantined")(5, "a")
    await via("quarantined_one")("q")
    await via("quarantine_count")()
    await via("tokens")()
    await via("ping")()
    await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
    await finish(store, task, NOW)
    await via("purge")(NOW + timedelta(days=1), 5)
    await via("purge_logs")(NOW, 5)
    await via("purge_remembered")(NOW)
    return called


async def test_no_statement_walks_a_whole_table(store: SqliteStore, database: WatchedDatabase) -> None:
    called = await call_everything(store)
    port = {name for name, _ in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")}
    assert port - called == {"open", "close"}

    walked = []
    db = apsw.Connection(str(database.path))
    for sql, values in database.seen.items():
        if sql.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            scans = [line for line in plan(db, sql, values) if line.startswith("SCAN")]
            walked += [(line, sql) for line in scans if not line.removeprefix("SCAN ").startswith(SMALL)]
    db.close()
    assert walked == []
    assert len(database.seen) > 60


async def test_pages_of_tasks_come_sorted_from_their_index(store: SqliteStore, database: WatchedDatabase) -> None:
    """A sort would read all tasks with that status before it shows the first fifty."""
    for where in FILTERS.values():
        await store.list_tasks(where, 50)
    await store.due_tasks(NOW, None, 5)
    await store.overdue_executions(NOW, 5)
    await store.open_executions()
    await store.logs(LogQuery(task_id="t", tail=5))
    db = apsw.Connection(str(database.path))
    sorted_late = [
        sql
        for sql, values in database.seen.items()
        if sql.startswith("SELECT") and any("TEMP B-TREE" in line for line in plan(db, sql, values))
    ]
    db.close()
    assert sorted_late == []


async def test_a_store_opened_again_has_everything(tmp_path: Path) -> None:
    first = SqliteStore(Database(tmp_path / "store.db"), HeldClock())
    await first.open()
    task = await insert_task(first, labels={"a": "b"}, error=Error(code="TIMEOUT", message="late"))
    await first.close()
    again = SqliteStore(Database(tmp_path / "store.db"), HeldClock())
    await again.open()
    assert await get_task(again, task.id) == task
    assert (await again.counts())["waiting"] == 1
    await again.close()


async def test_a_file_that_is_no_database_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not a database" * 1000)
    store = SqliteStore(Database(tmp_path / "store.db"), HeldClock())
    with pytest.raises(StoreUnavailable, match="not an SQLite database"):
        await store.open()
    await store.close()


# --- many processes


def intact(path: Path) -> bool:
    db = apsw.Connection(str(path))
    try:
        return db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        db.close()


@pytest.mark.slow
async def test_of_many_processes_racing_for_one_change_exactly_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(Database(path), HeldClock())
    await store.open()
    tasks = [await insert_task(store) for _ in range(40)]
    ids = [task.id for task in tasks]

    answers = race(path, 4, claim, ids)

    assert sorted(id for won in answers for id in won) == sorted(ids)  # each once
    recorded = {task.id: task.worker_id for task in await store.tasks(ids) if task}
    assert recorded == {id: f"w{me}" for me, won in enumerate(answers) for id in won}
    await store.close()
    assert intact(path)


@pytest.mark.slow
async def test_of_many_processes_inserting_for_one_device_exactly_one_is_active(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(Database(path), HeldClock())
    await store.open()
    devices = [f"dev-{i}" for i in range(20)]
    rows = [[make_row(await insert_task(store, device_id=device)) for device in devices] for _ in range(4)]

    answers = race(path, 4, insert_rows, rows)

    for i, device in enumerate(devices):
        (winner,) = [id for id, won, _ in (answer[i] for answer in answers) if won]
        assert {holder for _, won, holder in (answer[i] for answer in answers) if not won} == {winner}
        (active,) = await store.open_executions(devices=[device])
        assert (active.id, active.fencing_token) == (winner, 1)
    await store.close()
    assert intact(path)


@pytest.mark.slow
async def test_many_processes_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    assert race(path, 6, claim, [fresh_id()]) == [[]] * 6
    assert intact(path)
