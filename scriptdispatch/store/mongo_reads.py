"""What the MongoDB store asks: filters as queries, each with the index it walks. Pure but for `stats`."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from scriptdispatch.domain.model import EXECUTABLE, STATUSES, phases_ms
from scriptdispatch.store.mongo_documents import TAIL, label_text, unusual_texts
from scriptdispatch.store.mongo_schema import BY_ID, DATE, DOWN, EXECUTIONS, TASKS, UNDER_WAY, UP
from scriptdispatch.store.mongo_writes import Database
from scriptdispatch.store.port import Document, Stats, TaskFilter
from scriptdispatch.store.summary import NEWEST, build_stats

# An id carries the time it was made, `created_at` the time of the request: equal but for a clock that was set back, or
# an idempotent request that somebody took over later. So the id narrows the walk, and `created_at` decides.
ID_SLACK: Final = timedelta(hours=25)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class Query(NamedTuple):
    where: Document
    walk: str
    order: Sequence[tuple[str, int]]


# ---------------------------------------------------------------------------------------------------------------- tasks


def task_query(where: TaskFilter) -> Query:
    """Walks by what narrows most. Statuses are few, so the walk over several of them is merged in the order of ids."""
    query: Document = {}
    if where.statuses and set(STATUSES) - set(where.statuses):
        query["status"] = {"$in": sorted(set(where.statuses))}
    for name in ("type", "priority", "device_id", "error_code", "dedupe_key"):
        if (value := getattr(where, name)) is not None:
            query["error.code" if name == "error_code" else name] = value
    if unusual := unusual_texts(query):
        query["unusual"] = {"$all": unusual}
    if where.labels:
        query["labels"] = {"$all": [label_text(name, value) for name, value in where.labels]}
    if span := _id_span(where):
        query["_id"] = span
    if created := _created_span(where):
        query["created_at"] = created
    return Query(query, _index_for(where, query), [("_id", DOWN)])


def _index_for(where: TaskFilter, query: Document) -> str:
    if where.ids:
        return BY_ID
    walks = (("dedupe_key", "dedupe"), ("labels", "by_label"), ("device_id", "by_device"), ("error.code", "by_error"),
             ("status", "by_status"), ("unusual", "by_unusual"))  # fmt: skip
    return next((index for key, index in walks if key in query), BY_ID)


def _id_span(where: TaskFilter) -> Document:
    below = [where.before_id] if where.before_id is not None else []
    span: Document = {}
    if where.created_before is not None:
        below.append(id_at(where.created_before + ID_SLACK))
    if where.created_after is not None:
        span["$gte"] = id_at(where.created_after - ID_SLACK)
    if below:
        span["$lt"] = min(below)
    if where.ids:
        span["$in"] = list(where.ids)
    return span


def _created_span(where: TaskFilter) -> Document:
    span: Document = {}
    if where.created_after is not None:
        span["$gte"] = where.created_after
    if where.created_before is not None:
        span["$lt"] = where.created_before
    return span


def id_at(at: datetime) -> str:
    """Where the ids of that millisecond begin."""
    ms = max(0, (at - _EPOCH) // _MS)
    return f"{ms >> 16:08x}-{ms & 0xFFFF:04x}"


def tail_query(tail: str) -> Query:
    """By the last eight characters, which an index has. Who asks compares the rest."""
    return Query({"tail": tail[-TAIL:]}, "by_tail", [("_id", DOWN)])


def due_queries(until: datetime, after: tuple[datetime, str] | None) -> list[Query]:
    """In the order of (time, id), from after the given place on: first what is left of that very time, then what is later.
    Two walks, because one over both would pass again and again through thousands that are due at the same moment."""
    order = [("next_run_at", UP), ("_id", UP)]
    executable: Document = {"status": {"$in": sorted(EXECUTABLE)}}
    if after is None:
        return [Query({"next_run_at": {"$lte": until, **DATE}, **executable}, "due_now", order)]
    at, id = after
    later = Query({"next_run_at": {"$gt": at, "$lte": until, **DATE}, **executable}, "due_now", order)
    if at > until:
        return []
    return [Query({"next_run_at": {"$eq": at, **DATE}, "_id": {"$gt": id}, **executable}, "due_now", order), later]


def under_way_query(after: str | None) -> Query:
    where: Document = {"status": UNDER_WAY}
    if after is not None:
        where["_id"] = {"$gt": after}
    return Query(where, "by_status", [("_id", UP)])


def cancel_query() -> Query:
    where = {"cancel_requested": True, "status": UNDER_WAY, "cancel_requested_at": DATE}
    return Query(where, "to_cancel", [("cancel_requested_at", UP), ("_id", UP)])


# ----------------------------------------------------------------------------------------------------------- executions


def open_query(
    devices: Sequence[str] | None, worker_ids: Sequence[str] | None, unstamped_before: datetime | None, after: str | None
) -> Query:
    """Walks the open rows, which are as many as scripts are under way; by device where devices are given."""
    where: Document = {"active": True}
    if devices is not None:
        where["device_id"] = {"$in": list(dict.fromkeys(devices))}
    if worker_ids is not None:
        where["worker_id"] = {"$in": list(worker_ids)}
    if unstamped_before is not None:
        where |= {"sending_at": None, "created_at": {"$lt": unstamped_before}}
    if after is not None:
        where["_id"] = {"$gt": after}
    return Query(where, "open" if devices is None else "active_device", [("_id", UP)])


def overdue_query(now: datetime) -> Query:
    where = {"active": True, "deadline_at": {"$lt": now, **DATE}, "sending_at": {"$ne": None}}
    return Query(where, "deadline", [("deadline_at", UP), ("_id", UP)])


def closed_queries(after: tuple[datetime, str], until: datetime) -> list[Query]:
    """Those of the same moment first: a batch of executions shares its time."""
    at, id = after
    if at >= until:
        return []
    order = [("finished_at", UP), ("_id", UP)]
    same = Query({"finished_at": {"$eq": at, **DATE}, "_id": {"$gt": id}}, "closed", order)
    return [same, Query({"finished_at": {"$gt": at, "$lt": until, **DATE}}, "closed", order)]


# ---------------------------------------------------------------------------------------------------------------- stats


async def stats(database: Database, since: datetime, until: datetime) -> Stats:
    span: Document = {"finished_at": {"$gte": since, "$lt": until, **DATE}}
    minute = {"$dateTrunc": {"date": "$finished_at", "unit": "minute"}}
    group = {"$group": {"_id": {"minute": minute, "status": "$status", "code": "$error.code"}, "n": {"$sum": 1}}}
    counted = await database[TASKS].aggregate([{"$match": span}, group], hint="finished")
    ended: list[tuple[datetime, str, str | None, int]] = []
    async for document in counted:
        key = document["_id"]
        ended.append((key["minute"], key["status"], key.get("code"), document["n"]))
    fields = {"_id": 0, "finished_at": 1, "first_started_at": 1}
    tasks = await _newest(database, TASKS, "finished", span, fields)
    times = ("wait_ms", "push", "sending_at", "answered_at", "sent_at", "finished_at")
    rows = await _newest(database, EXECUTIONS, "closed", span, {"_id": 0, **dict.fromkeys(times, 1)})
    phases = [(row.get("wait_ms"), *_phases(row)) for row in rows]
    return build_stats(ended, phases, map(_duration_ms, tasks))


async def _newest(database: Database, name: str, index: str, span: Document, fields: Document) -> list[Any]:
    found = database[name].find(span, fields, hint=index, batch_size=NEWEST + 1)
    return await found.sort("finished_at", DOWN).limit(NEWEST).to_list()


def _phases(row: Document) -> tuple[int | None, int | None]:
    """Push and run, as `Execution` makes them from its times."""
    times = (row.get(name) for name in ("sending_at", "answered_at", "sent_at", "finished_at"))
    return phases_ms(row["push"], *times)


def _duration_ms(task: Document) -> int | None:
    started = task.get("first_started_at")
    return None if started is None else (task["finished_at"] - started) // _MS
