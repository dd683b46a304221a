"""Log lines in MongoDB: `_id` is the cursor, a number that rises in order of arrival; (execution, seq) is unique.

Cursors come from a counter, a block for each batch in one step. Two processes that append to one task at once may store
their blocks in the other order; a task's lines come through one consumer but for the moment in which another takes over.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from bson import ObjectId
from pymongo import ReturnDocument

from scriptdispatch.domain.model import LogLine, StoredLine
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.store.mongo_commands import insert_new, update
from scriptdispatch.store.mongo_documents import LOG, log_document
from scriptdispatch.store.mongo_schema import BY_ID, DOWN, EXECUTIONS, LOGS, META, UP
from scriptdispatch.store.mongo_writes import ROUNDS, Database, insist
from scriptdispatch.store.port import Document, LogQuery

LINES_PER_DELETE: Final = 2_000
_Key = tuple[str, int]


async def append(
    database: Database, lines: Sequence[LogLine], limit: int, now: datetime, there: Mapping[str, int] | None
) -> int:
    """Stores, then counts. Whoever dies between the two leaves `log_lines` short by this batch: the lines are there, and
    delivered again they are known. (Counting first would let a repeat count twice.)"""
    if there is None:
        there = await _lines_there(database, lines)
    cursor = await _block(database, len(lines))
    wanted, dropped = await _within_limit(database, lines, there, limit)
    stored = await _store(database, wanted, cursor, now)
    await _count(database, stored, dropped)
    return stored.total()


async def _block(database: Database, size: int) -> int:
    """The first cursor of a block that nobody else gets. Asked again, it takes another block: cursors have gaps."""

    async def attempt() -> int:
        counter: Any = await database[META].find_one_and_update(
            {"_id": "log_cursor"}, {"$inc": {"value": size}}, upsert=True, return_document=ReturnDocument.AFTER
        )
        return int(counter["value"]) - size + 1

    return await insist(attempt)


async def _lines_there(database: Database, lines: Sequence[LogLine]) -> dict[str, int]:
    ids = list({line.execution_id for line in lines})
    found = database[EXECUTIONS].find({"_id": {"$in": ids}}, {"log_lines": 1}, hint=BY_ID, batch_size=len(ids) + 1)
    return {document["_id"]: document.get("log_lines", 0) async for document in found}


async def _within_limit(
    database: Database, lines: Sequence[LogLine], there: Mapping[str, int], limit: int
) -> tuple[list[LogLine], Counter[str]]:
    """The lines to store, and how many of each execution are beyond its limit. Far from it nothing has to be looked up."""
    arriving = Counter(line.execution_id for line in lines)
    full = {id for id, n in arriving.items() if there.get(id, 0) + n > limit}
    dropped: Counter[str] = Counter()
    if not full:
        return list(lines), dropped
    # Here it matters which of them are known: a line that is delivered again takes no room and is no dropped line.
    known = await _known(database, [line for line in lines if line.execution_id in full])
    wanted: list[LogLine] = []
    taken = Counter({id: there.get(id, 0) for id in full})
    for line in lines:
        if line.execution_id in full:
            if line.seq is not None:
                if (line.execution_id, line.seq) in known:
                    continue
                known.add((line.execution_id, line.seq))
            if taken[line.execution_id] >= limit:
                dropped[line.execution_id] += 1
                continue
            taken[line.execution_id] += 1
        wanted.append(line)
    return wanted, dropped


async def _known(database: Database, lines: Iterable[LogLine]) -> set[_Key]:
    numbers: dict[str, list[int]] = {}
    for line in lines:
        if line.seq is not None:
            numbers.setdefault(line.execution_id, []).append(line.seq)
    known: set[_Key] = set()
    for id, seqs in numbers.items():
        where = {"execution_id": id, "seq": {"$in": seqs, "$type": "number"}}
        found = database[LOGS].find(where, {"_id": 0, "seq": 1}, hint="once", batch_size=len(seqs) + 1)
        known.update([(id, document["seq"]) async for document in found])
    return known


async def _store(database: Database, lines: Sequence[LogLine], cursor: int, now: datetime) -> Counter[str]:
    """How many of each execution were new. The block of cursors is ours alone: sent again after an unclear outcome, a line
    that is there under its cursor was stored by us, also one without a number of its own."""
    stored: Counter[str] = Counter()
    todo = list(lines)
    for _ in range(ROUNDS):
        if not todo:
            return stored
        made = [log_document(line, cursor + i, now) for i, line in enumerate(todo)]
        refused = await insist(partial(insert_new, database[LOGS], made))
        ours = await _ours(database, [made[i] for i, fields in refused.items() if fields == ("_id",)])
        stored.update(line.execution_id for i, line in enumerate(todo) if i not in refused or cursor + i in ours)
        # A cursor that somebody else has: the counter had fallen back (a store restored from a copy). A new block.
        todo = [todo[i] for i, fields in refused.items() if fields == ("_id",) and cursor + i not in ours]
        if todo:
            cursor = await _block(database, len(todo))
    raise StoreUnavailable("cursors of log lines were taken all the time", outcome_unknown=True)


async def _ours(database: Database, made: Sequence[Document]) -> set[int]:
    """Of these, the cursors under which exactly this line is stored."""
    if not made:
        return set()
    wanted = {document["_id"]: document for document in made}
    found = database[LOGS].find({"_id": {"$in": list(wanted)}}, hint=BY_ID, batch_size=len(wanted) + 1)
    return {document["_id"] async for document in found if document == wanted[document["_id"]]}


async def _count(database: Database, stored: Counter[str], dropped: Counter[str]) -> None:
    """Executions with equal numbers share a statement. Its token keeps it from being counted twice (see `mongo_writes`)."""
    token = ObjectId()
    groups: dict[tuple[int, int], list[str]] = {}
    for id in {*stored, *dropped}:
        groups.setdefault((stored[id], dropped[id]), []).append(id)
    updates = [
        {
            "q": {"_id": {"$in": ids}, "op_lines": {"$ne": token}},
            "u": {"$inc": {"log_lines": new, "log_dropped": lost}, "$set": {"op_lines": token}},
            "multi": True,
            "hint": BY_ID,
        }
        for (new, lost), ids in groups.items()
        if new or lost
    ]
    if updates:
        await insist(partial(update, database[EXECUTIONS], updates))


# ---------------------------------------------------------------------------------------------------------------- reads


async def read(database: Database, query: LogQuery) -> list[StoredLine]:
    backwards = query.tail is not None or (query.before is not None and query.after is None)
    limit = query.limit if query.tail is None else query.tail
    if limit <= 0:
        return []
    order = DOWN if backwards else UP
    found = await (
        database[LOGS]
        .find(log_filter(query), {"stored_at": 0}, hint="by_task", batch_size=min(limit, 1000) + 1)
        .sort([("task_id", order), ("_id", order)])
        .limit(limit)
        .to_list()
    )
    lines = [StoredLine(cursor=int(document.pop("_id")), line=LOG.from_document(document)) for document in found]
    return lines[::-1] if backwards else lines


def log_filter(query: LogQuery) -> Document:
    span: Document = {}
    if query.after is not None:
        span["$gt"] = query.after
    if query.before is not None:
        span["$lt"] = query.before
    where: Document = {"task_id": query.task_id}
    if span:
        where["_id"] = span
    if query.execution_id is not None:
        where["execution_id"] = query.execution_id
    if query.stream is not None:
        where["stream"] = query.stream
    if query.contains:
        # No regular expression: the text is a text, whatever signs it has, and costs what its length says.
        where["$expr"] = {"$gte": [{"$indexOfBytes": ["$content", {"$literal": query.contains}]}, 0]}
    return where


# --------------------------------------------------------------------------------------------------------------- delete


async def delete_of_tasks(database: Database, task_ids: Sequence[str]) -> None:
    """In pieces: one delete of all could take longer than any call may."""
    where = {"task_id": {"$in": list(task_ids)}}
    while await _delete_piece(database, where, "by_task", LINES_PER_DELETE) == LINES_PER_DELETE:
        pass


async def delete_older(database: Database, before: datetime, limit: int) -> int:
    """By cursor, which is the order of arrival, so it stops at the first line that is young enough."""
    removed = 0
    while removed < limit:
        piece = min(LINES_PER_DELETE, limit - removed)
        found = (
            await database[LOGS]
            .find({}, {"stored_at": 1}, hint=BY_ID, batch_size=piece + 1)
            .sort("_id", UP)
            .limit(piece)
            .to_list()
        )
        old = [document["_id"] for document in found if document["stored_at"] < before]
        if old:
            await database[LOGS].delete_many({"_id": {"$in": old}}, hint=BY_ID)
        removed += len(old)
        if len(old) < piece:
            break
    return removed


async def _delete_piece(database: Database, where: Document, index: str, size: int) -> int:
    found = await database[LOGS].find(where, {"_id": 1}, hint=index, batch_size=size + 1).limit(size).to_list()
    if found:
        await database[LOGS].delete_many({"_id": {"$in": [document["_id"] for document in found]}}, hint=BY_ID)
    return len(found)
