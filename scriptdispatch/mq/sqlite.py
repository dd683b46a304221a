"""The stream of execution logs as a table of the SQLite file. Publishing is durable; taking and acknowledging need not be:
what a power cut undoes is delivered again.

A message in hand is leased for a while to its process. It is free again when the lease has run out (its consumer gave up
on it), at once when the stream is closed, and when its process is found dead: by whoever opens or looks next.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from scriptdispatch.bell import Bell
from scriptdispatch.clock import Clock
from scriptdispatch.errors import StreamUnavailable
from scriptdispatch.mq.owners import is_dead, new_owner
from scriptdispatch.mq.port import Delivery
from scriptdispatch.sleepers import Sleepers, sleep_until_rung
from scriptdispatch.sqlite import Connection, Database, version

T = TypeVar("T")
TOPIC = "stream"
LEASE_S = 30.0
DEAD_LETTERS = 10_000  # the newest are kept

SCHEMA = (
    # Small columns first: the body may lie on other pages. An id is never used again, it names a message for good.
    """CREATE TABLE IF NOT EXISTS mq_message (
        id INTEGER PRIMARY KEY AUTOINCREMENT, until_ms INTEGER, owner TEXT, key TEXT, body BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS mq_message_free ON mq_message (id) WHERE until_ms IS NULL",
    "CREATE INDEX IF NOT EXISTS mq_message_taken ON mq_message (until_ms, owner) WHERE until_ms IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS mq_dead (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER NOT NULL, key TEXT, body BLOB NOT NULL)""",
)
_FREE = "SELECT id, body FROM mq_message WHERE until_ms IS NULL ORDER BY id LIMIT ?"
_LAG = """
    SELECT (SELECT count(*) FROM mq_message WHERE until_ms IS NULL)
         + (SELECT count(*) FROM mq_message WHERE until_ms IS NOT NULL)"""


