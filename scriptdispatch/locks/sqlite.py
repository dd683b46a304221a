"""Device locks, leader, nodes and breaker in the SQLite file. The tables are made by the queue, which they live with.

A lock that has expired is as good as none. Releasing one and looking at its device's lane again are one transaction.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec

from scriptdispatch.bell import Bell
from scriptdispatch.clock import Clock
from scriptdispatch.domain.model import Breaker, NodeRecord, WorkerRecord
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.locks.port import Claim, Grant, Lock
from scriptdispatch.queue.sqlite import TOPIC
from scriptdispatch.queue.sqlite_lanes import moment, ms, now_ms, reopen, rows
from scriptdispatch.sqlite import Connection, Database

T = TypeVar("T")
KEEP_MS = round(timedelta(days=7).total_seconds() * 1000)

_LOCK = "SELECT device_id, value, task_id, since_ms FROM device_lock WHERE (expires_ms IS NULL OR expires_ms > ?)"
_SET_LOCK = "INSERT OR REPLACE INTO device_lock (device_id, value, task_id, since_ms, expires_ms) VALUES (?, ?, ?, ?, ?)"


class SqliteLocks:
    def __init__(self, database: Database, bell: Bell, clock: Clock) -> None:
        self._database, self._bell, self._clock = database, bell, clock

    async def acquire(self, claims: Sequence[Claim]) -> list[Grant]:
        return await self._write(partial(_acquire, claims, now_ms(self._clock))) if claims else []

    async def release(self, held: Sequence[tuple[str, str]], *, fences: Mapping[str, int] | None = None) -> list[bool]:
        return await self._free(held) if held else []

    async def force(self, device_id: str, value: str) -> bool:
        return (await self._free([(device_id, value)]))[0]

    async def restore(self, claims: Sequence[Claim]) -> list[bool]:
        return await self._write(partial(_restore, claims, now_ms(self._clock))) if claims else []

    async def holders(self, device_ids: Sequence[str]) -> dict[str, Lock]:
        query = f"{_LOCK} AND device_id IN (SELECT value FROM json_each(?))"
        found = await self._locks(query, now_ms(self._clock), json.dumps(list(device_ids)))
        return {lock.device_id: lock for lock in found}

    async def all(self, after: str | None, limit: int) -> list[Lock]:
        query = f"{_LOCK} AND device_id > ? ORDER BY device_id LIMIT ?"
        return await self._locks(query, now_ms(self._clock), after or "", limit)

    async def intact(self) -> bool:
        return await self._database.read(_intact, wrap=QueueUnavailable)

    async def set_intact(self) -> None:
        now = now_ms(self._clock)
        await self._write(lambda db: db.execute("INSERT OR IGNORE INTO lock_epoch VALUES (1, ?)", (now,)) and None)

    async def _free(self, held: Sequence[tuple[str, str]]) -> list[bool]:
        freed, ready = await self._write(partial(_release, held, now_ms(self._clock)))
        if ready:
            self._bell.ring(TOPIC)
        return freed

    async def _locks(self, query: str, *binds: Any) -> list[Lock]:
        found = await self._database.read(lambda db: rows(db, query, binds), wrap=QueueUnavailable)
        return [_lock(*row) for row in found]

    async def _write(self, job: Callable[[Connection], T]) -> T:
        return await self._database.write(job, durable=False, wrap=QueueUnavailable)


def _lock(device_id: str, value: str, task_id: str | None, since_ms: int | None) -> Lock:
    since = None if since_ms is None else moment(since_ms)
    return Lock(device_id=device_id, value=value, task_id=task_id, since=since)


def _intact(db: Connection) -> bool:
    return db.execute("SELECT 1 FROM lock_epoch").get is not None


def _acquire(claims: Sequence[Claim], now: int, db: Connection) -> list[Grant]:
    if not _intact(db):
        return [Grant(verdict="rebuilding") for _ in claims]
    return [_acquire_one(db, claim, now) for claim in claims]


def _acquire_one(db: Connection, claim: Claim, now: int) -> Grant:
    found = rows(db, f"{_LOCK} AND device_id = ?", (now, claim.device_id))
    if found and found[0][1] != claim.execution_id:
        return Grant(verdict="held", holder=_lock(*found[0]))
    _set(db, claim, found[0][3] if found else now, now)
    return Grant(verdict="granted")


def _set(db: Connection, claim: Claim, since: int | None, now: int) -> None:
    expires = now + round(claim.ttl_s * 1000)
    db.execute(_SET_LOCK, (claim.device_id, claim.execution_id, claim.task_id, since, expires))
    # Closed already while the task is leased. Not so if the lease was lost meanwhile: the lock closes the lane then.
    db.execute("UPDATE queue_lane SET ready = 0 WHERE lane = ? AND ready = 1", (claim.device_id,))


def _release(held: Sequence[tuple[str, str]], now: int, db: Connection) -> tuple[list[bool], bool]:
    freed = []
    for device_id, value in held:
        db.execute("DELETE FROM device_lock WHERE device_id = ? AND value = ?", (device_id, value))
        freed.append(db.changes() > 0)
    return freed, reopen(db, dict.fromkeys(device_id for device_id, _ in held), now)


def _restore(claims: Sequence[Claim], now: int, db: Connection) -> list[bool]:
    done = []
    for claim in claims:
        absent = not rows(db, f"{_LOCK} AND device_id = ?", (now, claim.device_id))
        if absent:
            _set(db, claim, now, now)
        done.append(absent)
    reopen(db, dict.fromkeys(claim.device_id for claim in claims), now)
    return done


# ---------------------------------------------------------------------------------------------------------------- leases


class SqliteLeases:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def lead(self, node_id: str, ttl_s: float) -> int | None:
        return await self._write(partial(_lead, node_id, round(ttl_s * 1000), now_ms(self._clock)))

    async def resign(self, node_id: str) -> None:
        await self._execute("UPDATE leader SET node_id = NULL, until_ms = 0 WHERE node_id = ?", node_id)

    async def leader(self) -> tuple[str, int] | None:
        query = "SELECT node_id, term FROM leader WHERE node_id IS NOT NULL AND until_ms > ?"
        found = await self._rows(query, now_ms(self._clock))
        return (found[0][0], found[0][1]) if found else None

    async def beat(self, node: NodeRecord, ttl_s: float) -> None:
        now = now_ms(self._clock)
        row = (node.id, ms(node.started_at), now, now + round(ttl_s * 1000), msgspec.json.encode(node))
        await self._write(partial(_beat, row, now - KEEP_MS))

    async def nodes(self) -> list[tuple[NodeRecord, bool]]:
        now = now_ms(self._clock)
        query = "SELECT record, until_ms FROM node WHERE beat_ms >= ? ORDER BY started_ms DESC, node_id DESC"
        found = await self._rows(query, now - KEEP_MS)
        return [(msgspec.json.decode(record, type=NodeRecord), until > now) for record, until in found]

    async def workers_gone(self, workers: Sequence[WorkerRecord]) -> None:
        now = now_ms(self._clock)
        gone = [(worker.id, now, msgspec.json.encode(worker)) for worker in workers]
        if gone:
            await self._write(partial(_workers_gone, gone, now - KEEP_MS))

    async def gone_workers(self) -> list[WorkerRecord]:
        query = "SELECT record FROM worker_gone WHERE at_ms >= ? ORDER BY at_ms DESC, worker_id DESC"
        found = await self._rows(query, now_ms(self._clock) - KEEP_MS)
        return [msgspec.json.decode(record, type=WorkerRecord) for (record,) in found]

    async def breaker(self) -> Breaker:
        found = await self._rows("SELECT record FROM breaker")
        return msgspec.json.decode(found[0][0], type=Breaker) if found else Breaker()

    async def set_breaker(self, breaker: Breaker) -> None:
        await self._execute("INSERT OR REPLACE INTO breaker (one, record) VALUES (1, ?)", msgspec.json.encode(breaker))

    async def _execute(self, statement: str, *binds: Any) -> None:
        await self._write(lambda db: db.execute(statement, binds) and None)

    async def _rows(self, query: str, *binds: Any) -> list[Any]:
        return await self._database.read(lambda db: rows(db, query, binds), wrap=QueueUnavailable)

    async def _write(self, job: Callable[[Connection], T]) -> T:
        return await self._database.write(job, durable=False, wrap=QueueUnavailable)


def _lead(node_id: str, ttl_ms: int, now: int, db: Connection) -> int | None:
    """A node whose own lease ran out takes a new term too: it cannot know what it missed."""
    found = rows(db, "SELECT node_id, term, until_ms FROM leader")
    holder, term, until = found[0] if found else (None, 0, 0)
    in_force = holder is not None and until > now
    if in_force and holder != node_id:
        return None
    term = term if in_force else term + 1
    db.execute(
        "INSERT OR REPLACE INTO leader (one, node_id, term, until_ms) VALUES (1, ?, ?, ?)", (node_id, term, now + ttl_ms)
    )
    return int(term)


def _beat(row: tuple[Any, ...], oldest: int, db: Connection) -> None:
    db.execute("INSERT OR REPLACE INTO node (node_id, started_ms, beat_ms, until_ms, record) VALUES (?, ?, ?, ?, ?)", row)
    db.execute("DELETE FROM node WHERE beat_ms < ?", (oldest,))


def _workers_gone(gone: Sequence[tuple[str, int, bytes]], oldest: int, db: Connection) -> None:
    db.executemany("INSERT OR REPLACE INTO worker_gone (worker_id, at_ms, record) VALUES (?, ?, ?)", gone)
    db.execute("DELETE FROM worker_gone WHERE at_ms < ?", (oldest,))
