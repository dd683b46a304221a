"""What only the MongoDB store has: plans, group commit, several processes, errors in our words."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from bson import ObjectId
from pymongo import AsyncMongoClient, monitoring

from scriptdispatch import logs
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import Error
from scriptdispatch.errors import ScriptdispatchError, SettingsError, StoreUnavailable
from scriptdispatch.store import mongo_commands, mongo_counts, mongo_lanes
from scriptdispatch.store.mongo import MongoStore
from scriptdispatch.store.port import LogQuery, Store
from tests.contract.mongo_rig import emptied, mongo_database  # noqa: F401  (a fixture)
from tests.contract.store_values import (
    NOW,
    HeldClock,
    finish,
    get_row,
    get_task,
    insert_row,
    insert_task,
    make_line,
    make_row,
    make_task,
    note,
    one,
)
from tests.contract.test_store_reads import FILTERS
from tests.contract.test_store_sqlite import call_everything
from tests.server_process import Server
from tests.servers import with_database

READS = ("find", "aggregate", "count")
WRITES = ("update", "delete", "findAndModify")
SMALL = ("listCollections",)


class Watch(monitoring.CommandListener):
    """Every command that the clients of this test send."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, Any]]] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.commands.append((event.command_name, dict(event.command)))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        return

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        return

    def names(self, *wanted: str) -> list[str]:
        return [name for name, _ in self.commands if name in wanted]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    made = Watch()
    real = AsyncMongoClient.__init__

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, event_listeners=[made], **options)

    monkeypatch.setattr(AsyncMongoClient, "__init__", watched)
    return made


@pytest.fixture
async def store(mongo_database: str, watch: Watch) -> AsyncIterator[MongoStore]:  # noqa: F811
    made = MongoStore(await emptied(mongo_database), HeldClock())
    await made.open()
    watch.commands.clear()
    yield made
    await made.close()


@pytest.fixture
async def server(mongo_database: str) -> AsyncIterator[Any]:  # noqa: F811
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongo_database)
    yield client.get_default_database()
    await client.close()


# --- plans


def explainable(name: str, command: dict[str, Any]) -> list[dict[str, Any]]:
    """The command as the server explains it: without what belongs to its session; one for each statement."""
    dropped = ("lsid", "txnNumber", "$clusterTime", "$db", "$readPreference", "writeConcern", "maxTimeMS", "readConcern")
    plain = {key: value for key, value in command.items() if key not in dropped}
    for statements in ("updates", "deletes"):
        if statements in plain:
            return [{name: plain[name], statements: [statement]} for statement in plain[statements]]
    return [plain]


def stages(plan: Any) -> list[str]:
    """Every stage in it, wherever it stands."""
    if isinstance(plan, dict):
        own = [plan["stage"]] if isinstance(plan.get("stage"), str) else []
        return own + [stage for value in plan.values() for stage in stages(value)]
    return [stage for value in plan for stage in stages(value)] if isinstance(plan, list) else []


async def plans(server: Any, watch: Watch) -> list[tuple[dict[str, Any], list[str]]]:
    found = []
    for name, command in list(watch.commands):
        if name in (*READS, *WRITES):
            for statement in explainable(name, command):
                plan = await server.command("explain", statement, verbosity="queryPlanner")
                found.append((statement, stages(plan)))
    return found


