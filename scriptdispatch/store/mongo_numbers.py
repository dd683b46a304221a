"""W3 on MongoDB: inserts executions and gives each its fence and attempt, highest + 1, without gaps.

The numbers are a guess (the lock service's hint for the fence, "the first" for the attempt; else read) that the unique
indexes confirm or refuse: two who guess the same number cannot both have it, and the later one numbers anew, from what it
reads."""

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from bson import ObjectId
from msgspec.structs import replace
from pymongo.asynchronous.collection import AsyncCollection

from scriptdispatch.domain.changes import Applied, InsertExecution
from scriptdispatch.domain.model import Execution
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.store.mongo_commands import insert_new
from scriptdispatch.store.mongo_documents import EXECUTION
from scriptdispatch.store.mongo_schema import BY_ID, EXECUTIONS
from scriptdispatch.store.mongo_writes import ROUNDS, Database, insist
from scriptdispatch.store.port import Document

ACTIVE: Final = ("device_id",)  # the fields of the index on open rows


class ExecutionInserts:
    def __init__(self, database: Database) -> None:
        self._rows: AsyncCollection[Document] = database[EXECUTIONS]

    async def flush(self, inserts: Sequence[InsertExecution], token: ObjectId) -> list[Applied]:
        """The row's own id is its token: a repeated insert finds it and takes the numbers it was given."""
        return await insist(partial(self._insert, inserts))

    async def _insert(self, inserts: Sequence[InsertExecution]) -> list[Applied]:
        outcomes: dict[int, Applied] = {}
        todo = {place: insert.execution for place, insert in enumerate(inserts)}
        hints = {i.execution.device_id: i.fence_hint for i in inserts if i.execution.device_id and i.fence_hint is not None}
        guess = True
        for _ in range(ROUNDS):
            numbered = await self._number(todo, hints if guess else {}, guess)
            documents = [EXECUTION.to_document(row) for row in numbered.values()]
            refused = (await insert_new(self._rows, documents)).refused
            places = list(todo)
            outcomes |= {place: _won(numbered[place]) for i, place in enumerate(places) if i not in refused}
            if not refused:
                return [outcomes[place] for place in range(len(inserts))]
            outcomes |= await self._sort_out({places[i]: (todo[places[i]], fields) for i, fields in refused.items()})
            todo = {place: row for place, row in todo.items() if place not in outcomes}
            if not todo:
                return [outcomes[place] for place in range(len(inserts))]
            guess = False
        raise StoreUnavailable("numbers of executions were taken by others all the time")

    # --- numbers

    async def _number(self, todo: dict[int, Execution], hints: dict[str, int], guess: bool) -> dict[int, Execution]:
        """The rows with their numbers, guessed the first time, read after a guess was wrong."""
        fences = dict(hints)
        attempts = {row.task_id: 0 for row in todo.values() if _is_first(row)} if guess else {}
        devices = {row.device_id for row in todo.values() if row.device_id is not None} - fences.keys()
        tasks = {row.task_id for row in todo.values()} - attempts.keys()
        read_fences, read_attempts = await asyncio.gather(
            self._highest("device_id", "fencing_token", "fence", devices),
            self._highest("task_id", "attempt", "attempt", tasks),
        )
        fences |= read_fences
        attempts |= read_attempts
        return {place: _numbered(row, attempts, fences) for place, row in todo.items()}

    async def _highest(self, owner: str, number: str, index: str, wanted: Iterable[str]) -> dict[str, int]:
        return await highest(self._rows, owner, number, index, wanted)

    # --- refused

    async def _sort_out(self, refused: dict[int, tuple[Execution, tuple[str, ...]]]) -> dict[int, Applied]:
        """Ours already, or busy. The others (also where the one that was in the way is gone by now) are to try again."""
        devices = [row.device_id for row, fields in refused.values() if fields == ACTIVE]
        ours, holders = await asyncio.gather(
            self._ours([row.id for row, _ in refused.values()]), self._holders([id for id in devices if id is not None])
        )
        outcomes: dict[int, Applied] = {}
        for place, (row, fields) in refused.items():
            if mine := ours.get(row.id):
                outcomes[place] = Applied(won=True, attempt=mine["attempt"], fencing_token=mine.get("fencing_token"))
            elif fields == ACTIVE and row.device_id in holders:
                outcomes[place] = Applied(won=False, holder=holders[row.device_id])
        return outcomes

    async def _ours(self, ids: Sequence[str]) -> dict[str, Any]:
        fields = {"attempt": 1, "fencing_token": 1}
        found = self._rows.find({"_id": {"$in": list(ids)}}, fields, hint=BY_ID, batch_size=len(ids) + 1)
        return {document["_id"]: document async for document in found}

    async def _holders(self, devices: Sequence[str]) -> dict[str | None, str]:
        if not devices:
            return {}
        where = {"active": True, "device_id": {"$in": list(devices)}}
        found = self._rows.find(where, {"device_id": 1}, hint="active_device", batch_size=len(devices) + 1)
        return {document["device_id"]: document["_id"] async for document in found}


def _won(row: Execution) -> Applied:
    return Applied(won=True, attempt=row.attempt, fencing_token=row.fencing_token)


def _is_first(row: Execution) -> bool:
    """Probably its task's first: then nothing has to be read. A first one is never removed before its task."""
    return row.round == 1 and row.previous_execution_id is None


def _numbered(row: Execution, attempts: dict[str, int], fences: dict[str, int]) -> Execution:
    fence = None if row.device_id is None else fences.get(row.device_id, 0) + 1
    return replace(row, attempt=attempts.get(row.task_id, 0) + 1, fencing_token=fence)


async def highest(
    rows: AsyncCollection[Document], owner: str, number: str, index: str, wanted: Iterable[str]
) -> dict[str, int]:
    """The highest number of each owner: one step in the index for each, however many rows it has."""
    owners = sorted(wanted)
    if not owners:
        return {}
    cursor = await rows.aggregate(
        [
            {"$match": {owner: {"$in": owners}}},
            {"$sort": {owner: -1, number: -1}},
            {"$group": {"_id": f"${owner}", "number": {"$first": f"${number}"}}},
        ],
        hint=index,
        batchSize=len(owners) + 1,
    )
    return {document["_id"]: document["number"] async for document in cursor if document["number"] is not None}
