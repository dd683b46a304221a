"""The ready queue in the SQLite file that all processes of one machine share, and the event bus over the bell.

Each verb is one transaction that also computes the lanes it touched anew (`sqlite_lanes.reopen`); after the commit the
bell wakes whoever sleeps in `take`, in whatever process. A ring that is lost costs what is left of a `wait_s`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from scriptdispatch.bell import Bell
from scriptdispatch.clock import Clock
from scriptdispatch.domain.lanes import lane_of
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.ids import new_id
from scriptdispatch.queue import sqlite_views as views
from scriptdispatch.queue.bell_events import BellEvents as BellEvents
from scriptdispatch.queue.port import Item, LaneView, Leased, Place
from scriptdispatch.queue.sqlite_lanes import DELAYED, PROMOTE, SCHEMA, WAITING, ms, next_due, now_ms, promote, reopen, rows
from scriptdispatch.sleepers import Sleepers, sleep_until_rung
from scriptdispatch.sqlite import Connection, Database, version

T = TypeVar("T")
TOPIC = "queue"
FIRST_LEASE_S = 10.0  # for an owner that takes before it has ever renewed

_PUSH = """
    INSERT INTO queue_item (task_id, device_id, lane, lane_key, due_ms, type, state) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (task_id) DO UPDATE SET device_id = excluded.device_id, lane = excluded.lane, lane_key = excluded.lane_key,
        due_ms = excluded.due_ms, type = excluded.type, state = excluded.state, owner = NULL, lease = NULL"""
_LEASE = """
    UPDATE queue_item SET state = 2, owner = ?, lease = ? WHERE task_id = ? AND state = 1
    RETURNING device_id, lane_key, type, crashes"""
_GIVE_BACK = """
    UPDATE queue_item SET state = 1, owner = NULL, lease = NULL, crashes = crashes + ?
    WHERE task_id = ? AND state = 2 AND lease = ?"""
_ORPHANS = """
    SELECT DISTINCT owner FROM queue_item WHERE state = 2
    AND owner NOT IN (SELECT owner FROM queue_owner WHERE until_ms > ?)"""


class SqliteQueue:
    def __init__(self, database: Database, bell: Bell, clock: Clock) -> None:
        self._database, self._bell, self._clock = database, bell, clock
        self._sleepers = Sleepers()
        self._deaf: Callable[[], None] | None = None  # ends the listening, once a take has begun it

    async def open(self) -> None:
        await self._database.open(SCHEMA)

    async def close(self) -> None:
        if self._deaf is not None:
            self._deaf()
            self._deaf = None
        await self._database.close()

    async def ping(self) -> str:
        await self._read(lambda db: db.execute("SELECT count(*) FROM lock_epoch").get)
        return f"SQLite {version()}"

    # --- what goes in

    async def push(self, items: Sequence[Item]) -> None:
        if items:
            await self._change(partial(_push, items, now_ms(self._clock)))

    async def remove(self, task_ids: Sequence[str]) -> None:
        if task_ids:
            await self._change(partial(_remove, task_ids, now_ms(self._clock)))

    # --- what goes out

    async def take(self, owner: str, limit: int, *, wait_s: float, types: Sequence[str] | None = None) -> list[Leased]:
        if limit <= 0:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        self._hear()
        with self._sleepers.alarm() as alarm:
            while True:
                alarm.clear()  # before the look: a ring from here on is about something that the look may not show
                now = now_ms(self._clock)
                there, due = await self._read(partial(_look, types, now))
                if there or (due is not None and due <= now):
                    if leased := await self._lease(owner, limit, types):
                        return leased
                    if loop.time() < until:
                        continue  # another process was faster, or what fell due stands in a closed lane
                left = until - loop.time()
                if left <= 0:
                    return []
                await sleep_until_rung(alarm, left if due is None else min(left, (due - now) / 1000))

    async def renew(self, owner: str, ttl_s: float) -> None:
        until = now_ms(self._clock) + round(ttl_s * 1000)
        await self._write(lambda db: _set_owner(db, owner, until) and None)

    async def reclaim(self) -> int:
        """Also lays expired locks aside and looks at their lanes again."""
        now = now_ms(self._clock)
        if not await self._read(partial(_anything_to_reclaim, now)):
            return 0
        count, ready = await self._write(partial(_reclaim, now))
        if ready:
            self._bell.ring(TOPIC)
        return count

    async def finish(self, leased: Sequence[Leased]) -> None:
        if leased:
            await self._change(partial(_finish, leased, now_ms(self._clock)))

    async def give_back(self, leased: Sequence[Leased], *, crashed: bool = False) -> None:
        if leased:
            await self._change(partial(_give_back, leased, crashed, now_ms(self._clock)))

    async def reopen(self, device_ids: Sequence[str]) -> None:
        now = now_ms(self._clock)
        if device_ids:
            await self._change(lambda db: reopen(db, dict.fromkeys(device_ids), now))

    # --- what people and the reconciler see

    async def known(self, task_ids: Sequence[str]) -> set[str]:
        return await self._read(partial(views.known, task_ids))

    async def places(self, task_ids: Sequence[str]) -> dict[str, Place]:
        await self._promote_due()
        return await self._read(partial(views.places, task_ids))

    async def lane(self, device_id: str, limit: int) -> list[str]:
        await self._promote_due()
        return await self._read(partial(views.lane, device_id, limit))

    async def lanes(self, after: str | None, limit: int) -> list[LaneView]:
        await self._promote_due()
        return await self._read(partial(views.lanes, after, limit))

    async def ready(self) -> dict[str, int]:
        await self._promote_due()
        return await self._read(views.ready)

    async def entries(self, after: str | None, limit: int) -> list[str]:
        return await self._read(partial(views.entries, after, limit))

    # --- inside

    async def _lease(self, owner: str, limit: int, types: Sequence[str] | None) -> list[Leased]:
        await self._promote_due()
        lease, now = new_id(), now_ms(self._clock)
        job = asyncio.ensure_future(self._write(partial(_lease, owner, lease, limit, types, now)))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            # The hand-out may be committed although nobody will hear of it; its owner lives on, so no reclaim finds it.
            with contextlib.suppress(QueueUnavailable):  # then nothing was handed out, or its owner's lease must run out
                await self.give_back(await job)
            raise

    async def _promote_due(self) -> None:
        """All items that have fallen due stand in their lanes: else a later key could go before an earlier one."""
        while (due := await self._read(next_due)) is not None and due <= (now := now_ms(self._clock)):
            count, ready = await self._write(partial(_promote, now))
            if ready:
                self._bell.ring(TOPIC)
            if count < PROMOTE:
                return

    def _hear(self) -> None:
        """Only who takes listens: a ring costs nothing in the other processes."""
        if self._deaf is None:
            self._deaf = self._bell.listen(TOPIC, lambda _: self._sleepers.wake())

    async def _change(self, job: Callable[[Connection], bool]) -> None:
        """`job` says whether sleepers must be woken; they are, after the commit, so that they see what it did."""
        if await self._write(job):
            self._bell.ring(TOPIC)

    async def _write(self, job: Callable[[Connection], T]) -> T:
        return await self._database.write(job, durable=False, wrap=QueueUnavailable)

    async def _read(self, job: Callable[[Connection], T]) -> T:
        return await self._database.read(job, wrap=QueueUnavailable)


# ------------------------------------------------------------------- in the database's threads, inside a transaction


def _push(items: Sequence[Item], now: int, db: Connection) -> bool:
    """True if sleepers must know: a lane may be served, or the next due time is earlier than it was."""
    placed = [(item, lane_of(item.task_id, item.device_id), ms(item.due_at)) for item in items]
    db.executemany(_PUSH, (_row(item, lane, due, now) for item, lane, due in placed))
    ready = reopen(db, dict.fromkeys(lane for _, lane, _ in placed), now)
    delayed = [due for _, _, due in placed if due > now]
    return ready or (bool(delayed) and min(delayed) == next_due(db))


def _row(item: Item, lane: str, due: int, now: int) -> tuple[str, str | None, str, str, int, str, int]:
    state = DELAYED if due > now else WAITING
    return item.task_id, item.device_id, lane, item.lane_key, due, item.type, state


def _remove(task_ids: Sequence[str], now: int, db: Connection) -> bool:
    gone = "DELETE FROM queue_item WHERE task_id = ? AND state <> 2 RETURNING lane"
    lanes = [lane for task_id in task_ids for (lane,) in rows(db, gone, (task_id,))]
    return reopen(db, dict.fromkeys(lanes), now)


def _look(types: Sequence[str] | None, now: int, db: Connection) -> tuple[bool, int | None]:
    """(is there a lane to serve, when does the next delayed item fall due)."""
    which, binds = _of_types(types)
    there = db.execute(f"SELECT 1 FROM queue_lane WHERE ready = 1 {which} LIMIT 1", binds).get
    return there is not None, next_due(db)


def _of_types(types: Sequence[str] | None) -> tuple[str, tuple[str, ...]]:
    if types is None:
        return "", ()
    return f"AND head_type IN ({', '.join('?' * len(types))})", tuple(types)


def _lease(owner: str, lease: str, limit: int, types: Sequence[str] | None, now: int, db: Connection) -> list[Leased]:
    which, binds = _of_types(types)
    heads = f"SELECT lane, head_id FROM queue_lane WHERE ready = 1 {which} ORDER BY head_key LIMIT ?"
    leased = []
    for lane, task_id in rows(db, heads, (*binds, limit)):
        found = rows(db, _LEASE, (owner, lease, task_id))
        if not found:  # the lane's row is wrong, whatever made it so: set it right, or every take would trip over it
            reopen(db, (lane,), now)
            continue
        device_id, key, kind, crashes = found[0]
        leased.append(Leased(task_id=task_id, device_id=device_id, lane_key=key, type=kind, lease=lease, crashes=crashes))
        db.execute("UPDATE queue_lane SET ready = 0 WHERE lane = ?", (lane,))
    if leased:
        db.execute("INSERT OR IGNORE INTO queue_owner VALUES (?, ?)", (owner, now + round(FIRST_LEASE_S * 1000)))
    return leased


def _set_owner(db: Connection, owner: str, until: int) -> object:
    return db.execute("INSERT OR REPLACE INTO queue_owner (owner, until_ms) VALUES (?, ?)", (owner, until))


def _anything_to_reclaim(now: int, db: Connection) -> bool:
    return bool(
        db.execute(f"SELECT EXISTS ({_ORPHANS}) OR EXISTS (SELECT 1 FROM device_lock WHERE expires_ms <= ?)", (now, now)).get
    )


def _reclaim(now: int, db: Connection) -> tuple[int, bool]:
    back = "UPDATE queue_item SET state = 1, owner = NULL, lease = NULL WHERE state = 2 AND owner = ? RETURNING lane"
    owners = rows(db, _ORPHANS, (now,))
    lanes = [lane for owner in owners for (lane,) in rows(db, back, owner)]
    db.execute("DELETE FROM queue_owner WHERE until_ms <= ?", (now,))
    freed = rows(db, "DELETE FROM device_lock WHERE expires_ms <= ? RETURNING device_id", (now,))
    return len(lanes), reopen(db, dict.fromkeys([*lanes, *(device for (device,) in freed)]), now)


def _finish(leased: Sequence[Leased], now: int, db: Connection) -> bool:
    db.executemany(
        "DELETE FROM queue_item WHERE task_id = ? AND state = 2 AND lease = ?",
        [(item.task_id, item.lease) for item in leased],
    )
    return reopen(db, _lanes(leased), now)


def _give_back(leased: Sequence[Leased], crashed: bool, now: int, db: Connection) -> bool:
    db.executemany(_GIVE_BACK, [(int(crashed), item.task_id, item.lease) for item in leased])
    return reopen(db, _lanes(leased), now)


def _lanes(leased: Sequence[Leased]) -> dict[str, None]:
    return dict.fromkeys(lane_of(item.task_id, item.device_id) for item in leased)


def _promote(now: int, db: Connection) -> tuple[int, bool]:
    return promote(db, now)