async def test_no_command_walks_a_whole_collection(store: MongoStore, watch: Watch, server: Any) -> None:
    called = await call_everything(store)  # type: ignore[arg-type]
    port = {name for name, _ in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")}
    assert port - called == {"open", "close"}
    seen = await plans(server, watch)
    assert [command for command, walked in seen if "COLLSCAN" in walked] == []
    assert len(seen) > 80


async def test_pages_come_sorted_from_their_index(store: MongoStore, watch: Watch, server: Any) -> None:
    """A sort would read all tasks with that status before it shows the first fifty."""
    await insert_task(store, labels={"site": "a", "team": "x"})  # that a task can have several is known from the first on
    for name, where in FILTERS.items():
        if name != "dedupe key":  # has one task at most
            await store.list_tasks(where, 50)
    await store.due_tasks(NOW, None, 5)
    await store.due_tasks(NOW, (NOW, "a"), 5)
    await store.tasks_under_way("a", 5)
    await store.cancels_to_ask(5)
    await store.overdue_executions(NOW, 5)
    await store.open_executions()
    await store.executions_of("t")
    await store.logs(LogQuery(task_id="t", tail=5))
    assert [command for command, walked in await plans(server, watch) if "SORT" in walked] == []


async def test_what_is_due_and_what_has_ended_is_looked_for_in_the_index_alone(
    store: MongoStore, watch: Watch, server: Any
) -> None:
    """The leader does it every few seconds, however long the queue is."""
    await store.due_tasks(NOW, (NOW - timedelta(minutes=1), "a"), 5)
    await store.closed_executions((NOW - timedelta(minutes=1), "a"), NOW, 5)
    walked = [stages for _, stages in await plans(server, watch)]
    assert len(walked) == 4
    assert all({"FETCH", "SORT", "COLLSCAN"}.isdisjoint(stages) for stages in walked), walked


async def test_the_highest_number_is_one_step_in_the_index_however_many_rows_there_are(
    store: MongoStore, watch: Watch, server: Any
) -> None:
    row = make_row(await insert_task(store, device_id="dev-1"), previous_execution_id="an older one")
    assert (await one(store, InsertExecution(execution=row))).won
    walked = [walked for command, walked in await plans(server, watch) if "aggregate" in command]
    assert len(walked) == 2
    assert all("DISTINCT_SCAN" in stages for stages in walked)


async def test_reads_of_tasks_leave_their_history_on_the_server(store: MongoStore, watch: Watch) -> None:
    task = await insert_task(store)
    watch.commands.clear()
    await store.tasks([task.id])
    await store.tasks([task.id], settled=True)
    await store.list_tasks(FILTERS["nothing"], 5)
    assert [command["projection"]["history"] for _, command in watch.commands] == [0, 0, 0]


# --- group commit


async def test_what_arrives_together_is_written_together(store: MongoStore, watch: Watch) -> None:
    tasks = [make_task() for _ in range(200)]
    inserts = [InsertTask(task=task, script=None, history=note("created")) for task in tasks]
    assert all(a.won for a in await asyncio.gather(*(one(store, insert) for insert in inserts)))
    rows = [make_row(task) for task in tasks]
    given = await asyncio.gather(*(one(store, InsertExecution(execution=row)) for row in rows))
    assert {(a.won, a.attempt, a.fencing_token) for a in given} == {(True, 1, 1)}
    assert watch.names("insert", "update") == ["insert"] * 2

    stored = [row for row in await store.executions([row.id for row in rows]) if row]
    starts = [lifecycle.start(task, row, NOW) for task, row in zip(tasks, stored, strict=True)]
    assert all(a.won for a in await asyncio.gather(*(one(store, start) for start in starts)))
    stamps = [lifecycle.stamp(row, "worker-1", NOW, 30) for row in stored]
    assert all(a.won for a in await asyncio.gather(*(one(store, stamp) for stamp in stamps)))
    assert watch.names("insert", "update") == ["insert"] * 2 + ["update"] * 2

    running = [task for task in await store.tasks([task.id for task in tasks]) if task]
    assert [task.execution_id for task in running] == [row.id for row in rows]  # each its own
    assert {h.execution_id for task in tasks[:5] for h in (await store.history(task.id))[1:]} == {r.id for r in rows[:5]}


async def test_each_of_many_callers_gets_its_own_outcome(store: MongoStore) -> None:
    tasks = [await insert_task(store, status="paused" if i % 3 else "waiting") for i in range(60)]
    changes = [
        ChangeTask(task_id=task.id, expect={"status": "waiting"}, set={"step": str(i)}, history=note(str(i)))
        for i, task in enumerate(tasks)
    ]
    applied = await asyncio.gather(*(one(store, change) for change in changes))
    assert [a.won for a in applied] == [i % 3 == 0 for i in range(60)]
    steps = [task.step for task in await store.tasks([task.id for task in tasks]) if task]
    assert steps == [str(i) if i % 3 == 0 else None for i in range(60)]


async def test_changes_of_one_task_that_arrive_together_keep_their_order(store: MongoStore) -> None:
    task = await insert_task(store)
    changes = [ChangeTask(task_id=task.id, expect={"attempt": i}, set={"attempt": i + 1}) for i in range(20)]
    assert all(a.won for a in await asyncio.gather(*(one(store, change) for change in changes)))
    assert (await get_task(store, task.id)).attempt == 20


async def test_values_from_outside_are_values_whatever_they_look_like(store: MongoStore) -> None:
    """Two with different values go as a pipeline, where a text that begins with $ would name a field."""
    rows = [await insert_row(store, await insert_task(store)) for _ in range(2)]
    texts = ["$status", "$$ROOT"]
    closings = [
        lifecycle.close(
            row, "failed", NOW, closed_by=text, reason=text, error=Error(code=text, message=text), result={text: text}
        )
        for row, text in zip(rows, texts, strict=True)
    ]
    assert all(a.won for a in await store.commit(closings))
    for row, text in zip(rows, texts, strict=True):
        closed = await get_row(store, row.id)
        assert (closed.closed_by, closed.reason, closed.result) == (text, text, {text: text})
        assert closed.error == Error(code=text, message=text)


async def test_a_change_that_can_not_be_written_spoils_nobody_elses(store: MongoStore) -> None:
    tasks = [await insert_task(store) for _ in range(6)]
    good = [ChangeTask(task_id=task.id, expect={}, set={"step": "x"}, history=note("x")) for task in tasks[1:]]
    bad = ChangeTask(task_id=tasks[0].id, expect={}, set={"step": "x" * 17_000_000}, history=note("x"))
    answers = await asyncio.gather(*(one(store, change) for change in (bad, *good)), return_exceptions=True)
    assert isinstance(answers[0], ScriptdispatchError)
    assert not isinstance(answers[0], StoreUnavailable)
    assert all(not isinstance(answer, BaseException) and answer.won for answer in answers[1:])
    assert [len(await store.history(task.id)) for task in tasks] == [1, 2, 2, 2, 2, 2]


async def test_a_caller_that_leaves_does_not_take_the_others_with_it(store: MongoStore) -> None:
    tasks = [await insert_task(store) for _ in range(3)]
    calls = [asyncio.ensure_future(one(store, ChangeTask(task_id=task.id, expect={}, set={"step": "x"}))) for task in tasks]
    await asyncio.sleep(0)
    calls[0].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert [not isinstance(a, BaseException) and a.won for a in answers[1:]] == [True, True]


async def test_a_lane_turns_callers_away_when_too_many_wait(store: MongoStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mongo_lanes, "MAX_WAITING", 5)
    tasks = [await insert_task(store) for _ in range(8)]
    changes = [ChangeTask(task_id=task.id, expect={}, set={"step": "x"}) for task in tasks]
    answers = await asyncio.gather(*(one(store, change) for change in changes), return_exceptions=True)
    away = [answer for answer in answers if isinstance(answer, StoreUnavailable)]
    assert len(away) == 3
    assert not any(error.outcome_unknown for error in away)
    assert [task.step for task in await store.tasks([t.id for t in tasks]) if task] == ["x"] * 5 + [None] * 3


async def test_when_a_batch_fails_those_behind_it_are_told_at_once_and_truly() -> None:
    """Who was in the batch does not know; of those behind it nothing was sent."""
    sent: list[list[str]] = []
    go = asyncio.Event()

    async def flush(changes: Any, token: ObjectId) -> Any:
        sent.append(list(changes))
        await go.wait()
        raise StoreUnavailable("away", outcome_unknown=True)

    lane: mongo_lanes.Lane[str] = mongo_lanes.Lane(flush, str)
    first, second = mongo_lanes.Job(1), mongo_lanes.Job(1)
    lane.submit(first, [(0, "a")])
    await asyncio.sleep(0)
    lane.submit(second, [(0, "b")])
    go.set()
    errors = await asyncio.gather(first.done, second.done, return_exceptions=True)
    await lane.drain()
    assert [isinstance(e, StoreUnavailable) and e.outcome_unknown for e in errors] == [True, False]
    assert sent == [["a"]]


# --- several processes on one server


async def test_of_several_processes_racing_for_the_same_tasks_each_task_has_one_winner(
    store: MongoStore,
    mongo_database: str,  # noqa: F811
) -> None:
    others = [MongoStore(mongo_database, HeldClock()) for _ in range(3)]
    await asyncio.gather(*(other.open() for other in others))
    tasks = [await insert_task(store, device_id=f"dev-{i % 10}") for i in range(40)]

    async def claim(other: MongoStore, me: int) -> list[bool]:
        changes = [
            ChangeTask(
                task_id=t.id, expect={"worker_id": None}, set={"worker_id": f"w{me}", "attempt": i}, history=note("w")
            )
            for i, t in enumerate(tasks)
        ]
        return [a.won for a in await other.commit(changes)]

    answers = await asyncio.gather(*(claim(other, me) for me, other in enumerate([store, *others])))
    assert [sum(column) for column in zip(*answers, strict=True)] == [1] * 40
    for i, task in enumerate(await store.tasks([t.id for t in tasks])):
        assert task is not None
        assert answers[int((task.worker_id or "w9")[1:])][i]
        assert len(await store.history(task.id)) == 2
    for other in others:
        await other.close()


async def test_several_processes_may_open_a_new_database_at_once(mongo_url: str) -> None:
    url = with_database(mongo_url, f"opened_at_once_{ObjectId()}")
    stores = [MongoStore(url, HeldClock()) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    task = await insert_task(stores[0], device_id="dev-1")
    rows = [make_row(task) for _ in stores]
    answers = await asyncio.gather(*(one(s, InsertExecution(execution=r)) for s, r in zip(stores, rows, strict=True)))
    assert [answer.won for answer in answers].count(True) == 1
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
    await client.drop_database(client.get_default_database().name)
    await client.close()
    for store in stores:
        await store.close()


async def test_what_is_there_already_is_named_by_its_place_though_a_batch_goes_in_parts(
    store: MongoStore, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mongo_commands, "MOST", 2_000)
    keys = ["a", "b", "a", "c", "d", "b", "e", "d"]
    tasks = [make_task(dedupe_key=key) for key in keys]
    watch.commands.clear()
    answers = await store.commit([InsertTask(task=task, script=None, history=note("created")) for task in tasks])
    assert len(watch.names("insert")) > 2
    assert [answer.won for answer in answers] == [True, True, False, True, True, False, True, False]
    assert [answer.holder for answer in answers if not answer.won] == [tasks[0].id, tasks[1].id, tasks[4].id]


async def test_fences_rise_without_gaps_whatever_the_hints_are_worth(store: MongoStore, watch: Watch) -> None:
    """A right hint spares the read; one that is behind (a lock service restored from a copy) costs another insert."""
    given, reads = [], []
    for hint in (None, 1, 0, None, 4, 2, 6):
        task = await insert_task(store, device_id="dev-1")
        row = make_row(task)
        watch.commands.clear()
        assert (await one(store, InsertExecution(execution=row, fence_hint=hint))).won
        reads.append(len(watch.names("aggregate")))
        given.append((await get_row(store, row.id)).fencing_token)
        await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
    assert given == [1, 2, 3, 4, 5, 6, 7]
    assert [n > 0 for n in reads] == [True, False, True, True, False, True, False]


async def test_rows_of_many_devices_are_numbered_in_one_batch_though_some_hints_are_behind(store: MongoStore) -> None:
    firsts = [await insert_row(store, await insert_task(store, device_id=f"dev-{n}")) for n in range(20)]
    await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t") for row in firsts])
    rows = [make_row(await insert_task(store, device_id=f"dev-{n}")) for n in range(20)]
    answers = await store.commit([InsertExecution(execution=row, fence_hint=n % 2) for n, row in enumerate(rows)])
    assert [(answer.won, answer.attempt, answer.fencing_token) for answer in answers] == [(True, 1, 2)] * 20


async def test_a_key_freed_by_clean_up_can_be_taken_again_at_once(store: MongoStore) -> None:
    first = await insert_task(store, dedupe_key="k")
    await finish(store, first, NOW)
    await store.purge(NOW.replace(year=2030), 5)
    assert (await get_task(store, (await insert_task(store, dedupe_key="k")).id)).dedupe_key == "k"


# --- a server that is no replica set


async def test_a_single_server_is_taken_with_a_warning_that_says_what_to_do(
    start_server: Callable[..., Server], store: MongoStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await store.warnings() == []
    logs.configure("info", "json")
    alone = MongoStore(with_database(start_server("mongo", alone=True).url, "alone"), HeldClock())
    await alone.open()
    try:
        [warning] = await alone.warnings()
        assert "rs.initiate()" in warning
        assert warning in capsys.readouterr().err
        assert "not a replica set" in await alone.ping()
        task = await insert_task(alone, device_id="dev-1")
        assert (await insert_row(alone, task)).fencing_token == 1
    finally:
        await alone.close()


# --- errors


async def test_a_server_that_is_not_there_is_unavailable_and_nothing_was_done() -> None:
    store = MongoStore("mongodb://127.0.0.1:9/none?serverSelectionTimeoutMS=100", HeldClock())
    with pytest.raises(StoreUnavailable) as raised:
        await store.open()
    assert not raised.value.outcome_unknown
    await store.close()


async def test_a_wrong_address_is_a_wrong_setting() -> None:
    with pytest.raises(SettingsError, match="store_url"):
        await MongoStore("mongodb://", HeldClock()).open()


async def test_the_size_of_a_line_is_no_reason_to_lose_its_neighbours(store: MongoStore) -> None:
    row = await insert_row(store, await insert_task(store))
    with pytest.raises(ScriptdispatchError) as raised:
        await store.append_logs([make_line(row, 1, "x" * 17_000_000)], max_per_execution=9)
    assert not isinstance(raised.value, StoreUnavailable)
    assert await store.append_logs([make_line(row, 2, "y")], max_per_execution=9) == 1


async def test_large_results_of_many_executions_are_all_stored(store: MongoStore, watch: Watch) -> None:
    rows = [await insert_row(store, await insert_task(store)) for _ in range(12)]
    watch.commands.clear()
    large = [
        lifecycle.close(row, "success", NOW, closed_by="c", reason="ok", result=f"{n}" + "x" * 1_900_000)
        for n, row in enumerate(rows)
    ]
    assert all(a.won for a in await store.commit(large))
    assert len(watch.names("update")) <= 2  # as messages have room, not one by one
    stored = await store.executions([row.id for row in rows])
    assert [row and row.result[:2] for row in stored] == [f"{n}x"[:2] for n in range(12)]


async def test_a_count_that_took_long_is_used_for_a_while_and_a_short_one_is_fresh(
    store: MongoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (1, 2):
        await insert_task(store)
        assert (await store.counts())["waiting"] == n
    monkeypatch.setattr(mongo_counts, "SHORT_S", -1.0)
    monkeypatch.setattr(mongo_counts, "AGE", 1e9)
    await store.counts()
    await insert_task(store)
    assert (await store.counts())["waiting"] == 2


async def test_execution_changes_of_different_kinds_share_one_command(store: MongoStore, watch: Watch) -> None:
    rows = [await insert_row(store, await insert_task(store)) for _ in range(4)]
    watch.commands.clear()
    changes: list[ChangeExecution] = [
        lifecycle.stamp(rows[0], "w", NOW, 30),
        lifecycle.stamp(rows[1], "v", NOW, 40),
        lifecycle.close(rows[2], "success", NOW, closed_by="c", reason="ok"),
        lifecycle.note_late_result(rows[3], "SUCCESS"),
    ]
    assert [a.won for a in await store.commit(changes)] == [True, True, True, False]
    assert watch.names("update", "find") == ["update", "find", "find", "find"]
