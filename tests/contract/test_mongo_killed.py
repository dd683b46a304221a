"""MongoDB: mongod is killed, steps down and is paused under load. Every step that counts is made once, and callers wait a
bounded time (F51, F52, F53)."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from pymongo import MongoClient

from scriptdispatch.domain.changes import ChangeTask, InsertTask
from scriptdispatch.domain.model import Task
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.store.mongo import CALL_S, MongoStore
from scriptdispatch.store.mongo_writes import INSIST_S
from tests.contract.store_values import NOW, HeldClock, finish, get_task, insert_task, make_task, note, one
from tests.servers import with_database


async def count_up(store: MongoStore, task: Task, until: asyncio.Event) -> int:
    """One step after the other, each with the number that was read; answers how many it was told it won."""
    won = unclear = 0
    while not until.is_set():
        try:
            n = (await get_task(store, task.id)).retry_count
            assert n - won in range(unclear + 1), "a step was lost, or made by nobody"
            change = ChangeTask(task_id=task.id, expect={"retry_count": n}, set={"retry_count": n + 1}, history=note(str(n)))
            won += (await one(store, change)).won
        except StoreUnavailable as error:
            unclear += error.outcome_unknown
            await asyncio.sleep(0.1)  # as every caller does: not to ask a server that is away without a pause
    return won


async def test_steps_are_neither_doubled_nor_lost_when_mongod_is_killed_and_steps_down(
    start_server: Callable[..., Any],
) -> None:
    server = await asyncio.to_thread(start_server, "mongo")
    store = MongoStore(with_database(server.url, "killed"), HeldClock())
    await store.open()
    tasks = [await insert_task(store) for _ in range(30)]
    done = asyncio.Event()
    counting = [asyncio.ensure_future(count_up(store, task, done)) for task in tasks]
    for fault in (kill, step_down, kill):
        await steps_are_made(store, tasks)
        await asyncio.to_thread(fault, server)
    await steps_are_made(store, tasks)
    done.set()
    won = await asyncio.gather(*counting)

    for task, count in zip(tasks, won, strict=True):
        recorded = await get_task(store, task.id)
        reasons = [row.reason for row in await store.history(task.id)]
        assert reasons == ["created", *map(str, range(recorded.retry_count))][-500:]  # each step once, in order
        assert recorded.retry_count >= count
    await store.close()


async def steps(store: MongoStore, tasks: list[Task]) -> int:
    """How far they are together; while the server is away: nowhere."""
    try:
        return sum(task.retry_count for task in await store.tasks([task.id for task in tasks]) if task)
    except StoreUnavailable:
        return -1


async def steps_are_made(store: MongoStore, tasks: list[Task]) -> None:
    async with asyncio.timeout(30):
        while (before := await steps(store, tasks)) < 0:
            await asyncio.sleep(0.05)
        while await steps(store, tasks) < before + 300:
            await asyncio.sleep(0.01)


def step_down(server: Any) -> None:
    """It is no primary for a second, then it is again: there is nobody else."""
    client: MongoClient[dict[str, Any]] = MongoClient(server.url)
    client.admin.command({"replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": True})
    client.close()


def kill(server: Any) -> None:
    """And starts it again."""
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.start()


async def test_a_paused_mongod_makes_callers_wait_a_bounded_time_and_no_step_is_doubled(
    start_server: Callable[..., Any],
) -> None:
    server = await asyncio.to_thread(start_server, "mongo")
    store = MongoStore(with_database(server.url, "paused"), HeldClock())
    await store.open()
    tasks = [await insert_task(store) for _ in range(5)]
    changes = [ChangeTask(task_id=t.id, expect={}, set={"step": "x"}, history=note(f"n{i}")) for i, t in enumerate(tasks)]
    os.kill(server.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        first = asyncio.ensure_future(store.commit(changes))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        behind = asyncio.ensure_future(store.commit(changes[:1]))
        answers = await asyncio.gather(first, behind, return_exceptions=True)
        waited = time.monotonic() - begun
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert [isinstance(a, StoreUnavailable) and a.outcome_unknown for a in answers] == [True, False]
    assert isinstance(answers[1], StoreUnavailable)
    assert waited < INSIST_S + CALL_S + 2
    # All copies that lay before the server are carried out now, in whatever order; then nothing more changes.
    async with asyncio.timeout(20):
        while any(task.step != "x" for task in await store.tasks([t.id for t in tasks]) if task):
            await asyncio.sleep(0.05)
    assert [a.won for a in await store.commit(changes[:1])] == [True]
    for i, task in enumerate(tasks):
        expected = ["created", f"n{i}", *(["n0"] if i == 0 else [])]
        assert [row.reason for row in await store.history(task.id)] == expected
    await store.close()


async def test_a_settled_read_shows_nothing_that_a_failover_may_take_back(start_server: Callable[..., Any]) -> None:
    """The commit point of the majority is held: what is written can be read, and would be lost with this primary."""
    server = await asyncio.to_thread(start_server, "mongo", options=("--setParameter", "enableTestCommands=1"))
    store = MongoStore(with_database(server.url, "settled"), HeldClock())
    await store.open()
    task = await insert_task(store)
    await asyncio.to_thread(hold_commit_point, server, "alwaysOn")
    ending = asyncio.ensure_future(finish(store, task, NOW))
    async with asyncio.timeout(10):
        while (await get_task(store, task.id)).status != "success":
            await asyncio.sleep(0.005)
    assert await store.tasks([task.id], settled=True) == [task]
    await asyncio.to_thread(hold_commit_point, server, "off")
    await insert_task(store)  # the next write moves it
    assert await store.tasks([task.id], settled=True) == [await ending]
    await store.close()


def hold_commit_point(server: Any, mode: str) -> None:
    client: MongoClient[dict[str, Any]]
    with MongoClient(server.url) as client:
        client.admin.command("configureFailPoint", "disableSnapshotting", mode=mode)


# --- soon: applied, and durable a little later

LAZY = ("--journalCommitInterval", "500")  # ms between writes of the journal that nobody waits for


async def test_a_task_that_was_confirmed_survives_its_primary_and_one_that_was_not_is_inserted_anew(
    start_server: Callable[..., Any],
) -> None:
    """The danger is real: mongod dies before its journal is written. The next primary's reign gives it away."""
    server = await asyncio.to_thread(start_server, "mongo", options=LAZY)
    store = MongoStore(with_database(server.url, "confirmed"), HeldClock())
    await store.open()
    lost = False
    for _ in range(20):  # the journal may just be written by itself
        insert, other = new_task(), new_task()
        confirmed = await store.commit([insert], soon=True)
        await store.confirm([insert], confirmed)
        unconfirmed = await store.commit([other], soon=True)
        assert confirmed[0].reign == unconfirmed[0].reign is not None
        await asyncio.to_thread(kill, server)
        assert await store.tasks([insert.task.id]) == [insert.task]
        lost = await store.tasks([other.task.id]) == [None]
        await store.confirm([other], unconfirmed)
        assert await store.tasks([other.task.id], settled=True) == [other.task]
        assert [row.reason for row in await store.history(other.task.id)] == ["created"]
        if lost:
            break
    assert lost
    await store.close()


async def test_a_confirmation_that_gets_no_answer_says_that_the_outcome_is_unknown(start_server: Callable[..., Any]) -> None:
    server = await asyncio.to_thread(start_server, "mongo")
    store = MongoStore(with_database(server.url, "unconfirmed"), HeldClock())
    await store.open()
    insert = new_task()
    outcomes = await store.commit([insert], soon=True)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.confirm([insert], outcomes)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert caught.value.outcome_unknown
    await store.close()


async def test_a_single_server_makes_everything_durable_at_once(start_server: Callable[..., Any]) -> None:
    server = await asyncio.to_thread(start_server, "mongo", alone=True, options=LAZY)
    store = MongoStore(with_database(server.url, "alone"), HeldClock())
    await store.open()
    for _ in range(5):
        insert = new_task()
        [outcome] = await store.commit([insert], soon=True)
        assert (outcome.won, outcome.reign) == (True, None)
        await asyncio.to_thread(kill, server)
        assert await store.tasks([insert.task.id]) == [insert.task]
    await store.close()


def new_task() -> InsertTask:
    return InsertTask(task=make_task(), script=None, history=note("created"))
