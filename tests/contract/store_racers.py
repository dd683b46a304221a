"""Child processes that race on one SQLite file. Each opens the store itself, waits for the others, then does its part."""

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.changes import ChangeTask, InsertExecution
from scriptdispatch.domain.model import Execution
from scriptdispatch.sqlite import Database
from scriptdispatch.store.sqlite import SqliteStore

PATIENCE_S = 60
_context = multiprocessing.get_context("spawn")


async def claim(store: SqliteStore, me: int, task_ids: Sequence[str]) -> list[str]:
    """Runs in a child: one compare-and-set per task; answers which it won."""
    won = []
    for id in task_ids:
        (applied,) = await store.commit([ChangeTask(task_id=id, expect={"worker_id": None}, set={"worker_id": f"w{me}"})])
        if applied.won:
            won.append(id)
    return won


async def insert_rows(
    store: SqliteStore, me: int, rows: Sequence[Sequence[Execution]]
) -> list[tuple[str, bool, str | None]]:
    """Runs in a child: W3 for its own row of each device; answers (row, won, holder)."""
    outcomes = []
    for row in rows[me]:
        (applied,) = await store.commit([InsertExecution(execution=row)])
        outcomes.append((row.id, applied.won, applied.holder))
    return outcomes


def _child(path: Path, me: int, barrier: Any, answers: Any, part: Callable[..., Any], argument: Any) -> None:
    async def run() -> Any:
        store = SqliteStore(Database(path), SystemClock())
        await asyncio.to_thread(barrier.wait, PATIENCE_S)  # also opening is a race: the first makes the tables
        await store.open()
        try:
            await asyncio.to_thread(barrier.wait, PATIENCE_S)
            return await part(store, me, argument)
        finally:
            await store.close()

    try:
        answers.put((me, asyncio.run(run())))
    except Exception as error:
        barrier.abort()
        answers.put((me, f"{type(error).__name__}: {error}"))


def race(path: Path, count: int, part: Callable[..., Any], argument: Any) -> list[Any]:
    """What each of `count` processes answered."""
    barrier, answers = _context.Barrier(count), _context.Queue()
    children = [
        _context.Process(target=_child, args=(path, me, barrier, answers, part, argument), daemon=True)
        for me in range(count)
    ]
    for child in children:
        child.start()
    try:
        found = dict(answers.get(timeout=PATIENCE_S) for _ in children)
    finally:
        for child in children:
            child.join(10)
            child.kill()
    failures = [answer for answer in found.values() if isinstance(answer, str)]
    assert not failures, failures
    return [found[me] for me in range(count)]
