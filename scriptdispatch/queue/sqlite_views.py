"""What can be seen of the ready queue in SQLite. Functions of a connection, in the database's reader thread."""

import json
from collections.abc import Sequence

from scriptdispatch.domain.lanes import priority_of
from scriptdispatch.domain.model import PRIORITIES
from scriptdispatch.queue.port import LaneView, Place
from scriptdispatch.queue.sqlite_lanes import LEASED, WAITING, rows
from scriptdispatch.sqlite import Connection

_AHEAD = """
    SELECT count(*) FROM queue_item WHERE lane = ? AND state = 1 AND lane_key > ? AND lane_key <= ?"""
_LENGTH = "SELECT count(*) FROM queue_item WHERE lane = ? AND state = 1"
# Lanes of tasks without a device start with '~' and are left out; a device's name may sort before or after them.
_LANES = (
    "SELECT lane FROM queue_lane WHERE lane > ? AND lane < '~' ORDER BY lane LIMIT ?",
    "SELECT lane FROM queue_lane WHERE lane > max(?, char(127)) ORDER BY lane LIMIT ?",
)


def known(task_ids: Sequence[str], db: Connection) -> set[str]:
    query = "SELECT task_id FROM queue_item WHERE task_id IN (SELECT value FROM json_each(?))"
    return {task_id for (task_id,) in rows(db, query, (json.dumps(list(task_ids)),))}


def places(task_ids: Sequence[str], db: Connection) -> dict[str, Place]:
    """A lane is walked once however many of its tasks are asked for: each counts on from the one before it."""
    asked = rows(
        db,
        "SELECT task_id, lane, lane_key, state FROM queue_item WHERE task_id IN (SELECT value FROM json_each(?))"
        " ORDER BY lane, lane_key",
        (json.dumps(list(task_ids)),),
    )
    found: dict[str, Place] = {}
    at_lane, at_key, at = "", "", 0
    for task_id, lane_name, key, state in asked:
        if state != WAITING:
            found[task_id] = Place(task_id=task_id, position=None, leased=state == LEASED, due=state == LEASED)
            continue
        if lane_name != at_lane:
            at_lane, at_key, at = lane_name, "", 0
        at += db.execute(_AHEAD, (lane_name, at_key, key)).get
        at_key = key
        found[task_id] = Place(task_id=task_id, position=at, leased=False, due=True)
    return found


def lane(device_id: str, limit: int, db: Connection) -> list[str]:
    query = "SELECT task_id FROM queue_item WHERE lane = ? AND state = 1 ORDER BY lane_key LIMIT ?"
    return [task_id for (task_id,) in rows(db, query, (device_id, limit))]


def lanes(after: str | None, limit: int, db: Connection) -> list[LaneView]:
    """The row of a lane whose last waiting item is leased stays until it is looked at again: it is passed over."""
    found: list[LaneView] = []
    for query in _LANES:
        at = after or ""
        while len(found) < limit:
            names = [name for (name,) in rows(db, query, (at, limit))]
            lengths = [(name, db.execute(_LENGTH, (name,)).get) for name in names]
            found += [LaneView(device_id=name, length=length) for name, length in lengths if length]
            if len(names) < limit:
                break
            at = names[-1]
    return found[:limit]


def ready(db: Connection) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(PRIORITIES, 0)
    query = "SELECT substr(lane_key, 1, 1) AS rank, count(*) FROM queue_item WHERE state = 1 GROUP BY rank"
    for rank, count in rows(db, query):
        counts[priority_of(rank)] += count
    return counts


def entries(after: str | None, limit: int, db: Connection) -> list[str]:
    query = "SELECT task_id FROM queue_item WHERE task_id > ? ORDER BY task_id LIMIT ?"
    return [task_id for (task_id,) in rows(db, query, (after or "", limit))]
