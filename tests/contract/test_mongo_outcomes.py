"""MongoDB: no write is done twice and none is lost, whatever becomes of requests and answers on their way (F05, F51).

A proxy loses the answer of a write that was carried out, or keeps a request back until the store has long repeated it.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import Execution, Task
from scriptdispatch.store import mongo_logs as log_lines
from scriptdispatch.store.mongo import MongoStore
from scriptdispatch.store.port import LogQuery
from tests.contract.mongo_rig import Proxy, emptied, mongo_database, proxied  # noqa: F401  (a fixture)
from tests.contract.store_values import (
    NOW,
    HeldClock,
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

TASK_WRITE = b"update\x00\x0c\x00\x00\x00script_task\x00"  # how the command names itself and its collection
ROW_WRITE = b"update\x00\x0f\x00\x00\x00task_execution\x00"
TASK_INSERT = b"insert\x00\x0c\x00\x00\x00script_task\x00"
ROW_INSERT = b"insert\x00\x0f\x00\x00\x00task_execution\x00"
LINE_INSERT = b"insert\x00\x0e\x00\x00\x00task_exec_log\x00"


@pytest.fixture
async def beside(mongo_database: str) -> AsyncIterator[MongoStore]:  # noqa: F811
    """Another process, whose way to the server is clear."""
    store = MongoStore(await emptied(mongo_database), HeldClock())
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def proxy(mongo_database: str, beside: MongoStore) -> AsyncIterator[tuple[Proxy, str]]:  # noqa: F811
    async with proxied(mongo_database) as pair:
        yield pair


@pytest.fixture
async def store(proxy: tuple[Proxy, str]) -> AsyncIterator[MongoStore]:
    made = MongoStore(proxy[1], HeldClock())
    await made.open()
    yield made
    await made.close()


@pytest.fixture
def way(proxy: tuple[Proxy, str]) -> Proxy:
    return proxy[0]


async def several(store: MongoStore, n: int) -> list[tuple[Task, Execution]]:
    pairs = []
    for _ in range(n):
        task = await insert_task(store)
        pairs.append((task, await insert_row(store, task)))
    return pairs


async def reasons(store: MongoStore, task_id: str) -> list[str]:
    return [row.reason for row in await store.history(task_id)]


@pytest.mark.parametrize("n", [1, 7])
async def test_a_change_whose_answer_was_lost_is_won_and_done_once(
    store: MongoStore, beside: MongoStore, way: Proxy, n: int
) -> None:
    pairs = await several(beside, n)
    way.lose_answer(TASK_WRITE)

    applied = await store.commit([lifecycle.start(task, row, NOW) for task, row in pairs])

    assert way.fired == 1
    assert [outcome.won for outcome in applied] == [True] * n
    for task, row in pairs:
        assert (await get_task(beside, task.id)).execution_id == row.id
        assert await reasons(beside, task.id) == ["created", "started"]


async def test_of_a_batch_whose_answer_was_lost_the_losers_are_told_from_the_winners(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    pairs = await several(beside, 6)
    for task, _ in pairs[::2]:
        assert (await one(beside, lifecycle.cancel_waiting(task, "me", "", NOW))).won
    way.lose_answer(TASK_WRITE)

    applied = await store.commit([lifecycle.start(task, row, NOW) for task, row in pairs])

    assert way.fired == 1
    assert [outcome.won for outcome in applied] == [False, True] * 3


@pytest.mark.parametrize("n", [1, 5])
async def test_a_stamp_and_a_close_whose_answers_were_lost_are_won(
    store: MongoStore, beside: MongoStore, way: Proxy, n: int
) -> None:
    pairs = await several(beside, n)
    way.lose_answer(ROW_WRITE)
    assert all(a.won for a in await store.commit([lifecycle.stamp(row, "worker-1", NOW, 30) for _, row in pairs]))
    way.lose_answer(ROW_WRITE)
    closing = [lifecycle.close(row, "success", NOW, closed_by="closer", reason="ok", result=row.id) for _, row in pairs]
    assert all(a.won for a in await store.commit(closing))
    assert way.fired == 2
    assert [(await get_row(beside, row.id)).result for _, row in pairs] == [row.id for _, row in pairs]


@pytest.mark.parametrize("n", [1, 4])
async def test_a_request_that_arrives_after_its_repeat_changes_nothing(
    store: MongoStore, beside: MongoStore, way: Proxy, n: int
) -> None:
    """Also where all that it expects holds again: the task was handed back to exactly the state it came from."""
    pairs = await several(beside, n)
    way.hold_request(TASK_WRITE)
    assert all(a.won for a in await store.commit([lifecycle.start(task, row, NOW) for task, row in pairs]))
    assert way.fired == 1
    before = []
    for task, row in pairs:
        await one(beside, lifecycle.close_unsent(row, "handed_back", NOW, closed_by="test", reason="given back"))
        back = lifecycle.settle(await get_task(beside, task.id), await get_row(beside, row.id), NOW, 0)
        assert back is not None
        assert (await one(beside, back)).won
        before.append(await get_task(beside, task.id))
        assert (before[-1].status, before[-1].execution_id) == (task.status, task.execution_id)

    await way.release()

    for task in before:
        assert await get_task(beside, task.id) == task
        assert await reasons(beside, task.id) == ["created", "started", "given back"]


async def test_a_note_that_expects_nothing_is_written_once_though_its_request_came_twice(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    tasks = [await insert_task(beside) for _ in range(3)]
    way.hold_request(TASK_WRITE)
    notes = [ChangeTask(task_id=task.id, expect={}, set={"updated_at": NOW}, history=note("late")) for task in tasks]
    assert all(a.won for a in await store.commit(notes))
    await beside.commit([ChangeTask(task_id=tasks[0].id, expect={}, set={"step": "x"}, history=note("later"))])
    await way.release()
    assert way.fired == 1
    assert await reasons(beside, tasks[0].id) == ["created", "late", "later"]
    assert await reasons(beside, tasks[1].id) == ["created", "late"]


async def test_a_winner_that_others_have_moved_on_is_still_a_winner(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    """The answer is lost, and before the store has asked again the task is already canceled."""
    task = await insert_task(beside)
    row = await insert_row(beside, task)
    way.lose_answer(TASK_WRITE)
    starting = asyncio.ensure_future(one(store, lifecycle.start(task, row, NOW)))
    async with asyncio.timeout(10):
        while (running := await get_task(beside, task.id)).status != "running":
            pass
    await beside.commit([ChangeTask(task_id=task.id, expect={}, set={"status": "canceled"}, history=note("canceled"))])
    assert running.execution_id == row.id
    assert (await starting).won
    assert await reasons(beside, task.id) == ["created", "started", "canceled"]


async def test_an_insert_whose_answer_was_lost_is_ours_with_its_numbers(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    task = make_task(dedupe_key="once", device_id="dev-1")
    way.lose_answer(TASK_INSERT)
    assert (await one(store, InsertTask(task=task, script=None, history=note("created")))).won
    assert await reasons(beside, task.id) == ["created"]
    way.lose_answer(ROW_INSERT)
    given = await one(store, InsertExecution(execution=make_row(task)))
    assert way.fired == 2
    assert (given.won, given.attempt, given.fencing_token) == (True, 1, 1)
    assert len(await beside.executions_of(task.id)) == 1


async def test_an_insert_that_arrives_after_its_repeat_changes_nothing(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    task = await insert_task(beside, device_id="dev-1")
    row = make_row(task)
    way.hold_request(ROW_INSERT)
    assert (await one(store, InsertExecution(execution=row))).won
    stored = await get_row(beside, row.id)
    await beside.commit([lifecycle.close(stored, "success", NOW, closed_by="test", reason="ok")])
    await way.release()
    assert way.fired == 1
    assert [r.active for r in await beside.executions_of(task.id)] == [False]


async def test_lines_whose_answer_was_lost_are_stored_once_and_counted_once(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    row = await insert_row(beside, await insert_task(beside))
    way.lose_answer(LINE_INSERT)
    assert await store.append_logs([make_line(row, n, str(n)) for n in range(4)], max_per_execution=100) == 4
    way.lose_answer(ROW_WRITE)
    assert await store.append_logs([make_line(row, n, str(n)) for n in range(4, 6)], max_per_execution=100) == 2
    way.hold_request(ROW_WRITE)
    assert await store.append_logs([make_line(row, None, "6")], max_per_execution=100) == 1
    await way.release()
    assert way.fired == 3
    stored = await beside.logs(LogQuery(task_id=row.task_id))
    assert [line.line.content for line in stored] == list("0123456")
    assert await get_row(beside, row.id) == replace(row, log_lines=7)


async def test_a_batch_that_died_before_its_lines_were_counted_is_counted_when_it_comes_again(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    """Split otherwise than the first time, as a broker may deliver it."""
    row, other = await insert_row(beside, await insert_task(beside)), await insert_row(beside, await insert_task(beside))
    lines = [make_line(row, n, str(n)) for n in range(6)]
    assert await store.append_logs(lines[:2], max_per_execution=100) == 2
    await log_lines.append(store._db, [*lines[2:5], make_line(other, 1)], 100, NOW, None)  # and the process is gone
    assert (await get_row(beside, row.id)).log_lines == 2
    closing = [lifecycle.close(r, "success", NOW, closed_by="central", reason="ok") for r in (row, other)]
    outcomes = await store.append_and_close([*lines[4:], make_line(other, 1)], closing, max_per_execution=100)
    assert [outcome.won for outcome in outcomes] == [True, True]
    assert [(await get_row(beside, r.id)).log_lines for r in (row, other)] == [6, 1]
    stored = await beside.logs(LogQuery(task_id=row.task_id))
    assert [line.line.content for line in stored] == list("012345")


async def test_a_close_that_counts_and_whose_answer_was_lost_is_counted_once(
    store: MongoStore, beside: MongoStore, way: Proxy
) -> None:
    rows = [await insert_row(beside, await insert_task(beside)) for _ in range(6)]
    lines = [make_line(row, n) for i, row in enumerate(rows) for n in range(i)]
    closing = [lifecycle.close(row, "success", NOW, closed_by="central", reason="ok", result=row.id) for row in rows]
    way.lose_answer(ROW_WRITE)
    outcomes = await store.append_and_close(lines, closing, max_per_execution=100)
    assert way.fired == 1
    assert [outcome.won for outcome in outcomes] == [True] * 6
    stored = [await get_row(beside, row.id) for row in rows]
    assert [(row.log_lines, row.result) for row in stored] == [(i, row.id) for i, row in enumerate(rows)]
