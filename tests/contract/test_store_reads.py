"""Every store: what is found, in which order, and page by page."""

from datetime import datetime, timedelta
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask
from scriptdispatch.domain.model import Error, Task
from scriptdispatch.store.port import Moment, Store, TaskFilter
from tests.contract.store_values import (
    NOW,
    HeldClock,
    finish,
    fresh_id,
    get_row,
    get_task,
    insert_row,
    insert_task,
    one,
    start,
)

pytest_plugins = ("tests.contract.store_backends",)


def ids(records: list[Any]) -> list[str]:
    return [record.id for record in records]


async def test_a_settled_read_shows_what_its_own_process_has_written(store: Store) -> None:
    tasks = [await insert_task(store) for _ in range(3)]
    done = [await finish(store, task, NOW) for task in tasks]
    wanted = [tasks[2].id, fresh_id(), tasks[0].id]
    assert await store.tasks(wanted, settled=True) == [done[2], None, done[0]]


# --- GET /tasks

FILTERS: dict[str, TaskFilter] = {
    "nothing": TaskFilter(),
    "one status": TaskFilter(statuses=("failed",)),
    "two statuses": TaskFilter(statuses=("failed", "waiting")),
    "all statuses but one": TaskFilter(statuses=("waiting", "running", "failed", "success")),
    "device": TaskFilter(device_id="dev-1"),
    "type": TaskFilter(type="backup"),
    "priority": TaskFilter(priority="high"),
    "label": TaskFilter(labels=(("site", "a"),)),
    "two labels": TaskFilter(labels=(("site", "a"), ("team", "x"))),
    "a label nobody has": TaskFilter(labels=(("site", "zzz"),)),
    "error code": TaskFilter(error_code="TIMEOUT"),
    "dedupe key": TaskFilter(dedupe_key="key-5"),
    "created after": TaskFilter(created_after=NOW + timedelta(minutes=7)),
    "created before": TaskFilter(created_before=NOW + timedelta(minutes=7)),
    "created between": TaskFilter(created_after=NOW + timedelta(minutes=3), created_before=NOW + timedelta(minutes=9)),
    "status and device": TaskFilter(statuses=("failed",), device_id="dev-1"),
    "status and type": TaskFilter(statuses=("failed", "success"), type="backup"),
    "status and label": TaskFilter(statuses=("waiting",), labels=(("site", "a"),)),
    "status and error": TaskFilter(statuses=("failed",), error_code="TIMEOUT"),
    "type and priority": TaskFilter(type="script", priority="high"),
    "device, label, time": TaskFilter(device_id="dev-1", labels=(("site", "a"),), created_after=NOW + timedelta(minutes=2)),
}


async def a_mixed_lot(store: Store) -> list[Task]:
    """Thirty tasks that differ in everything one can ask for, oldest first."""
    lot = []
    for i in range(30):
        labels = {name: value for name, value, every in (("site", "a", 3), ("team", "x", 2)) if i % every == 0}
        lot.append(
            await insert_task(
                store,
                created_at=NOW + timedelta(minutes=i / 2),
                device_id=f"dev-{i % 4}" if i % 7 else None,
                type="backup" if i % 5 == 0 else "script",
                priority=("low", "normal", "high")[i % 3],
                labels=labels,
                dedupe_key=f"key-{i}" if i % 5 == 0 else None,
                status=("waiting", "failed", "success", "running")[i % 4],
                error=Error(code="TIMEOUT" if i % 3 else "SYSTEM_ERROR", message="") if i % 4 == 1 else None,
            )
        )
    return lot


def expected(task: Task, where: TaskFilter) -> bool:
    """The filter in the words of the API, written without the product's own code."""
    plain = all(
        getattr(where, name) in (None, getattr(task, name)) for name in ("device_id", "type", "priority", "dedupe_key")
    )
    return (
        plain
        and (not where.statuses or task.status in where.statuses)
        and set(where.labels) <= set(task.labels.items())
        and (where.error_code is None or (task.error is not None and task.error.code == where.error_code))
        and (where.created_after is None or task.created_at >= where.created_after)
        and (where.created_before is None or task.created_at < where.created_before)
    )


async def test_each_filter_finds_exactly_its_tasks_newest_first(store: Store) -> None:
    lot = await a_mixed_lot(store)
    for name, where in FILTERS.items():
        wanted = [task for task in reversed(lot) if expected(task, where)]
        assert await store.list_tasks(where, 100) == wanted, name
        assert await store.list_tasks(where, 3) == wanted[:3], name
        assert wanted or name == "a label nobody has", f"{name}: the lot does not try it"


