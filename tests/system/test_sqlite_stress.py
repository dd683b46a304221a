"""F55 and F56: many processes read and then write the same rows of one SQLite file, and some are killed meanwhile.

Default: until 10,000 changes are made. SCRIPTDISPATCH_TEST_STRESS_S=<seconds>: for that long.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import apsw
import pytest

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.changes import ChangeTask, InsertTask
from scriptdispatch.domain.model import History, Task
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.ids import new_id
from scriptdispatch.sqlite import Database
from scriptdispatch.store.sqlite import SqliteStore

pytestmark = [pytest.mark.system, pytest.mark.slow]

PROCESSES, CALLERS, ROWS, KILLS = 3, 4, 5, 5
CHANGES = 10_000
LIMIT_S = 20.0  # on a slow disk, fewer changes
LONGER_S = float(os.environ.get("SCRIPTDISPATCH_TEST_STRESS_S", "0"))
_context = multiprocessing.get_context("spawn")


def make_task() -> Task:
    now, id = datetime.now(UTC).replace(microsecond=0), new_id()
    return Task(id=id, name="counter", lane_key=id, next_run_at=now, created_at=now, updated_at=now)


async def open_store(path: Path, busy_s: float = 5.0) -> SqliteStore:
    store = SqliteStore(Database(path, busy_s=busy_s), SystemClock())
    await store.open()
    return store


async def count_up(store: SqliteStore, ids: list[str], stop: Path, ledger: int) -> None:
    """Reads a row and writes its number plus one, if it is still that number. Each win is noted at once, in a file that
    outlives a kill."""
    turn = 0
    while not stop.exists():
        row = turn % len(ids)
        turn += 1
        (task,) = await store.tasks([ids[row]])
        assert task is not None
        n = task.retry_count
        change = ChangeTask(task_id=task.id, expect={"retry_count": n}, set={"retry_count": n + 1})
        (applied,) = await store.commit([change])
        if applied.won:
            os.write(ledger, f"{row} {n}\n".encode())


def counter_process(path: Path, ids: list[str], stop: Path, ledger: Path) -> None:
    """Runs in a child. Whatever the store raises ends it with a code other than 0."""

    async def run() -> None:
        store = await open_store(path)
        file = os.open(ledger, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        await asyncio.gather(*(count_up(store, ids, stop, file) for _ in range(CALLERS)))
        await store.close()

    asyncio.run(run())


async def enough(store: SqliteStore, ids: list[str], passed_s: float) -> bool:
    if LONGER_S:
        return passed_s >= LONGER_S
    return passed_s >= LIMIT_S or sum(task.retry_count for task in await store.tasks(ids) if task) >= CHANGES


def wait_for(what: str, condition: Callable[[], Any], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {within_s} s"
        time.sleep(0.005)


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def integrity(path: Path) -> list[Any]:
    db = apsw.Connection(str(path))
    try:
        return db.execute("PRAGMA integrity_check").fetchall()
    finally:
        db.close()


@pytest.mark.timeout(120 + LONGER_S)
async def test_counts_are_exact_when_processes_race_for_the_same_rows_and_some_are_killed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await open_store(path)
    tasks = [make_task() for _ in range(ROWS)]
    note = History(at=tasks[0].created_at, kind="INFO", actor="test", reason="created")
    await store.commit([InsertTask(task=task, script=None, history=note) for task in tasks])
    ids = [task.id for task in tasks]
    stop, began = tmp_path / "stop", time.monotonic()
    started: list[tuple[BaseProcess, Path]] = []

    def begin() -> tuple[BaseProcess, Path]:
        ledger = tmp_path / f"ledger.{len(started)}"
        child = _context.Process(target=counter_process, args=(path, ids, stop, ledger), daemon=True)
        child.start()
        started.append((child, ledger))
        return child, ledger

    for _ in range(PROCESSES):
        begin()
    victim, ledger = begin()
    for kill in range(KILLS):
        wait_for("the victim makes changes", lambda ledger=ledger: size(ledger) > 400)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        await asyncio.to_thread(victim.join, 10)
        assert victim.exitcode == -signal.SIGKILL, "it had ended before it was killed: the fault did not fire"
        if kill < KILLS - 1:
            victim, ledger = begin()
    while not await enough(store, ids, time.monotonic() - began):
        await asyncio.sleep(0.1)
    stop.touch()
    survivors = [child for child, _ in started if child.exitcode != -signal.SIGKILL]
    for child in survivors:
        await asyncio.to_thread(child.join, 30)

    # Nothing surfaced: no Busy, no BUSY_SNAPSHOT, nothing else.
    assert [child.exitcode for child in survivors] == [0] * PROCESSES
    noted = Counter(line for _, ledger in started if ledger.exists() for line in ledger.read_text().splitlines())
    assert [line for line, times in noted.items() if times > 1] == [], "one number was won twice"
    counted = [task.retry_count for task in await store.tasks(ids) if task]
    missing = sum(counted) - len(noted)
    assert 0 <= missing <= KILLS * CALLERS, "a win that nobody noted can only be one that a kill cut off"
    for row, n in enumerate(counted):
        assert max(int(line.split()[1]) for line in noted if line.startswith(f"{row} ")) <= n - 1
    await store.close()
    assert integrity(path) == [("ok",)]


# --- a writer that dies or stops inside its transaction


def stuck_writer(path: Path, mark: Path) -> None:
    """Runs in a child: writes, and never ends the transaction."""

    def job(db: Any) -> None:
        db.execute("UPDATE script_task SET step = 'half done'")
        mark.touch()
        time.sleep(600)

    async def run() -> None:
        database = Database(path)
        await database.open(())
        await database.write(job)

    asyncio.run(run())


async def stuck(tmp_path: Path, busy_s: float) -> tuple[SqliteStore, Task, BaseProcess]:
    """A store, a task, and a process that holds the write lock."""
    path, mark = tmp_path / "store.db", tmp_path / "mark"
    store = await open_store(path, busy_s)
    task = make_task()
    note = History(at=task.created_at, kind="INFO", actor="test", reason="created")
    await store.commit([InsertTask(task=task, script=None, history=note)])
    child = _context.Process(target=stuck_writer, args=(path, mark), daemon=True)
    child.start()
    wait_for("the child is inside its transaction", mark.exists)
    return store, task, child


async def test_a_writer_killed_inside_its_transaction_leaves_nothing_and_the_next_write_goes_on(tmp_path: Path) -> None:
    store, task, child = await stuck(tmp_path, busy_s=20.0)
    write = asyncio.ensure_future(store.commit([ChangeTask(task_id=task.id, expect={"step": None}, set={"step": "whole"})]))
    done, _ = await asyncio.wait([write], timeout=0.3)
    assert not done, "the lock was not held: the fault did not fire"
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    killed_at = time.monotonic()

    (applied,) = await asyncio.wait_for(write, 10)

    assert applied.won
    assert time.monotonic() - killed_at < 1.0
    assert [found and found.step for found in await store.tasks([task.id])] == ["whole"]
    await asyncio.to_thread(child.join, 10)
    await store.close()
    assert integrity(tmp_path / "store.db") == [("ok",)]


async def test_a_writer_stopped_inside_its_transaction_costs_others_a_bounded_wait_and_reads_go_on(tmp_path: Path) -> None:
    store, task, child = await stuck(tmp_path, busy_s=0.5)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    change = ChangeTask(task_id=task.id, expect={}, set={"step": "whole"})
    began = time.monotonic()

    with pytest.raises(StoreUnavailable, match="write lock"):
        await store.commit([change])

    assert 0.4 < time.monotonic() - began < 5
    assert [found and found.step for found in await store.tasks([task.id])] == [None]
    os.kill(child.pid, signal.SIGKILL)  # as the master does with a child that is silent
    await asyncio.to_thread(child.join, 10)
    assert (await store.commit([change]))[0].won
    await store.close()