class SqliteStream:
    most = 500  # one transaction, in which nobody else can write

    def __init__(self, database: Database, bell: Bell, clock: Clock) -> None:
        self._database, self._bell, self._clock = database, bell, clock
        self._owner = ""
        self._sleepers = Sleepers()
        self._deaf: Callable[[], None] | None = None

    async def open(self) -> None:
        await self._database.open(SCHEMA)
        self._owner = new_owner()  # here, not before: a child must not carry its parent's pid
        await self._change(partial(_free_dead, self._now()))

    async def close(self) -> None:
        """What this process still has in hand comes again at once, to others."""
        if self._deaf is not None:
            self._deaf()
            self._deaf = None
        try:
            await self._change(partial(_free_owner, self._owner))
        finally:
            await self._database.close()

    async def ping(self) -> str:
        await self._read(lambda db: db.execute("SELECT 1 FROM mq_message LIMIT 1").get)
        return f"SQLite {version()}"

    async def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        if not messages:
            return
        await self._write(partial(_publish, messages), durable=True)
        self._bell.ring(TOPIC)

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        if limit <= 0:
            return []
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        self._hear()
        with self._sleepers.alarm() as alarm:
            while True:
                alarm.clear()  # before the look, so that no ring is lost
                now = self._now()
                there, back_ms = await self._read(partial(_look, now))
                if there:
                    if taken := await self._take(limit):
                        return taken
                    if loop.time() < until:
                        continue  # another consumer was faster
                left = until - loop.time()
                if left <= 0:
                    return []
                await sleep_until_rung(alarm, left if back_ms is None else min(left, (back_ms - now) / 1000))

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Under whatever lease: what it asked for is durable, so nobody needs it any more."""
        if deliveries:
            ids = [(delivery.token,) for delivery in deliveries]
            await self._write(lambda db: db.executemany("DELETE FROM mq_message WHERE id = ?", ids) and None, durable=False)

    async def reject(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            await self._write(partial(_reject, [delivery.token for delivery in deliveries]), durable=False)

    async def lag(self) -> int | None:
        count: int = await self._read(lambda db: db.execute(_LAG).get)
        return count

    async def _take(self, limit: int) -> list[Delivery]:
        until = self._now() + round(LEASE_S * 1000)
        job = asyncio.ensure_future(self._write(partial(_take, limit, self._owner, self._now(), until), durable=False))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            with contextlib.suppress(StreamUnavailable):  # then nothing was taken, or its lease runs out
                await self._put_back(await job)
            raise

    async def _put_back(self, deliveries: Sequence[Delivery]) -> None:
        ids = [(delivery.token, self._owner) for delivery in deliveries]
        free = "UPDATE mq_message SET until_ms = NULL, owner = NULL WHERE id = ? AND owner = ?"
        await self._change(lambda db: len(ids) if db.executemany(free, ids) else 0)

    def _hear(self) -> None:
        if self._deaf is None:
            self._deaf = self._bell.listen(TOPIC, lambda _: self._sleepers.wake())

    def _now(self) -> int:
        return round(self._clock.now().timestamp() * 1000)

    async def _change(self, job: Callable[[Connection], int]) -> None:
        """`job` says how many messages are free again; whoever sleeps is woken after the commit."""
        if await self._write(job, durable=False):
            self._bell.ring(TOPIC)

    async def _write(self, job: Callable[[Connection], T], *, durable: bool) -> T:
        return await self._database.write(job, durable=durable, wrap=StreamUnavailable)

    async def _read(self, job: Callable[[Connection], Any]) -> Any:
        return await self._database.read(job, wrap=StreamUnavailable)


# ----------------------------------------------------------------------------------------------- in the database's threads


def _publish(messages: Sequence[tuple[str | None, bytes]], db: Connection) -> None:
    db.executemany("INSERT INTO mq_message (key, body) VALUES (?, ?)", messages)


def _look(now: int, db: Connection) -> tuple[bool, int | None]:
    """(is there something to take, when does the next lease run out). Asks for the dead only when nothing else is there."""
    if db.execute("SELECT 1 FROM mq_message WHERE until_ms IS NULL LIMIT 1").get is not None:
        return True, None
    back = db.execute("SELECT min(until_ms) FROM mq_message WHERE until_ms IS NOT NULL").get
    if back is None:
        return False, None
    return back <= now or bool(_dead_owners(db)), back


def _dead_owners(db: Connection) -> list[str]:
    owners: list[Any] = db.execute("SELECT DISTINCT owner FROM mq_message WHERE until_ms IS NOT NULL").fetchall()
    return [owner for (owner,) in owners if is_dead(owner)]


def _free_dead(now: int, db: Connection) -> int:
    """Ends the leases of processes that are gone, and those that ran out: how many messages are free again."""
    freed = sum(_free_owner(owner, db) for owner in _dead_owners(db))
    db.execute("UPDATE mq_message SET until_ms = NULL, owner = NULL WHERE until_ms <= ?", (now,))
    return freed + db.changes()


def _free_owner(owner: str, db: Connection) -> int:
    db.execute("UPDATE mq_message SET until_ms = NULL, owner = NULL WHERE until_ms IS NOT NULL AND owner = ?", (owner,))
    return db.changes()


def _take(limit: int, owner: str, now: int, until: int, db: Connection) -> list[Delivery]:
    rows: list[Any] = db.execute(_FREE, (limit,)).fetchall()
    if len(rows) < limit and _free_dead(now, db):
        rows = db.execute(_FREE, (limit,)).fetchall()
    db.executemany("UPDATE mq_message SET until_ms = ?, owner = ? WHERE id = ?", [(until, owner, row[0]) for row in rows])
    return [Delivery(id=str(number), body=body, token=number) for number, body in rows]


def _reject(ids: Sequence[int], db: Connection) -> None:
    for number in ids:
        db.execute("INSERT INTO mq_dead (id, key, body) SELECT id, key, body FROM mq_message WHERE id = ?", (number,))
        db.execute("DELETE FROM mq_message WHERE id = ?", (number,))
    db.execute("DELETE FROM mq_dead WHERE seq <= (SELECT max(seq) FROM mq_dead) - ?", (DEAD_LETTERS,))
