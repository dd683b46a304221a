"""The statements on the hot path are answered from an index, however much is in the tables."""

import apsw
import pytest

from scriptdispatch.mq import sqlite as stream
from scriptdispatch.queue import sqlite as queue
from scriptdispatch.queue import sqlite_lanes as lanes
from scriptdispatch.queue import sqlite_views as views

HEADS = "SELECT lane, head_id FROM queue_lane WHERE ready = 1 ORDER BY head_key LIMIT 10"
STATEMENTS = {
    "the head of a lane": lanes._HEAD,
    "is a lane leased": lanes._IS_LEASED,
    "is a device locked": lanes._LOCK,
    "the next due time": "SELECT min(due_ms) FROM queue_item WHERE state = 0",
    "promote what is due": lanes._PROMOTE,
    "lease an item": queue._LEASE,
    "what an owner has": "SELECT 1 FROM queue_item WHERE state = 2 AND owner = 'a'",
    "expired locks": "SELECT 1 FROM device_lock WHERE expires_ms <= 1",
    "places": views._AHEAD,
    "length of a lane": views._LENGTH,
    "lanes by device": views._LANES[0],
    "lanes by device, after '~'": views._LANES[1],
    "messages to take": "SELECT id FROM mq_message WHERE until_ms IS NULL ORDER BY id LIMIT 10",
    "leases that ran out": "SELECT min(until_ms) FROM mq_message WHERE until_ms IS NOT NULL",
}


@pytest.fixture(scope="module")
def db() -> apsw.Connection:
    made = apsw.Connection(":memory:")
    for statement in (*lanes.SCHEMA, *stream.SCHEMA):
        made.execute(statement)
    return made


def plan(db: apsw.Connection, statement: str) -> str:
    binds = (None,) * (statement.count("?"))
    return "\n".join(str(row[3]) for row in db.execute(f"EXPLAIN QUERY PLAN {statement}", binds))


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS.keys())
def test_it_searches_an_index_and_sorts_nothing(db: apsw.Connection, statement: str) -> None:
    found = plan(db, statement)
    assert "TEMP B-TREE" not in found
    assert "SEARCH" in found or "mq_message_free" in found
    assert "SCAN queue_item" not in found


def test_ready_lanes_come_in_order_from_the_index_of_open_lanes(db: apsw.Connection) -> None:
    """A scan, but of this index only, and it ends with the limit."""
    found = plan(db, HEADS)
    assert "queue_lane_ready" in found
    assert "TEMP B-TREE" not in found