async def test_any_two_filters_hold_together(store: Store) -> None:
    lot = await a_mixed_lot(store)
    single: list[dict[str, Any]] = [
        {"statuses": ("failed", "waiting")}, {"device_id": "dev-1"}, {"type": "script"}, {"priority": "high"},
        {"labels": (("site", "a"),)}, {"error_code": "TIMEOUT"}, {"dedupe_key": "key-5"},
        {"created_after": NOW + timedelta(minutes=2)}, {"created_before": NOW + timedelta(minutes=12)},
    ]  # fmt: skip
    for a, b in product(single, single):
        where = TaskFilter(**{**a, **b})
        assert await store.list_tasks(where, 100) == [task for task in reversed(lot) if expected(task, where)], where


async def test_tasks_are_found_by_their_ids_newest_first(store: Store) -> None:
    lot = await a_mixed_lot(store)
    where = TaskFilter(ids=(lot[3].id, "unknown", lot[9].id, lot[4].id, lot[9].id))
    assert ids(await store.list_tasks(where, 100)) == [lot[9].id, lot[4].id, lot[3].id]
    assert ids(await store.list_tasks(TaskFilter(ids=where.ids, statuses=(lot[4].status,)), 100)) == [lot[4].id]


@pytest.mark.parametrize("name", ["nothing", "two statuses", "label", "device", "type", "priority", "error code"])
async def test_pages_lose_no_task_and_show_none_twice_while_new_ones_arrive(store: Store, name: str) -> None:
    lot = await a_mixed_lot(store)
    where = FILTERS[name]
    seen: list[str] = []
    before = None
    while True:
        page = await store.list_tasks(replace(where, before_id=before), 2)
        if not page:
            break
        seen += ids(page)
        before = page[-1].id
        await insert_task(
            store, created_at=NOW + timedelta(days=1), labels={"site": "a"}, device_id="dev-1", type="backup",
            priority="high", status="failed", error=Error(code="TIMEOUT", message=""),
        )  # fmt: skip
    assert seen == [task.id for task in reversed(lot) if expected(task, where)]


async def test_a_task_found_by_error_code_is_not_found_by_it_once_the_error_is_gone(store: Store) -> None:
    task = await insert_task(store, error=Error(code="TIMEOUT", message="late"))
    where = TaskFilter(error_code="TIMEOUT")
    assert ids(await store.list_tasks(where, 5)) == [task.id]
    await store.commit([ChangeTask(task_id=task.id, expect={}, set={"error": Error(code="CANCELED", message="")})])
    assert await store.list_tasks(where, 5) == []
    assert ids(await store.list_tasks(TaskFilter(error_code="CANCELED"), 5)) == [task.id]


async def test_an_id_is_found_by_its_last_characters(store: Store) -> None:
    tasks = [await insert_task(store) for _ in range(20)]
    for task in tasks[:3]:
        assert await store.find_id(task.id[-8:]) == [task.id]
        assert await store.find_id(task.id[-12:]) == [task.id]
        assert await store.find_id(task.id) == [task.id]
        assert await store.find_id("x" + task.id[-8:]) == []
    assert await store.find_id(tasks[0].id[-7:]) == []
    assert await store.find_id("%%%%%%%%") == []


async def test_of_many_ids_with_one_tail_five_are_named(store: Store) -> None:
    for i in range(7):
        await insert_task(store, id=f"0000000{i}-0000-7000-8000-0000deadbeef")
    assert len(await store.find_id("deadbeef")) == 5
    assert await store.find_id("3-0000-7000-8000-0000deadbeef") == ["00000003-0000-7000-8000-0000deadbeef"]


# --- what agents look for


async def test_due_tasks_come_by_time_then_id_and_page_without_gap(store: Store) -> None:
    due = []
    for i in range(12):
        at = NOW - timedelta(seconds=i % 3)
        status = "waiting" if i % 2 else "failed_waiting_retry"
        due.append(await insert_task(store, next_run_at=at, status=status))
    await insert_task(store, next_run_at=NOW + timedelta(milliseconds=1))
    await insert_task(store, next_run_at=NOW, status="paused")
    await insert_task(store, next_run_at=None, status="running")
    wanted = sorted((task.next_run_at or NOW, task.id) for task in due)

    assert await store.due_tasks(NOW, None, 100) == wanted

    paged: list[Moment] = []
    after = None
    while page := await store.due_tasks(NOW, after, 5):
        paged += page
        after = page[-1]
    assert paged == wanted


async def test_a_task_leaves_those_that_are_due_when_it_starts(store: Store) -> None:
    task = await insert_task(store)
    assert await store.due_tasks(NOW, None, 5) == [(task.next_run_at, task.id)]
    await start(store, task)
    assert await store.due_tasks(NOW, None, 5) == []


