"""The store in MongoDB (6.0 or newer, a replica set for anything that matters): majority and journaled writes, reads from
the primary, one client per process.

What becomes of records is in `mongo_documents`, of changes in `mongo_writes` and `mongo_numbers`, of callers that come
at the same time in `mongo_lanes`, of the driver's errors in `mongo_errors`; the indexes are in `mongo_schema`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
import pymongo
from pymongo import AsyncMongoClient
from pymongo.errors import DuplicateKeyError
from pymongo.read_concern import ReadConcern

from scriptdispatch import crashpoints, logs
from scriptdispatch.clock import Clock
from scriptdispatch.domain.changes import Applied, Change, ChangeExecution, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import (
    Execution,
    History,
    LogLine,
    Quarantined,
    Script,
    Status,
    StoredLine,
    Task,
    Token,
)
from scriptdispatch.errors import SettingsError, StoreUnavailable
from scriptdispatch.store import mongo_documents as documents
from scriptdispatch.store import mongo_logs as log_lines
from scriptdispatch.store import mongo_purge as clean_up
from scriptdispatch.store import mongo_reads as reads
from scriptdispatch.store import mongo_schema as schema
from scriptdispatch.store import mongo_writes as writes
from scriptdispatch.store.gathered import Gathered
from scriptdispatch.store.mongo_commands import insert_new
from scriptdispatch.store.mongo_counts import StatusCounts
from scriptdispatch.store.mongo_documents import EXECUTION_FIELDS, TASK_FIELDS, Documents
from scriptdispatch.store.mongo_errors import foreign_errors
from scriptdispatch.store.mongo_lanes import Job, Lane
from scriptdispatch.store.mongo_numbers import ExecutionInserts
from scriptdispatch.store.mongo_reads import Query
from scriptdispatch.store.port import Document, LogQuery, Moment, Remembered, Stats, TaskFilter

log = logs.get("store")
R = TypeVar("R", bound=msgspec.Struct)
DATABASE: Final = "scriptdispatch"
SELECT_S: Final = 3.0  # until a primary has answered
CALL_S: Final = 3.0  # one call of the driver, its own repeats included
SLOW_S: Final = 30.0  # clean-up and statistics
OPEN_S: Final = 300.0  # indexes on a store that has data already
PAGE: Final = 1_000
SAME_TAIL: Final = 1_000
OLDEST: Final = (6, 0)  # partial indexes with $in
ALONE: Final = "not a replica set"
ALONE_WARNING: Final = (
    "MongoDB is a single server, not a replica set: when it is gone, so is everything. Start it with --replSet rs0, run "
    "rs.initiate() once, and add ?replicaSet=rs0 to store_url"
)


class MongoStore:
    """See `port.Store`. Open it in the process and loop that will use it."""

    def __init__(self, url: str, clock: Clock) -> None:
        self._url, self._clock = url, clock
        self._client: AsyncMongoClient[Document] | None = None
        self._db: writes.Database
        self._counts: StatusCounts
        self._lanes: dict[type[Change], Lane[Any]] = {}
        self._soon_lanes: dict[type[Change], Lane[Any]] = {}  # for what may be durable a little later
        self._confirmations: Gathered[bytes | None]
        self._task_reads = Gathered(partial(self._fetch, documents.TASK, schema.TASKS, TASK_FIELDS))
        settled = partial(self._fetch, documents.TASK, schema.TASKS, TASK_FIELDS, concern=ReadConcern("majority"))
        self._settled_reads = Gathered(settled)
        self._script_reads = Gathered(partial(self._fetch, documents.SCRIPT, schema.SCRIPTS, None))
        self._execution_reads = Gathered(partial(self._fetch, documents.EXECUTION, schema.EXECUTIONS, EXECUTION_FIELDS))

    async def open(self) -> None:
        with foreign_errors(writing=True):
            self._client = AsyncMongoClient(
                self._url,
                w="majority",
                journal=True,
                retryWrites=True,
                readPreference="primary",
                tz_aware=True,
                appname="scriptdispatch",
                timeoutMS=int(CALL_S * 1000),
                connectTimeoutMS=int(SELECT_S * 1000),
                serverSelectionTimeoutMS=int(SELECT_S * 1000),
            )
            self._db = self._client.get_default_database(DATABASE)
            _check_version(await self._client.admin.command("buildInfo"))
            with pymongo.timeout(OPEN_S):
                await schema.create(self._db)
        for warning in await self.warnings():
            log.warning(warning, event_name="store.warning")
        self._counts = StatusCounts(self._db)
        self._soon_lanes = {}
        self._confirmations = Gathered(self._reign)
        if await self._has_reigns():
            inserts = writes.TaskInserts(self._db, soon=True)
            self._soon_lanes = {InsertTask: Lane(inserts.flush, attrgetter("task.id"))}
        self._lanes = {
            ChangeTask: Lane(partial(writes.change_tasks, self._db), attrgetter("task_id")),
            ChangeExecution: Lane(partial(writes.change_executions, self._db), attrgetter("execution_id")),
            InsertTask: Lane(writes.TaskInserts(self._db).flush, attrgetter("task.id")),
            InsertExecution: Lane(ExecutionInserts(self._db).flush, attrgetter("execution.id")),
        }

    async def close(self) -> None:
        """What was submitted is settled first."""
        if self._client is None:
            return
        for lane in (*self._lanes.values(), *self._soon_lanes.values()):
            await lane.drain()
        await self._client.close()

    async def ping(self) -> str:
        with foreign_errors():
            build, hello = await self._db.command("buildInfo"), await self._db.command("hello")
        return f"MongoDB {build['version']}, {_kind(hello)}, database {self._db.name}"

    async def _reign(self, _: Sequence[str]) -> dict[str, bytes | None]:
        return {"reign": await writes.reign(self._db)}

    async def _has_reigns(self) -> bool:
        """A replica set that we talk to ourselves. Behind a router each shard has an oplog and a primary of its own."""
        with foreign_errors():
            return "setName" in await self._db.command("hello")

    async def warnings(self) -> list[str]:
        with foreign_errors():
            alone = _kind(await self._db.command("hello")) == ALONE
        return [ALONE_WARNING] if alone else []

    # --- writes

    async def commit(self, changes: Sequence[Change], *, term: int | None = None, soon: bool = False) -> list[Applied]:
        if term is not None:
            await writes.check_term(self._db, term)
        if not changes:
            return []
        job = Job(len(changes))
        parts: dict[type[Change], list[tuple[int, Any]]] = {}
        for place, change in enumerate(changes):
            parts.setdefault(type(change), []).append((place, change))
        lanes = self._lanes | self._soon_lanes if soon else self._lanes
        for kind, part in parts.items():
            lanes[kind].submit(job, part)
        await job.done
        return [outcome for outcome in job.outcomes if outcome is not None]

    async def confirm(self, inserts: Sequence[InsertTask], outcomes: Sequence[Applied]) -> None:
        """By a write that finds nothing to do; those who want it at the same time share it. If another primary answers, what
        that one does not have is inserted anew."""
        if not self._soon_lanes:
            return
        try:
            [now] = await self._confirmations.get(["reign"])
            if any(outcome.won and (now is None or outcome.reign != now) for outcome in outcomes):
                await self.commit(inserts)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), outcome_unknown=True) from error

    async def append_logs(
        self, lines: Sequence[LogLine], *, max_per_execution: int, there: Mapping[str, int] | None = None
    ) -> int:
        if not lines:
            return 0
        with foreign_errors(writing=True):
            stored = await log_lines.append(self._db, lines, max_per_execution, self._clock.now(), there)
            await log_lines.count(self._db, stored)
        return stored.new.total()

    async def append_and_close(
        self,
        lines: Sequence[LogLine],
        closing: Sequence[ChangeExecution],
        *,
        max_per_execution: int,
        there: Mapping[str, int] | None = None,
    ) -> list[Applied]:
        """A row that is closed is counted in the same write, once its lines are there; the others, and those that somebody
        else has closed, in one of their own."""
        if not lines:
            return await self.commit(closing)
        with foreign_errors(writing=True):
            stored = await log_lines.append(self._db, lines, max_per_execution, self._clock.now(), there)
            await crashpoints.reach("closer.after_C1", crashpoints.subjects(line.task_id for line in lines))
            outcomes = await self._close(closing, stored)
            counted = {change.execution_id for change, outcome in zip(closing, outcomes, strict=True) if outcome.won}
            await log_lines.count(self._db, stored.without(counted))
        return outcomes

    async def _close(self, closing: Sequence[ChangeExecution], stored: log_lines.Stored) -> list[Applied]:
        if not closing:
            return []
        job = Job(len(closing))
        self._lanes[ChangeExecution].submit(job, list(enumerate(map(stored.counted, closing))))
        await job.done
        return [outcome for outcome in job.outcomes if outcome is not None]

    async def quarantine(self, items: Sequence[Quarantined]) -> None:
        if items:
            with foreign_errors(writing=True):
                made = [documents.QUARANTINE.to_document(item) for item in items]
                await insert_new(self._db[schema.QUARANTINE], made)

    async def unquarantine(self, id: str) -> bool:
        with foreign_errors(writing=True):
            return (await self._db[schema.QUARANTINE].delete_one({"_id": id})).deleted_count > 0

    async def remember(self, owner: str, key: str, request: Remembered) -> Remembered | None:
        collection = self._db[schema.REMEMBERED]
        with foreign_errors(writing=True):
            for _ in range(writes.ROUNDS):
                try:
                    await collection.insert_one({"_id": _pair(owner, key), **documents.REMEMBERED.to_document(request)})
                    return None
                except DuplicateKeyError:
                    first = await collection.find_one({"_id": _pair(owner, key)}, {"_id": 0})
                if first is not None:
                    return documents.REMEMBERED.from_document(first)
        raise StoreUnavailable("a request was remembered and forgotten all the time")

    async def take_over(self, owner: str, key: str, begun_at: datetime, now: datetime) -> bool:
        where = {"_id": _pair(owner, key), "begun_at": begun_at, "status": None}
        with foreign_errors(writing=True):
            # Matched, not modified: within one millisecond nothing changes, and it is ours all the same.
            answer = await self._db[schema.REMEMBERED].update_one(where, {"$set": {"begun_at": now}})
            return answer.matched_count > 0

    async def answer(self, owner: str, key: str, status: int, body: bytes) -> None:
        with foreign_errors(writing=True):
            change = {"$set": {"status": status, "answer": body}}
            await self._db[schema.REMEMBERED].update_one({"_id": _pair(owner, key)}, change)

    async def forget(self, owner: str, key: str) -> None:
        with foreign_errors(writing=True):
            await self._db[schema.REMEMBERED].delete_one({"_id": _pair(owner, key)})

    async def save_token(self, token: Token) -> None:
        with foreign_errors(writing=True):
            made = documents.TOKEN.to_document(token)
            await self._db[schema.TOKENS].replace_one({"_id": token.id}, made, upsert=True)

    async def purge(self, finished_before: datetime, limit: int) -> int:
        with foreign_errors(writing=True), pymongo.timeout(SLOW_S):
            return await clean_up.purge(self._db, finished_before, limit)

    async def purge_logs(self, before: datetime, limit: int) -> int:
        with foreign_errors(writing=True), pymongo.timeout(SLOW_S):
            return await log_lines.delete_older(self._db, before, limit)

    async def purge_remembered(self, before: datetime) -> int:
        with foreign_errors(writing=True), pymongo.timeout(SLOW_S):
            return (await self._db[schema.REMEMBERED].delete_many({"begun_at": {"$lt": before}}, hint="age")).deleted_count

    # --- reads: tasks

    async def tasks(self, ids: Sequence[str], *, settled: bool = False) -> list[Task | None]:
        return await (self._settled_reads if settled else self._task_reads).get(ids)

    async def list_tasks(self, where: TaskFilter, limit: int) -> list[Task]:
        return await self._tasks(reads.task_query(where), limit)

    async def find_id(self, tail: str) -> list[str]:
        if len(tail) < documents.TAIL:
            return []
        found = await self._find(schema.TASKS, reads.tail_query(tail), SAME_TAIL, {"_id": 1})
        return [document["_id"] for document in found if document["_id"].endswith(tail)][:5]

    async def history(self, task_id: str) -> list[History]:
        with foreign_errors():
            found = await self._db[schema.TASKS].find_one({"_id": task_id}, {"history": 1})
        return documents.history_rows(found.get("history", ())) if found else []

    async def scripts(self, ids: Sequence[str]) -> list[Script | None]:
        return await self._script_reads.get(ids)

    async def due_tasks(self, until: datetime, after: Moment | None, limit: int) -> list[Moment]:
        return await self._moments(schema.TASKS, "next_run_at", reads.due_queries(until, after), limit)

    async def statuses(self, ids: Sequence[str]) -> dict[str, Status]:
        if not ids:
            return {}
        with foreign_errors():
            query = {"_id": {"$in": list(ids)}}
            found = self._db[schema.TASKS].find(query, {"status": 1}, hint=schema.BY_ID, batch_size=len(ids) + 1)
            return {document["_id"]: document["status"] for document in await found.to_list()}

    async def tasks_under_way(self, after: str | None, limit: int) -> list[Task]:
        return await self._tasks(reads.under_way_query(after), limit)

    async def cancels_to_ask(self, limit: int) -> list[Task]:
        return await self._tasks(reads.cancel_query(), limit)

    async def counts(self) -> dict[str, int]:
        with foreign_errors(), pymongo.timeout(SLOW_S):
            return await self._counts.read()

    async def oldest_due(self) -> datetime | None:
        (query,) = reads.due_queries(self._clock.now(), None)
        found = await self._find(schema.TASKS, query, 1, {"next_run_at": 1})
        return found[0]["next_run_at"] if found else None

    async def stats(self, since: datetime, until: datetime) -> Stats:
        with foreign_errors(), pymongo.timeout(SLOW_S):
            return await reads.stats(self._db, since, until)

    # --- reads: executions

    async def executions(self, ids: Sequence[str]) -> list[Execution | None]:
        return await self._execution_reads.get(ids)

    async def executions_of(self, task_id: str) -> list[Execution]:
        query = Query({"task_id": task_id}, "attempt", [("attempt", schema.UP)])
        with foreign_errors():
            found = await self._cursor(schema.EXECUTIONS, query, EXECUTION_FIELDS).to_list()
        return [documents.EXECUTION.from_document(document) for document in found]

    async def open_executions(
        self,
        *,
        devices: Sequence[str] | None = None,
        worker_ids: Sequence[str] | None = None,
        unstamped_before: datetime | None = None,
        after: str | None = None,
        limit: int = 1000,
    ) -> list[Execution]:
        return await self._executions(reads.open_query(devices, worker_ids, unstamped_before, after), limit)

    async def overdue_executions(self, now: datetime, limit: int) -> list[Execution]:
        return await self._executions(reads.overdue_query(now), limit)

    async def closed_executions(self, after: Moment, until: datetime, limit: int) -> list[Moment]:
        return await self._moments(schema.EXECUTIONS, "finished_at", reads.closed_queries(after, until), limit)

    # --- reads: the rest

    async def logs(self, query: LogQuery) -> list[StoredLine]:
        with foreign_errors():
            return await log_lines.read(self._db, query)

    async def log_totals(self, task_id: str) -> tuple[int, int]:
        rows = await self.executions_of(task_id)
        return sum(row.log_lines for row in rows), sum(row.log_dropped for row in rows)

    async def quarantined(self, limit: int, before_id: str | None = None) -> list[Quarantined]:
        where: Document = {} if before_id is None else {"_id": {"$lt": before_id}}
        found = await self._find(schema.QUARANTINE, Query(where, schema.BY_ID, [("_id", schema.DOWN)]), limit, None)
        return [documents.QUARANTINE.from_document(document) for document in found]

    async def quarantined_one(self, id: str) -> Quarantined | None:
        return (await self._fetch(documents.QUARANTINE, schema.QUARANTINE, None, [id])).get(id)

    async def quarantine_count(self) -> int:
        with foreign_errors():
            return await self._db[schema.QUARANTINE].count_documents({}, hint=schema.BY_ID)

    async def tokens(self) -> list[Token]:
        query = Query({}, schema.BY_ID, [("_id", schema.UP)])
        with foreign_errors():
            found = await self._cursor(schema.TOKENS, query, None).to_list()
        return [documents.TOKEN.from_document(document) for document in found]

    # --- how all of them go about it

    def _cursor(self, collection: str, query: Query, fields: Document | None) -> Any:
        found = self._db[collection].find(query.where, fields, hint=query.walk, batch_size=PAGE + 1)
        return found.sort(list(query.order))

    async def _find(self, collection: str, query: Query, limit: int, fields: Document | None) -> list[Any]:
        if limit <= 0:  # to the server 0 means no limit
            return []
        with foreign_errors():
            found: list[Any] = await self._cursor(collection, query, fields).limit(limit).to_list()
        return found

    async def _moments(self, collection: str, time: str, queries: Sequence[Query], limit: int) -> list[Moment]:
        """Without looking at a document: the index has both."""
        found: list[Moment] = []
        for query in queries:
            rows = await self._find(collection, query, limit - len(found), {time: 1})
            found += [(row[time], row["_id"]) for row in rows]
        return found

    async def _tasks(self, query: Query, limit: int) -> list[Task]:
        found = await self._find(schema.TASKS, query, limit, TASK_FIELDS)
        return [documents.TASK.from_document(document) for document in found]

    async def _executions(self, query: Query, limit: int) -> list[Execution]:
        found = await self._find(schema.EXECUTIONS, query, limit, EXECUTION_FIELDS)
        return [documents.EXECUTION.from_document(document) for document in found]

    async def _fetch(
        self,
        kind: Documents[R],
        collection: str,
        fields: Document | None,
        ids: Sequence[str],
        concern: ReadConcern | None = None,
    ) -> dict[str, R]:
        with foreign_errors():
            source = self._db.get_collection(collection, read_concern=concern)
            found = source.find({"_id": {"$in": ids}}, fields, hint=schema.BY_ID, batch_size=len(ids) + 1)
            return {document["_id"]: kind.from_document(document) for document in await found.to_list()}


def _kind(hello: Mapping[str, Any]) -> str:
    if hello.get("msg") == "isdbgrid":
        return "sharded"
    return f"replica set {hello['setName']}" if "setName" in hello else ALONE


def _check_version(build: Document) -> None:
    if tuple(build["versionArray"][:2]) < OLDEST:
        raise SettingsError(f"store_url: MongoDB {build['version']} is too old: 6.0 or newer is needed")


def _pair(owner: str, key: str) -> Document:
    return {"owner": owner, "key": key}
