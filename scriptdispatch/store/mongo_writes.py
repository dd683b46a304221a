"""How the MongoDB store writes: compare-and-set in batches, inserts whose numbers the store gives, terms.

**Tokens.** Every write leaves its batch's token in each document it changes (`mongo_documents.Cas`), and every statement
passes over documents that have it. So a statement may be sent any number of times, late or twice, and is done once; and
after any failure the question "was it done?" has an answer in the documents. That is why nothing here leans on the driver's
retryable writes: `update_many` has none, they end after the driver's own attempts, and a server that is not in a replica
set has none at all. They are on, and save us a detour; the token decides.

**Unclear outcomes** are made clear by sending the same statement again until the server answers (`insist`), then reading
the tokens back. That answer waits for a majority even if there was nothing left to do: the server then waits for all that
it has seen, so what is read back is durable.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, repeat
from typing import Any, Final, TypeVar

from bson import ObjectId
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import DuplicateKeyError

from scriptdispatch.domain.changes import Applied, ChangeExecution, ChangeTask, InsertTask
from scriptdispatch.errors import StaleTerm, StoreUnavailable
from scriptdispatch.store.mongo_commands import DURABLE, SOON, Collection, Concern, insert_new, update
from scriptdispatch.store.mongo_documents import (
    SCRIPT,
    Cas,
    Statement,
    execution_cas,
    in_parts,
    statements,
    task_cas,
    task_document,
)
from scriptdispatch.store.mongo_errors import TRANSLATED, Said, said, translated
from scriptdispatch.store.mongo_schema import BY_ID, EXECUTIONS, META, SCRIPTS, TASKS
from scriptdispatch.store.port import Document

R = TypeVar("R")
Database = AsyncDatabase[Document]

WON: Final = Applied(won=True)
LOST: Final = Applied(won=False)
INSIST_S: Final = 8.0  # how long an unclear outcome is pursued before the caller is told that it is unclear
ROUNDS: Final = 20  # of an insert that somebody else was faster than; each is one step of somebody else's
KNOWN_SCRIPTS: Final = 10_000


async def insist(attempt: Callable[[], Awaitable[R]]) -> R:
    """What the attempt answers. Unclear: again, until the time is over. It must not matter how often it is carried out."""
    deadline = time.monotonic() + INSIST_S
    again, pause_s = False, 0.02
    while True:
        try:
            return await attempt()
        except TRANSLATED as error:
            verdict = said(error)
            hopeless = verdict in (Said.REFUSED, Said.SETTINGS)
            if hopeless or (verdict is Said.NOT_DONE and not again):
                raise translated(error, writing=True) from error
            if time.monotonic() + pause_s > deadline:
                raise StoreUnavailable(f"MongoDB does not answer: {error}"[:300], outcome_unknown=True) from error
        again = True
        await asyncio.sleep(pause_s)
        pause_s = min(0.5, pause_s * 2)


# -------------------------------------------------------------------------------------------------------------- changes


async def change_tasks(database: Database, changes: Sequence[ChangeTask], token: ObjectId) -> list[Applied]:
    return await _compare_and_set(database[TASKS], [task_cas(change) for change in changes], token)


async def change_executions(database: Database, changes: Sequence[ChangeExecution], token: ObjectId) -> list[Applied]:
    return await _compare_and_set(database[EXECUTIONS], [execution_cas(change) for change in changes], token)


async def _compare_and_set(collection: Collection, changes: Sequence[Cas], token: ObjectId) -> list[Applied]:
    """One command for all, whatever they are; a second one only if somebody lost."""
    prepared = statements(changes, token)
    operations = [_operation(statement) for statement in prepared]

    async def attempt() -> list[Applied]:
        if (await update(collection, operations)).modified == len(changes):
            return [WON] * len(changes)
        # Some lost; or won by an earlier attempt, whose answer we did not hear.
        winners = await _winners(collection, changes, token)
        return [WON if change.id in winners else LOST for change in changes]

    return await insist(attempt)


def _operation(statement: Statement) -> Document:
    return {"q": statement.filter, "u": statement.update, "multi": len(statement.ids) > 1, "hint": BY_ID}


async def _winners(collection: Collection, changes: Sequence[Cas], token: ObjectId) -> set[str]:
    """Those that have the token. Where it can have been written over (`op`), a winner that has moved on counts as lost:
    its caller reads again, as every loser does."""
    by_mark: dict[str, list[str]] = {}
    for change in changes:
        by_mark.setdefault(change.mark, []).append(change.id)
    winners: set[str] = set()
    for mark, ids in by_mark.items():
        found = collection.find({"_id": {"$in": ids}, mark: token}, {"_id": 1}, hint=BY_ID, batch_size=len(ids) + 1)
        winners.update([document["_id"] async for document in found])
    return winners


# ---------------------------------------------------------------------------------------------------------------- tasks


class TaskInserts:
    """Remembers which scripts are stored: they never change and are never removed, so each is sent once by a process, and is
    durable before any task of it. `soon`: the tasks themselves may be durable a little later (`port.Store.commit`)."""

    def __init__(self, database: Database, *, soon: bool = False) -> None:
        self._tasks: Collection = database[TASKS]
        self._scripts: Collection = database[SCRIPTS]
        self._known: dict[str, None] = {}
        self._concern = SOON if soon else DURABLE

    async def flush(self, inserts: Sequence[InsertTask], token: ObjectId) -> list[Applied]:
        concerns = chain((self._concern,), repeat(DURABLE))  # what is sent again waits
        return await insist(lambda: self._insert(inserts, next(concerns)))

    async def _insert(self, inserts: Sequence[InsertTask], concern: Concern) -> list[Applied]:
        """Scripts before their tasks: a task whose script is missing could never be sent."""
        outcomes: dict[int, Applied] = {}
        todo = dict(enumerate(inserts))
        for _ in range(ROUNDS):
            outcomes |= await self._taken_keys(todo)
            todo = {place: insert for place, insert in todo.items() if place not in outcomes}
            if not todo:
                return [outcomes[place] for place in range(len(inserts))]
            await self._store_scripts(list(todo.values()))
            places = list(todo)
            done = await insert_new(self._tasks, [task_document(insert) for insert in todo.values()], concern)
            won = Applied(won=True, reign=done.reign)
            # The same id again is won: an earlier call whose answer was lost. A key that is taken: who has it?
            outcomes |= {places[i]: won for i in range(len(places)) if done.refused.get(i, ("_id",)) == ("_id",)}
        raise StoreUnavailable("dedupe keys changed hands all the time")

    async def _taken_keys(self, todo: dict[int, InsertTask]) -> dict[int, Applied]:
        """Looked at before the insert, so that the script of a task that is not wanted is not stored either."""
        keys = [insert.task.dedupe_key for insert in todo.values() if insert.task.dedupe_key is not None]
        if not keys:
            return {}
        found = self._tasks.find({"dedupe_key": {"$in": keys}}, {"dedupe_key": 1}, hint="dedupe")
        holders = {document["dedupe_key"]: document["_id"] async for document in found}
        outcomes: dict[int, Applied] = {}
        for place, insert in todo.items():
            holder = holders.get(insert.task.dedupe_key)
            if holder is not None:
                outcomes[place] = WON if holder == insert.task.id else Applied(won=False, holder=holder)
        return outcomes

    async def _store_scripts(self, inserts: Sequence[InsertTask]) -> None:
        wanted = {i.script.id: i.script for i in inserts if i.script is not None and i.script.id not in self._known}
        for part in in_parts(list(wanted.values()), lambda script: len(script.content), len(wanted)):
            await insert_new(self._scripts, [SCRIPT.to_document(script) for script in part])
            self._known |= dict.fromkeys(script.id for script in part)
        while len(self._known) > KNOWN_SCRIPTS:
            del self._known[next(iter(self._known))]


async def reign(database: Database) -> bytes | None:
    """The one under which all that was answered so far is durable. A write that finds nothing to do waits for all that the
    server has seen."""
    nothing = {"q": {"_id": "nothing"}, "u": {"$set": {"value": 0}}, "multi": False, "hint": BY_ID}
    return (await insist(lambda: update(database[META], [nothing]))).reign


# ---------------------------------------------------------------------------------------------------------------- terms


async def check_term(database: Database, term: int) -> None:
    """Raises StaleTerm if a newer leader's term has been seen; else this one is seen from now on.

    One conditional write just before the changes, not in one with them: a leader that is stopped between the two can still
    land one batch after its successor's first. Every change in it compares what it read, so it is done once, by whoever
    comes first; what the term spares us is a stale leader that goes on."""
    meta: Collection = database[META]

    async def attempt() -> None:
        try:
            await meta.update_one({"_id": "term", "value": {"$lte": term}}, {"$set": {"value": term}}, upsert=True)
        except DuplicateKeyError:
            # It is there and not ≤ ours; or somebody made the document at this moment.
            seen: Any = await meta.find_one({"_id": "term"})
            if seen is not None and seen["value"] > term:
                raise StaleTerm(f"term {term} is over: term {seen['value']} has written already") from None
            await meta.update_one({"_id": "term"}, {"$max": {"value": term}})

    await insist(attempt)
