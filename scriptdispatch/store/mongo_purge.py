"""Clean-up in MongoDB: final tasks with all that belongs to them, in chunks of a few statements each.

The delete of the task is conditional and decides. Lines go before it (a task that a user restarts at this moment has lost
only lines that were due to go); rows after it. Whoever dies between leaves rows without a task, which the next clean-up that
touches their device removes.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from scriptdispatch.domain.model import FINAL
from scriptdispatch.store import mongo_logs
from scriptdispatch.store.mongo_numbers import highest
from scriptdispatch.store.mongo_schema import BY_ID, DATE, EXECUTIONS, TASKS, UP
from scriptdispatch.store.mongo_writes import Database
from scriptdispatch.store.port import Document

TASKS_PER_CHUNK: Final = 100


async def purge(database: Database, before: datetime, limit: int) -> int:
    if limit <= 0:
        return 0
    old = await (
        database[TASKS]
        .find(_purgeable(before), {"_id": 1}, hint="finished", batch_size=min(limit, 1000) + 1)
        .sort("finished_at", UP)
        .limit(limit)
        .to_list()
    )
    ids = [document["_id"] for document in old]
    removed = 0
    for i in range(0, len(ids), TASKS_PER_CHUNK):
        removed += await _purge_chunk(database, ids[i : i + TASKS_PER_CHUNK], before)
    return removed


def _purgeable(before: datetime) -> Document:
    return {"finished_at": {"$lt": before, **DATE}, "status": {"$in": sorted(FINAL)}}


async def _purge_chunk(database: Database, ids: Sequence[str], before: datetime) -> int:
    ids = await _without_open_rows(database, ids)
    if not ids:
        return 0
    await mongo_logs.delete_of_tasks(database, ids)
    await database[TASKS].delete_many({"_id": {"$in": ids}, **_purgeable(before)}, hint=BY_ID)
    gone = sorted(set(ids) - await _existing(database, ids))
    await _delete_rows(database, gone)
    return len(gone)


async def _without_open_rows(database: Database, ids: Sequence[str]) -> list[str]:
    where = {"task_id": {"$in": list(ids)}, "active": True}
    found = database[EXECUTIONS].find(where, {"task_id": 1}, hint="attempt")
    still_open = {document["task_id"] async for document in found}
    return [id for id in ids if id not in still_open]


async def _existing(database: Database, ids: Iterable[str]) -> set[str]:
    wanted = list(ids)
    found = database[TASKS].find({"_id": {"$in": wanted}}, {"_id": 1}, hint=BY_ID, batch_size=len(wanted) + 1)
    return {document["_id"] async for document in found}


async def _delete_rows(database: Database, gone: Sequence[str]) -> None:
    """The rows of tasks that are gone. The row with a device's highest fence stays, so that the next fence is above
    every one that was ever given; one that was kept for that reason before goes when a higher one is kept instead."""
    rows = database[EXECUTIONS]
    fields = {"task_id": 1, "device_id": 1, "fencing_token": 1}
    own = await rows.find({"task_id": {"$in": list(gone)}}, fields, hint="attempt").to_list()
    reach: dict[str, int] = {}
    for row in own:
        if row.get("device_id") is not None:
            reach[row["device_id"]] = max(reach.get(row["device_id"], 0), row["fencing_token"])
    doomed = [row["_id"] for row in own if row.get("device_id") is None]
    if reach:
        top = await highest(rows, "device_id", "fencing_token", "fence", reach)
        upto = [{"device_id": id, "fencing_token": {"$lte": fence}} for id, fence in reach.items()]
        found = await rows.find({"$or": upto, "active": False}, fields).to_list()
        there = await _existing(database, {row["task_id"] for row in found})
        doomed += [
            row["_id"]
            for row in found
            if row["task_id"] not in there and row["fencing_token"] < top.get(row["device_id"], 0)
        ]
    if doomed:
        await rows.delete_many({"_id": {"$in": doomed}, "active": False}, hint=BY_ID)
