"""The tables of queue, locks and leases in the SQLite file, and the one function that decides whether a lane is open.

Functions here run inside a transaction, in the database's writer thread. `queue_lane` has a row for each lane with
waiting items; it is derived: `reopen` computes it from items and locks, in O(log n) however long the lane is.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from scriptdispatch.clock import Clock
from scriptdispatch.ids import is_id
from scriptdispatch.sqlite import Connection

DELAYED, WAITING, LEASED = 0, 1, 2
PROMOTE = 1000  # delayed items that one transaction makes waiting: some 10 ms of the write lock

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS queue_item (
        task_id TEXT PRIMARY KEY, device_id TEXT, lane TEXT NOT NULL, lane_key TEXT NOT NULL, due_ms INTEGER NOT NULL,
        type TEXT NOT NULL, state INTEGER NOT NULL, owner TEXT, lease TEXT, crashes INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS queue_item_lane ON queue_item (lane, state, lane_key, type)",
    "CREATE INDEX IF NOT EXISTS queue_item_due ON queue_item (due_ms) WHERE state = 0",
    "CREATE INDEX IF NOT EXISTS queue_item_owner ON queue_item (owner) WHERE state = 2",
    """CREATE TABLE IF NOT EXISTS queue_lane (
        lane TEXT PRIMARY KEY, ready INTEGER NOT NULL, head_key TEXT NOT NULL, head_type TEXT NOT NULL, head_id TEXT NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS queue_lane_ready ON queue_lane (head_key, head_type) WHERE ready = 1",
    "CREATE TABLE IF NOT EXISTS queue_owner (owner TEXT PRIMARY KEY, until_ms INTEGER NOT NULL) WITHOUT ROWID",
    # Whoever sets a lock by hand need not know more than device and value: it has no end then.
    """CREATE TABLE IF NOT EXISTS device_lock (
        device_id TEXT PRIMARY KEY, value TEXT NOT NULL, task_id TEXT, since_ms INTEGER, expires_ms INTEGER
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS device_lock_expires ON device_lock (expires_ms)",
    "CREATE TABLE IF NOT EXISTS lock_epoch (one INTEGER PRIMARY KEY CHECK (one = 1), set_ms INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS leader (
        one INTEGER PRIMARY KEY CHECK (one = 1), node_id TEXT, term INTEGER NOT NULL, until_ms INTEGER NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS node (
        node_id TEXT PRIMARY KEY, started_ms INTEGER NOT NULL, beat_ms INTEGER NOT NULL, until_ms INTEGER NOT NULL,
        record BLOB NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS worker_gone (
        worker_id TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, record BLOB NOT NULL) WITHOUT ROWID""",
    "CREATE TABLE IF NOT EXISTS breaker (one INTEGER PRIMARY KEY CHECK (one = 1), record BLOB NOT NULL)",
)

# Small statements, each answered from one index: as one statement with subqueries they cost twice as much.
_HEAD = "SELECT lane_key, type, task_id FROM queue_item WHERE lane = ? AND state = 1 ORDER BY lane_key LIMIT 1"
_IS_LEASED = "SELECT 1 FROM queue_item WHERE lane = ? AND state = 2 LIMIT 1"
_LOCK = "SELECT value FROM device_lock WHERE device_id = ? AND (expires_ms IS NULL OR expires_ms > ?)"
_PUT_LANE = """
    INSERT INTO queue_lane (lane, ready, head_key, head_type, head_id) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (lane) DO UPDATE SET ready = excluded.ready, head_key = excluded.head_key,
        head_type = excluded.head_type, head_id = excluded.head_id"""
_PROMOTE = """
    UPDATE queue_item SET state = 1 WHERE task_id IN
        (SELECT task_id FROM queue_item WHERE state = 0 AND due_ms <= ? ORDER BY due_ms LIMIT ?) RETURNING lane"""


def rows(db: Connection, statement: str, binds: Sequence[Any] = ()) -> list[Any]:
    """All rows, so that the statement is over: a write that is still open (RETURNING) would hold up the commit."""
    return db.execute(statement, binds).fetchall()


def ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def now_ms(clock: Clock) -> int:
    return ms(clock.now())


def moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)


def reopen(db: Connection, lanes: Iterable[str], now: int) -> bool:
    """Looks at the facts of these lanes again. True if one of them may be served now, so that sleepers must be woken."""
    ready = False
    for lane in lanes:
        head = rows(db, _HEAD, (lane,))
        if not head:
            db.execute("DELETE FROM queue_lane WHERE lane = ?", (lane,))
            continue
        is_open = not rows(db, _IS_LEASED, (lane,)) and not _is_locked(db, lane, now)
        db.execute(_PUT_LANE, (lane, int(is_open), *head[0]))
        ready = ready or is_open
    return ready


def _is_locked(db: Connection, lane: str, now: int) -> bool:
    if lane.startswith("~"):
        return False  # a task without a device
    return any(is_id(value) for (value,) in rows(db, _LOCK, (lane, now)))


def promote(db: Connection, now: int) -> tuple[int, bool]:
    """Delayed items whose time has come wait from now on: (how many, is a lane ready). Fewer than PROMOTE: all of them."""
    lanes = [lane for (lane,) in rows(db, _PROMOTE, (now, PROMOTE))]
    return len(lanes), reopen(db, set(lanes), now)


def next_due(db: Connection) -> int | None:
    return db.execute("SELECT min(due_ms) FROM queue_item WHERE state = 0").get  # type: ignore[no-any-return]
