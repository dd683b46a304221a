"""A file of an older version opens: what later versions added is added, with the defaults of its fields."""

from pathlib import Path

import apsw

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain import lifecycle
from scriptdispatch.sqlite import Database
from scriptdispatch.store.sqlite import SqliteStore
from tests.contract.store_values import make_task


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore(Database(path), SystemClock())
    await store.open()
    return store


async def test_columns_that_a_later_version_added_are_added_with_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    task = make_task()
    store = await opened(path)
    await store.commit([lifecycle.create(task, None)])
    await store.close()
    with apsw.Connection(str(path)) as db:
        for column in ("cancel_answer", "retry_count", "labels"):
            db.execute(f"ALTER TABLE script_task DROP COLUMN {column}")
    store = await opened(path)
    [found] = await store.tasks([task.id])
    await store.close()
    assert found is not None
    assert (found.cancel_answer, found.retry_count, found.labels) == (None, 0, {})


async def test_a_file_is_opened_again_without_a_change(tmp_path: Path) -> None:
    for _ in range(2):
        store = await opened(tmp_path / "same.db")
        await store.close()
    with apsw.Connection(str(tmp_path / "same.db")) as db:
        assert db.execute("PRAGMA integrity_check").get == "ok"