async def test_statuses_are_of_those_that_are_there(store: Store) -> None:
    waiting = await insert_task(store)
    running, _ = await start(store, await insert_task(store))
    assert await store.statuses([waiting.id, fresh_id(), running.id]) == {waiting.id: "waiting", running.id: "running"}
    assert await store.statuses([]) == {}


async def test_the_oldest_due_is_that_of_an_executable_task_whose_time_has_come(store: Store, clock: HeldClock) -> None:
    assert await store.oldest_due() is None
    await insert_task(store, next_run_at=NOW - timedelta(hours=2), status="paused")
    await insert_task(store, next_run_at=NOW + timedelta(seconds=5))
    assert await store.oldest_due() is None
    clock.advance(seconds=6)
    assert await store.oldest_due() == NOW + timedelta(seconds=5)
    await insert_task(store, next_run_at=NOW - timedelta(minutes=1), status="failed_waiting_retry")
    assert await store.oldest_due() == NOW - timedelta(minutes=1)


async def test_tasks_under_way_come_by_id(store: Store) -> None:
    tasks = [await insert_task(store, status=("running", "send_success", "waiting", "success")[i % 4]) for i in range(16)]
    wanted = [task.id for task in tasks if task.status in ("running", "send_success")]
    assert ids(await store.tasks_under_way(None, 100)) == wanted
    first = await store.tasks_under_way(None, 3)
    assert ids(first) + ids(await store.tasks_under_way(first[-1].id, 100)) == wanted


async def test_cancels_to_ask_are_those_under_way_oldest_request_first(store: Store) -> None:
    asked = []
    for i in range(3):
        task, _ = await start(store, await insert_task(store))
        assert (await one(store, lifecycle.request_cancel(task, "me", "", NOW - timedelta(seconds=i)))).won
        asked.append(task.id)
    await start(store, await insert_task(store))
    await finish(store, await get_task(store, asked[1]), NOW, "canceled")
    assert ids(await store.cancels_to_ask(10)) == [asked[2], asked[0]]
    assert ids(await store.cancels_to_ask(1)) == [asked[2]]


# --- executions


async def test_executions_of_a_task_come_by_attempt(store: Store) -> None:
    task = await insert_task(store)
    rows = []
    for _ in range(3):
        row = await insert_row(store, task)
        await store.commit([lifecycle.close(row, "handed_back", NOW, closed_by="t", reason="t")])
        rows.append(row.id)
    other = await insert_row(store, await insert_task(store))
    assert ids(await store.executions_of(task.id)) == rows
    assert [row and row.id for row in await store.executions([other.id, "unknown", rows[0]])] == [other.id, None, rows[0]]
    assert await store.executions_of("unknown") == []


async def test_open_executions_are_narrowed_by_whatever_is_given(store: Store) -> None:
    rows = []
    for i in range(8):
        task = await insert_task(store, device_id=None if i == 7 else f"dev-{i}")
        at = NOW + timedelta(seconds=i)
        rows.append(await insert_row(store, task, worker_id=f"w{i % 2}", created_at=at))
    await store.commit([lifecycle.close(rows[0], "success", NOW, closed_by="t", reason="t")])
    await store.commit([lifecycle.stamp(rows[1], "w1", NOW, 30)])
    open_ids = ids(rows)[1:]

    assert ids(await store.open_executions()) == open_ids
    assert ids(await store.open_executions(limit=3)) == open_ids[:3]
    assert ids(await store.open_executions(after=open_ids[2])) == open_ids[3:]
    assert ids(await store.open_executions(devices=["dev-3", "dev-0", "dev-2", "dev-2"])) == [rows[2].id, rows[3].id]
    assert ids(await store.open_executions(worker_ids=["w1"])) == [rows[i].id for i in (1, 3, 5, 7)]
    assert ids(await store.open_executions(worker_ids=["w1"], devices=["dev-2", "dev-3"])) == [rows[3].id]
    before = NOW + timedelta(seconds=4)
    assert ids(await store.open_executions(unstamped_before=before)) == [rows[2].id, rows[3].id]
    assert await store.open_executions(devices=[]) == []
    assert await store.open_executions(worker_ids=[]) == []


async def test_overdue_executions_are_open_and_stamped_longest_first(store: Store) -> None:
    rows = [await insert_row(store, await insert_task(store)) for _ in range(5)]
    for i, row in enumerate(rows[:4]):
        deadline = {"sending_at": NOW, "deadline_at": NOW - timedelta(seconds=i)}
        await store.commit([ChangeExecution(execution_id=row.id, expect={}, set=deadline)])
    await store.commit([lifecycle.close(rows[2], "success", NOW, closed_by="t", reason="t")])
    assert ids(await store.overdue_executions(NOW, 10)) == [rows[3].id, rows[1].id]
    assert ids(await store.overdue_executions(NOW + timedelta(seconds=1), 2)) == [rows[3].id, rows[1].id]
    assert rows[0].id in ids(await store.overdue_executions(NOW + timedelta(milliseconds=1), 10))


