"""Log lines in MongoDB: what one batch brings of one execution is one document, a block of lines.

A block's `_id` is the cursor of its first line; the next ones follow. Cursors rise in order of arrival and come from a
counter, a span for each batch in one step. `seqs` has the numbers of the block's lines, and a unique index over (execution,
seqs) lets no line in twice, whichever blocks it came in; lines without a number are in blocks of their own, without `seqs`.

Two processes that append to one task at once may store their blocks in the other order; a task's lines come through one
consumer but for the moment in which another takes over.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

from bson import ObjectId
from msgspec import Struct
from pymongo import ReturnDocument

from scriptdispatch.domain.changes import ChangeExecution
from scriptdispatch.domain.model import LogLine, StoredLine
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.store.mongo_commands import insert_new, update
from scriptdispatch.store.mongo_documents import LINES_OF_BLOCK, CountedClose, block_document, block_lines, blocks
from scriptdispatch.store.mongo_schema import BY_ID, DOWN, EXECUTIONS, LOGS, META, ONCE, UP
from scriptdispatch.store.mongo_writes import ROUNDS, Database, insist
from scriptdispatch.store.port import Document, LogQuery

BLOCKS_PER_DELETE: Final = 2_000
_Key = tuple[str, int]


class Stored(Struct, frozen=True):
    """Of each execution: new lines, lines beyond the limit; and those of which a line was there already."""

    new: Counter[str]
    dropped: Counter[str]
    met_again: set[str]

    def counted(self, change: ChangeExecution) -> ChangeExecution:
        """The change that also counts what is stored of its execution. Where lines were met again it does not."""
        id = change.execution_id
        if id in self.met_again or not (self.new[id] or self.dropped[id]):
            return change
        lines, dropped = self.new[id], self.dropped[id]
        return CountedClose(execution_id=id, expect=change.expect, set=change.set, lines=lines, dropped=dropped)

    def without(self, counted: Container[str]) -> "Stored":
        """What is still to be counted."""
        new = Counter({id: n for id, n in self.new.items() if id not in counted})
        dropped = Counter({id: n for id, n in self.dropped.items() if id not in counted or id in self.met_again})
        return Stored(new, dropped, self.met_again)


async def append(
    database: Database, lines: Sequence[LogLine], limit: int, now: datetime, there: Mapping[str, int] | None
) -> Stored:
    """Stores; `count` is to follow. Whoever dies between the two leaves `log_lines` short by this batch. Its lines are
    there; delivered again they are met again, and then the execution's lines are counted anew."""
    if there is None:
        there = await _lines_there(database, lines)
    cursor = await _span(database, len(lines))
    wanted, dropped = await _within_limit(database, _once_each(lines), there, limit)
    new, met_again = await _store(database, wanted, cursor, now)
    return Stored(new, dropped, met_again)


async def count(database: Database, stored: Stored) -> None:
    """Executions with equal numbers share a statement. Its token keeps it from being counted twice (see `mongo_writes`)."""
    token = ObjectId()
    groups: dict[tuple[int, int], list[str]] = {}
    for id in {*stored.new, *stored.dropped} - stored.met_again:
        groups.setdefault((stored.new[id], stored.dropped[id]), []).append(id)
    updates = [
        _statement({"$in": ids}, {"$inc": {"log_lines": new, "log_dropped": lost}}, token)
        for (new, lost), ids in groups.items()
        if new or lost
    ]
    for id, lines in (await _recount(database, stored.met_again)).items():
        updates.append(_statement(id, {"$set": {"log_lines": lines}, "$inc": {"log_dropped": stored.dropped[id]}}, token))
    if updates:
        await insist(partial(update, database[EXECUTIONS], updates))


def _statement(id: Any, change: Document, token: ObjectId) -> Document:
    change["$set"] = {**change.get("$set", {}), "op_lines": token}
    return {"q": {"_id": id, "op_lines": {"$ne": token}}, "u": change, "multi": True, "hint": BY_ID}


async def _recount(database: Database, ids: Iterable[str]) -> dict[str, int]:
    """What is stored of them, numbered or not."""
    wanted = list(ids)
    if not wanted:
        return {}
    rows = database[EXECUTIONS].find({"_id": {"$in": wanted}}, {"task_id": 1}, hint=BY_ID, batch_size=len(wanted) + 1)
    tasks = list({document["task_id"] async for document in rows})
    cursor = await database[LOGS].aggregate(
        [
            {"$match": {"task_id": {"$in": tasks}, "execution_id": {"$in": wanted}}},
            {"$group": {"_id": "$execution_id", "lines": {"$sum": "$n"}}},
        ],
        hint="by_task",
    )
    return {document["_id"]: document["lines"] async for document in cursor}


async def _span(database: Database, size: int) -> int:
    """The first of as many cursors that nobody else gets. Asked again, it takes others: cursors have gaps."""

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


def _once_each(lines: Sequence[LogLine]) -> list[LogLine]:
    """The index looks from block to block, not inside one."""
    seen: set[_Key] = set()
    found = []
    for line in lines:
        if line.seq is not None:
            if (line.execution_id, line.seq) in seen:
                continue
            seen.add((line.execution_id, line.seq))
        found.append(line)
    return found


async def _known(database: Database, lines: Iterable[LogLine]) -> set[_Key]:
    numbers: dict[str, list[int]] = {}
    for line in lines:
        if line.seq is not None:
            numbers.setdefault(line.execution_id, []).append(line.seq)
    known: set[_Key] = set()
    for id, seqs in numbers.items():
        where = {"execution_id": id, "seqs": {"$in": seqs}}
        found = database[LOGS].find(where, {"_id": 0, "seqs": 1}, hint=ONCE, batch_size=len(seqs) + 1)
        known.update([(id, seq) async for document in found for seq in document["seqs"]])
    return known


