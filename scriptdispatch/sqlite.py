"""One SQLite file shared by many processes: one writer thread per process, group commit, prepared statements.

The only file that knows `apsw`. A job is a function of a connection; jobs that arrive while a transaction is under way
go into the next one together, so a commit (and its fsync) serves all of them. Flushed at once when idle, never on a
timer. Jobs must not call back into this class, and hold no transaction of their own.

Durable jobs are on the disk when `write` returns (`synchronous=FULL`); the others survive a crash of any process, and
may be lost with the power (queue and locks, which the store brings back).
"""

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw

from scriptdispatch import crashpoints
from scriptdispatch.errors import SettingsError, StoreUnavailable, Unavailable

T = TypeVar("T")
Connection = apsw.Connection
ConstraintError = apsw.ConstraintError
Job = Callable[[Connection], Any]

OLDEST_SAFE = 3051003  # before, a WAL file written by several processes could become corrupt
BATCH = 500
MAX_PENDING = 20_000
_MESSAGES: dict[type[Exception], str] = {
    apsw.BusyError: "another process has held the database's write lock for too long; it is probably stopped",
    apsw.LockedError: "the database is locked by another process",
    apsw.FullError: "the disk is full: free some space, then it goes on by itself",
    apsw.IOError: "the disk cannot be read or written",
    apsw.ReadOnlyError: "the database file is read-only: check its owner and mode",
    apsw.CantOpenError: "the database file cannot be opened: check that its folder exists and may be written",
    apsw.CorruptError: "the database file is damaged: restore it from a backup",
    apsw.NotADBError: "this file is not an SQLite database",
    apsw.NoMemError: "out of memory",
}


class _Work:
    __slots__ = ("durable", "future", "job", "loop", "wrap")

    def __init__(self, job: Job, durable: bool, wrap: type[Unavailable], loop: asyncio.AbstractEventLoop) -> None:
        self.job, self.durable, self.wrap, self.loop = job, durable, wrap, loop
        self.future: asyncio.Future[Any] = loop.create_future()


_Line = queue.SimpleQueue[_Work | None]