async def test_closed_executions_come_in_the_order_of_their_ends_page_by_page(store: Store) -> None:
    rows = [await insert_row(store, await insert_task(store)) for _ in range(9)]
    for i, row in enumerate(rows[:8]):
        at = NOW + timedelta(seconds=(i * 5) % 8 // 2)  # not in the order of ids, and two at a time
        await store.commit([lifecycle.close(row, "success", at, closed_by="t", reason="t")])
    until = NOW + timedelta(seconds=3)
    wanted = sorted((NOW + timedelta(seconds=(i * 5) % 8 // 2), row.id) for i, row in enumerate(rows[:8]) if (i * 5) % 8 < 6)
    assert await store.closed_executions((NOW, ""), until, 100) == wanted
    paged, after = [], (NOW, "")
    while page := await store.closed_executions(after, until, 1):
        paged += page
        after = page[-1]
    assert paged == wanted
    assert await store.closed_executions(wanted[3], until, 100) == wanted[4:]
    assert await store.closed_executions((until, ""), until, 100) == []


# --- stats


async def test_stats_count_what_ended_in_the_span(store: Store) -> None:
    async def ended(at: datetime, status: str, code: str | None = None, started: int | None = None) -> None:
        task = await insert_task(store)
        error = Error(code=code, message="") if code else None
        first = at - timedelta(milliseconds=started) if started is not None else None
        await finish(store, task, at, status, error=error, first_started_at=first)

    minute = NOW.replace(second=0, microsecond=0)
    await ended(NOW, "success", started=100)
    await ended(NOW + timedelta(seconds=1), "success", started=300)
    await ended(NOW + timedelta(seconds=2), "failed", "TIMEOUT", started=200)
    await ended(NOW + timedelta(minutes=1), "failed", "TIMEOUT")
    await ended(NOW + timedelta(minutes=1), "canceled", "CANCELED")
    await ended(NOW - timedelta(milliseconds=1), "success", started=9999)
    await ended(NOW + timedelta(minutes=2), "success", started=9999)

    stats = await store.stats(NOW, NOW + timedelta(minutes=2))

    assert stats.finished == {"success": 2, "failed": 2, "canceled": 1}
    assert stats.per_minute == [(minute, 2, 1), (minute + timedelta(minutes=1), 0, 1)]
    assert stats.errors == {"TIMEOUT": 2, "CANCELED": 1}
    assert stats.duration_ms == (200, 300)


async def test_stats_tell_how_long_each_phase_took(store: Store) -> None:
    for i in range(1, 101):
        row = await insert_row(store, await insert_task(store), wait_ms=i)
        sent = NOW - timedelta(milliseconds=3 * i)
        begun = sent - timedelta(milliseconds=2 * i)
        spent = {"sending_at": begun, "answered_at": sent, "sent_at": sent, "push": "sent"} if i % 2 else {}
        closed = {"active": False, "finished_at": NOW, **spent}
        await store.commit([ChangeExecution(execution_id=row.id, expect={}, set=closed)])
    stats = await store.stats(NOW, NOW + timedelta(seconds=1))
    assert (stats.wait_ms, stats.push_ms, stats.run_ms) == ((50, 95), (98, 190), (147, 285))


async def test_stats_count_no_run_of_what_was_not_taken(store: Store) -> None:
    for i, push in enumerate(("not_sent", "refused", "unknown", "sent"), start=1):
        row = await insert_row(store, await insert_task(store), wait_ms=0)
        begun = NOW - timedelta(milliseconds=100 * i)
        closed = {"active": False, "finished_at": NOW, "sending_at": begun, "push": push}
        await store.commit([ChangeExecution(execution_id=row.id, expect={}, set=closed)])
        assert (await get_row(store, row.id)).run_ms == (None if i <= 2 else 100 * i)
    stats = await store.stats(NOW, NOW + timedelta(seconds=1))
    assert stats.push_ms == (100, 200), "of those that were certainly not taken: until they were closed"
    assert stats.run_ms == (300, 400)


async def test_stats_of_a_quiet_span_are_empty(store: Store) -> None:
    stats = await store.stats(NOW, NOW + timedelta(hours=1))
    assert (stats.finished, stats.per_minute, stats.errors) == ({}, [], {})
    assert stats.wait_ms == stats.push_ms == stats.run_ms == stats.duration_ms == (None, None)


async def test_what_was_just_written_is_read_at_once(store: Store) -> None:
    for _ in range(50):
        _, row = await start(store, await insert_task(store, device_id="dev-1"))
        await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
        assert not (await get_row(store, row.id)).active
    assert len(await store.executions_of(fresh_id())) == 0