async def _store(database: Database, lines: Sequence[LogLine], cursor: int, now: datetime) -> tuple[Counter[str], set[str]]:
    """How many of each execution were new, and of which some were not. The span of cursors is ours alone: sent again after
    an unclear outcome, a block that is there under its cursor was stored by us, also one without numbers."""
    new: Counter[str] = Counter()
    met_again: set[str] = set()
    todo = list(lines)
    for _ in range(ROUNDS):
        if not todo:
            return new, met_again
        made = blocks(todo)
        documents = []
        for block in made:
            documents.append(block_document(block, cursor, now))
            cursor += len(block)
        refused = (await insist(partial(insert_new, database[LOGS], documents))).refused
        ours = await _ours(database, [documents[i] for i, fields in refused.items() if fields == ("_id",)])
        clashing: list[LogLine] = []
        todo = []
        for i, block in enumerate(made):
            if i not in refused or documents[i]["_id"] in ours:
                new[block[0].execution_id] += len(block)
            elif refused[i] == ("_id",):
                todo += block  # a cursor that somebody else has: the counter had fallen back (a store restored from a copy)
            else:
                clashing += block
        if clashing:
            met_again |= {line.execution_id for line in clashing}
            known = await _known(database, clashing)
            todo += [line for line in clashing if line.seq is None or (line.execution_id, line.seq) not in known]
        if todo:
            cursor = await _span(database, len(todo))
    raise StoreUnavailable("cursors of log lines were taken all the time", outcome_unknown=True)


async def _ours(database: Database, made: Sequence[Document]) -> set[int]:
    """Of these, the cursors under which exactly this block is stored."""
    if not made:
        return set()
    wanted = {document["_id"]: document for document in made}
    found = database[LOGS].find({"_id": {"$in": list(wanted)}}, hint=BY_ID, batch_size=len(wanted) + 1)
    return {document["_id"] async for document in found if document == wanted[document["_id"]]}


# ---------------------------------------------------------------------------------------------------------------- reads


async def read(database: Database, query: LogQuery) -> list[StoredLine]:
    backwards = query.tail is not None or (query.before is not None and query.after is None)
    limit = query.limit if query.tail is None else query.tail
    if limit <= 0:
        return []
    order = DOWN if backwards else UP
    lines: list[StoredLine] = []
    found = (
        database[LOGS]
        .find(block_filter(query), {"stored_at": 0}, hint="by_task", batch_size=max(10, min(1_000, limit // 20)))
        .sort([("task_id", order), ("_id", order)])
    )
    async with found:
        async for document in found:
            wanted = [line for line in block_lines(document) if _is_wanted(line, query)]
            lines += wanted[::-1] if backwards else wanted
            if len(lines) >= limit:
                break
    lines = lines[:limit]
    return lines[::-1] if backwards else lines


def block_filter(query: LogQuery) -> Document:
    """Blocks that may have lines that are asked for."""
    span: Document = {}
    if query.after is not None:
        span["$gt"] = query.after - LINES_OF_BLOCK
    if query.before is not None:
        span["$lt"] = query.before
    where: Document = {"task_id": query.task_id}
    if span:
        where["_id"] = span
    if query.execution_id is not None:
        where["execution_id"] = query.execution_id
    if query.stream is not None:
        where["streams"] = query.stream
    if query.contains:
        # No regular expression: the text is a text, whatever signs it has, and costs what its length says.
        at = {"$indexOfBytes": ["$$content", {"$literal": query.contains}]}
        has = {"$map": {"input": "$contents", "as": "content", "in": {"$gte": [at, 0]}}}
        where["$expr"] = {"$anyElementTrue": [has]}
    return where


def _is_wanted(stored: StoredLine, query: LogQuery) -> bool:
    return (
        (query.after is None or stored.cursor > query.after)
        and (query.before is None or stored.cursor < query.before)
        and (query.stream is None or stored.line.stream == query.stream)
        and (not query.contains or query.contains in stored.line.content)
    )


# --------------------------------------------------------------------------------------------------------------- delete


async def delete_of_tasks(database: Database, task_ids: Sequence[str]) -> None:
    """In pieces: one delete of all could take longer than any call may."""
    where = {"task_id": {"$in": list(task_ids)}}
    while await _delete_piece(database, where, "by_task", BLOCKS_PER_DELETE) == BLOCKS_PER_DELETE:
        pass


async def delete_older(database: Database, before: datetime, limit: int) -> int:
    """By cursor, which is the order of arrival, so it stops at the first block that is young enough. `limit` is of lines:
    it ends with the block that reaches it."""
    removed = 0
    while removed < limit:
        piece = min(BLOCKS_PER_DELETE, limit - removed)
        found = (
            await database[LOGS]
            .find({}, {"stored_at": 1, "n": 1}, hint=BY_ID, batch_size=piece + 1)
            .sort("_id", UP)
            .limit(piece)
            .to_list()
        )
        old: list[int] = []
        for document in found:
            if document["stored_at"] >= before or removed >= limit:
                break
            old.append(document["_id"])
            removed += document["n"]
        if old:
            await database[LOGS].delete_many({"_id": {"$in": old}}, hint=BY_ID)
        if len(old) < piece:
            break
    return removed


async def _delete_piece(database: Database, where: Document, index: str, size: int) -> int:
    found = await database[LOGS].find(where, {"_id": 1}, hint=index, batch_size=size + 1).limit(size).to_list()
    if found:
        await database[LOGS].delete_many({"_id": {"$in": [document["_id"] for document in found]}}, hint=BY_ID)
    return len(found)