class Database:
    """All access of this process to one file. Open it in the process that uses it: it is not fork-safe."""

    def __init__(self, path: Path, *, busy_s: float = 5.0) -> None:
        self.path = path
        self._busy_s = busy_s
        self._users = 0
        self._pending = 0
        self._writes: _Line = queue.SimpleQueue()
        self._reads: _Line = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def open(self, schema: Sequence[str]) -> None:
        """Starts the threads at the first call, then applies `schema` (statements that may be repeated)."""
        check_library()
        self._users += 1
        if not self._threads:
            for name, target in (("sqlite-writer", self._write_loop), ("sqlite-reader", self._read_loop)):
                thread = threading.Thread(target=target, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        await self.write(lambda db: [db.execute(statement) for statement in schema] and None)

    async def close(self) -> None:
        """Ends the threads when the last user closes; pending jobs are carried out first."""
        self._users -= 1
        if self._users > 0 or not self._threads:
            return
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        self._threads.clear()

    async def write(
        self, job: Callable[[Connection], T], *, durable: bool = True, wrap: type[Unavailable] = StoreUnavailable
    ) -> T:
        """Runs the job in a write transaction, together with others. It may run twice if a neighbour fails, so it must
        have no effect but on the database. Its exceptions reach the caller and undo its own writes only."""
        return await self._submit(self._writes, job, durable, wrap)  # type: ignore[no-any-return]

    async def read(self, job: Callable[[Connection], T], *, wrap: type[Unavailable] = StoreUnavailable) -> T:
        """Runs the job on a snapshot that holds all writes this process has seen committed."""
        return await self._submit(self._reads, job, False, wrap)  # type: ignore[no-any-return]

    async def _submit(
        self, line: "queue.SimpleQueue[_Work | None]", job: Job, durable: bool, wrap: type[Unavailable]
    ) -> Any:
        if self._pending >= MAX_PENDING:
            raise wrap(f"{MAX_PENDING} requests wait for the database already; try again later")
        work = _Work(job, durable, wrap, asyncio.get_running_loop())
        self._pending += 1
        line.put(work)
        try:
            return await work.future
        finally:
            self._pending -= 1

    # --- in the threads

    def _connect(self, synchronous: str) -> Connection:
        try:
            _for_its_owner(self.path)
            db = apsw.Connection(str(self.path), statementcachesize=300)
        except apsw.CantOpenError as error:
            raise apsw.CantOpenError(f"{self.path}: {error}") from None  # a person must know which file
        db.set_busy_handler(_patience(self._busy_s))
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.execute("PRAGMA temp_store=MEMORY")
        db.execute("PRAGMA cache_size=-32000")
        db.execute("PRAGMA mmap_size=268435456")
        db.execute("PRAGMA wal_autocheckpoint=4000")
        return db

    def _write_loop(self) -> None:
        connections: dict[bool, Connection] = {}
        while batch := _drain(self._writes):
            durable = any(work.durable for work in batch)
            try:
                if durable not in connections:
                    connections[durable] = self._connect("FULL" if durable else "NORMAL")
                answers = _transact(connections[durable], batch)
            except Exception as error:
                answers = [(work, error) for work in batch]
            _deliver(answers)
        for db in connections.values():
            db.close()

    def _read_loop(self) -> None:
        db: Connection | None = None
        while batch := _drain(self._reads):
            answers: list[tuple[_Work, Any]] = []
            for work in batch:
                try:
                    db = db or self._connect("NORMAL")
                    answers.append((work, work.job(db)))
                except Exception as error:
                    answers.append((work, error))
            _deliver(answers)
        if db is not None:
            db.close()


def check_library() -> None:
    if (
        apsw.sqlitelibversion_number() < OLDEST_SAFE
        if hasattr(apsw, "sqlitelibversion_number")
        else _version() < OLDEST_SAFE
    ):
        raise SettingsError(
            f"SQLite {apsw.sqlite_lib_version()} can damage a file that several processes write: "
            "install apsw 3.51.3 or newer (pip install -U apsw)"
        )


def version() -> str:
    return apsw.sqlite_lib_version()


def _for_its_owner(path: Path) -> None:
    """A new file is its owner's alone: it holds secrets. SQLite gives the files beside it the same mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except OSError:
        return  # it is there already; or SQLite will meet the same, and says which file and why


def _version() -> int:
    major, minor, patch = (int(part) for part in apsw.sqlite_lib_version().split(".")[:3])
    return major * 1_000_000 + minor * 1000 + patch


def _patience(limit_s: float) -> Callable[[int], bool]:
    """Waits for the write lock in short steps: writers hold it for a millisecond, SQLite's own steps are far longer."""
    started = 0.0

    def again(tries: int) -> bool:
        nonlocal started
        now = time.monotonic()
        if tries == 0:
            started = now
        if now - started > limit_s:
            return False
        time.sleep(0.0002 if tries < 20 else 0.001 if tries < 200 else 0.01)
        return True

    return again


def _drain(line: "_Line") -> list[_Work]:
    """The next batch; empty when it is time to end."""
    first = line.get()
    if first is None:
        return []
    batch = [first]
    while len(batch) < BATCH:
        try:
            work = line.get_nowait()
        except queue.Empty:
            break
        if work is None:
            line.put(None)
            break
        batch.append(work)
    return batch


def _transact(db: Connection, batch: list[_Work]) -> list[tuple[_Work, Any]]:
    db.execute("BEGIN IMMEDIATE")
    try:
        answers = [(work, work.job(db)) for work in batch]
        crashpoints.reach_now("sqlite.in_transaction", crashpoints.role)
        db.execute("COMMIT")
    except Exception as error:
        if db.in_transaction:
            db.execute("ROLLBACK")
        if len(batch) == 1:
            return [(batch[0], error)]
        # One of them fails: each on its own, so that it fails alone.
        return [answer for work in batch for answer in _alone(db, work)]
    return answers


def _alone(db: Connection, work: _Work) -> list[tuple[_Work, Any]]:
    try:
        return _transact(db, [work])
    except Exception as error:
        return [(work, error)]


def _deliver(answers: list[tuple[_Work, Any]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Work, Any]]] = {}
    for work, answer in answers:
        by_loop.setdefault(work.loop, []).append((work, answer))
    for loop, group in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, group)


def _resolve(group: list[tuple[_Work, Any]]) -> None:
    for work, answer in group:
        if work.future.done():
            continue  # the caller was cancelled meanwhile
        if isinstance(answer, Exception):
            work.future.set_exception(_ours(answer, work.wrap))
        else:
            work.future.set_result(answer)


def _ours(error: Exception, wrap: type[Unavailable]) -> Exception:
    for kind, message in _MESSAGES.items():
        if isinstance(error, kind):
            return wrap(f"{message} ({error})")
    return error
