"""Every store: what a commit records, who wins, and what the loser finds."""

import asyncio
from datetime import datetime, timedelta
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import ChangeExecution, ChangeTask, InsertExecution, InsertTask
from scriptdispatch.domain.model import Error, Execution, Task
from scriptdispatch.errors import StaleTerm
from scriptdispatch.store.port import Store, TaskFilter
from tests.contract.store_values import (
    NOW,
    finish,
    fresh_id,
    get_row,
    get_task,
    insert_row,
    insert_task,
    make_row,
    make_script,
    make_task,
    note,
    one,
    start,
)

pytest_plugins = ("tests.contract.store_backends",)

# --- compare-and-set


@pytest.mark.parametrize(
    ("expect", "won"),
    [
        ({}, True),
        ({"status": "waiting"}, True),
        ({"status": "paused"}, False),
        ({"status": ("waiting", "paused")}, True),
        ({"status": ("running", "paused")}, False),
        ({"status": ()}, False),
        ({"execution_id": None}, True),
        ({"execution_id": "another"}, False),
        ({"device_id": None}, False),
        ({"execution_id": (None, "another")}, True),
        ({"execution_id": ("one", "another")}, False),
        ({"device_id": (None, "dev-1")}, True),
        ({"cancel_requested": False}, True),
        ({"cancel_requested": True}, False),
        ({"next_run_at": NOW}, True),
        ({"next_run_at": NOW + timedelta(milliseconds=1)}, False),
        ({"status": "waiting", "attempt": 0, "round": 1, "late_success_of": None}, True),
        ({"status": "waiting", "attempt": 1}, False),
    ],
)
async def test_a_change_is_made_only_if_everything_it_expects_holds(store: Store, expect: dict[str, Any], won: bool) -> None:
    task = await insert_task(store, device_id="dev-1")
    change = ChangeTask(task_id=task.id, expect=expect, set={"step": "changed"}, history=note("changed"))

    assert (await one(store, change)).won is won

    recorded = await get_task(store, task.id)
    assert recorded == (msgspec.structs.replace(task, step="changed") if won else task)
    assert [row.reason for row in await store.history(task.id)] == ["created", *(["changed"] if won else [])]


@pytest.mark.parametrize("count", [1, 12])
async def test_late_notes_leave_the_task_as_it_is_and_are_in_its_history(store: Store, count: int) -> None:
    """Changes that set nothing: alone, and many in one commit, each with a row of its own."""
    tasks = [await finish(store, await insert_task(store), NOW, "canceled") for _ in range(count)]
    rows = [make_row(task, attempt=n, outcome="timeout") for n, task in enumerate(tasks)]
    later = NOW + timedelta(seconds=9)
    notes = [lifecycle.late_note(task.id, row, "SUCCESS", later) for task, row in zip(tasks, rows, strict=True)]
    assert [outcome.won for outcome in await store.commit(notes)] == [True] * count
    assert await store.tasks([task.id for task in tasks]) == tasks
    for task, change in zip(tasks, notes, strict=True):
        assert (await store.history(task.id))[-1] == change.history


async def test_a_change_of_a_task_that_does_not_exist_is_lost_and_leaves_no_history(store: Store) -> None:
    missing = fresh_id()
    assert not (await one(store, ChangeTask(task_id=missing, expect={}, set={"step": "x"}, history=note("x")))).won
    assert await store.history(missing) == []
    assert not (await one(store, ChangeExecution(execution_id=missing, expect={}, set={"reason": "x"}))).won


async def test_the_same_move_is_won_once_and_then_lost(store: Store) -> None:
    task = await insert_task(store)
    row = await insert_row(store, task)
    move = lifecycle.start(task, row, NOW)

    assert [applied.won for applied in await store.commit([move, move])] == [True, False]

    recorded = await get_task(store, task.id)
    assert (recorded.status, recorded.execution_id, recorded.attempt) == ("running", row.id, 1)
    assert [h.to_status for h in await store.history(task.id)] == [None, "running"]


async def test_an_execution_is_closed_once(store: Store) -> None:
    _, row = await start(store, await insert_task(store))
    success = lifecycle.close(row, "success", NOW, closed_by="closer", reason="ok", result={"n": 1})
    timeout = lifecycle.close(row, "timeout", NOW, closed_by="checker", reason="late")

    assert [applied.won for applied in await store.commit([success, timeout])] == [True, False]

    closed = await get_row(store, row.id)
    assert (closed.active, closed.outcome, closed.closed_by, closed.result) == (False, "success", "closer", {"n": 1})


async def test_a_value_can_be_set_to_nothing(store: Store) -> None:
    task = await insert_task(store, error=Error(code="TIMEOUT", message="late"), result=[1], step="s", next_run_at=NOW)
    nothing: dict[str, Any] = {"error": None, "result": None, "step": None, "next_run_at": None}
    assert (await one(store, ChangeTask(task_id=task.id, expect={"step": "s"}, set=nothing))).won
    assert await get_task(store, task.id) == msgspec.structs.replace(task, **nothing)


async def test_outcomes_come_in_the_order_of_the_changes(store: Store) -> None:
    tasks = [await insert_task(store) for _ in range(6)]
    changes = [ChangeTask(task_id=t.id, expect={"attempt": i % 2}, set={"progress": i}) for i, t in enumerate(tasks)]
    assert [applied.won for applied in await store.commit(changes)] == [True, False] * 3
    assert [task.progress for task in await store.tasks([t.id for t in tasks]) if task] == [0, 0, 2, 0, 4, 0]


async def test_nothing_to_do_is_no_error(store: Store) -> None:
    assert await store.commit([]) == []
    assert await store.tasks([]) == []
    assert await store.executions([]) == []
    assert await store.append_logs([], max_per_execution=5) == 0


async def test_many_callers_racing_for_one_change_have_one_winner(store: Store) -> None:
    task = await insert_task(store)
    changes = [ChangeTask(task_id=task.id, expect={"worker_id": None}, set={"worker_id": f"w{i}"}) for i in range(50)]

    won = [(await applied)[0].won for applied in [asyncio.ensure_future(store.commit([change])) for change in changes]]

    assert won.count(True) == 1
    assert (await get_task(store, task.id)).worker_id == f"w{won.index(True)}"


async def test_many_callers_counting_up_lose_no_step(store: Store) -> None:
    task = await insert_task(store)

    async def count_up(times: int) -> None:
        while times:
            n = (await get_task(store, task.id)).retry_count
            change = ChangeTask(task_id=task.id, expect={"retry_count": n}, set={"retry_count": n + 1}, history=note(str(n)))
            times -= (await one(store, change)).won

    await asyncio.gather(*(count_up(10) for _ in range(8)))

    assert (await get_task(store, task.id)).retry_count == 80
    assert [row.reason for row in await store.history(task.id)] == ["created", *map(str, range(80))]


# --- tasks


async def test_a_task_is_stored_with_its_script_and_history(store: Store) -> None:
    script = make_script()
    task = make_task(script_id=script.id)
    created = lifecycle.create(task, script)

    assert (await one(store, created)).won

    assert await get_task(store, task.id) == task
    assert await store.scripts([script.id, "unknown"]) == [script, None]
    assert await store.history(task.id) == [created.history]


async def test_a_script_is_stored_once_however_many_tasks_carry_it(store: Store) -> None:
    first, again = make_script(), msgspec.structs.replace(make_script(), created_at=NOW + timedelta(days=1))
    for script in (first, again):
        await insert_task(store, script=script, script_id=script.id)
    assert await store.scripts([first.id]) == [first]


async def test_an_insert_repeated_after_a_lost_reply_is_won_and_changes_nothing(store: Store) -> None:
    task = make_task(dedupe_key="k", labels={"site": "a"})
    insert = InsertTask(task=task, script=None, history=note("created"))
    assert (await one(store, insert)).won
    moved = ChangeTask(task_id=task.id, expect={}, set={"status": "paused"})
    await store.commit([moved])

    assert (await one(store, insert)).won

    assert (await get_task(store, task.id)).status == "paused"
    assert len(await store.history(task.id)) == 1
    assert (await store.counts())["paused"] == 1
    assert len(await store.list_tasks(TaskFilter(labels=(("site", "a"),)), 10)) == 1


async def test_a_dedupe_key_is_taken_once_and_the_loser_learns_by_whom(store: Store) -> None:
    first = await insert_task(store, dedupe_key="once")
    second = make_task(dedupe_key="once")

    lost = await one(store, InsertTask(task=second, script=make_script(), history=note("created")))

    assert (lost.won, lost.holder) == (False, first.id)
    assert await store.tasks([second.id]) == [None]
    assert await store.history(second.id) == []
    assert await store.scripts([make_script().id]) == [None]
    assert (await store.counts())["waiting"] == 1


async def test_within_one_commit_a_dedupe_key_is_taken_once(store: Store) -> None:
    tasks = [make_task(dedupe_key="once") for _ in range(3)]
    applied = await store.commit([InsertTask(task=task, script=None, history=note("created")) for task in tasks])
    assert [a.won for a in applied] == [True, False, False]
    assert [a.holder for a in applied] == [None, tasks[0].id, tasks[0].id]


async def test_tasks_without_a_dedupe_key_do_not_meet(store: Store) -> None:
    await insert_task(store)
    await insert_task(store)
    assert (await store.counts())["waiting"] == 2


async def test_tasks_are_answered_in_the_order_asked_with_gaps(store: Store) -> None:
    a, b = await insert_task(store), await insert_task(store)
    assert await store.tasks([b.id, "unknown", a.id, b.id]) == [b, None, a, b]


async def test_history_keeps_the_last_500_in_order(store: Store) -> None:
    task = await insert_task(store)
    await store.commit([ChangeTask(task_id=task.id, expect={}, set={}, history=note(str(i))) for i in range(520)])
    assert [row.reason for row in await store.history(task.id)] == [str(i) for i in range(20, 520)]


async def test_the_counts_follow_every_change_of_status(store: Store) -> None:
    assert set((await store.counts()).values()) == {0}
    tasks = [await insert_task(store) for _ in range(5)]
    for task, status in zip(tasks, ("success", "success", "failed", "waiting", "running"), strict=True):
        await store.commit([ChangeTask(task_id=task.id, expect={}, set={"status": status})])
    counted = {status: n for status, n in (await store.counts()).items() if n}
    assert counted == {"success": 2, "failed": 1, "waiting": 1, "running": 1}


# --- executions


async def test_fence_and_attempt_rise_without_gaps(store: Store) -> None:
    tasks = [await insert_task(store, device_id="dev-1") for _ in range(2)]
    given = []
    for task in (tasks[0], tasks[1], tasks[0], tasks[1], tasks[1]):
        row = make_row(task)
        applied = await one(store, InsertExecution(execution=row))
        recorded = await get_row(store, row.id)
        assert (applied.attempt, applied.fencing_token) == (recorded.attempt, recorded.fencing_token)
        given.append((recorded.attempt, recorded.fencing_token))
        await store.commit([lifecycle.close(recorded, "handed_back", NOW, closed_by="test", reason="test")])
    assert given == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]


async def test_a_busy_device_names_its_open_execution_and_uses_up_no_number(store: Store) -> None:
    a, b = await insert_task(store, device_id="dev-1"), await insert_task(store, device_id="dev-1")
    holder = await insert_row(store, a)
    late = make_row(b)

    lost = await one(store, InsertExecution(execution=late))

    assert (lost.won, lost.holder, lost.attempt, lost.fencing_token) == (False, holder.id, None, None)
    assert await store.executions([late.id]) == [None]
    await store.commit([lifecycle.close(holder, "success", NOW, closed_by="test", reason="ok")])
    won = await one(store, InsertExecution(execution=late))
    assert (won.won, won.attempt, won.fencing_token) == (True, 1, 2)


async def test_an_execution_inserted_again_is_ours_with_its_old_numbers(store: Store) -> None:
    task = await insert_task(store)
    row = make_row(task)
    first = await one(store, InsertExecution(execution=row))
    await store.commit([lifecycle.stamp(await get_row(store, row.id), "worker-1", NOW, 30)])
    before = await get_row(store, row.id)

    again = await one(store, InsertExecution(execution=row))

    assert again == first
    assert again.won
    assert await get_row(store, row.id) == before
    await store.commit([lifecycle.close(before, "success", NOW, closed_by="test", reason="ok")])
    assert await one(store, InsertExecution(execution=row)) == first  # also once it is closed
    assert not (await get_row(store, row.id)).active


async def test_without_a_device_there_is_no_fence_and_nobody_waits(store: Store) -> None:
    task = await insert_task(store, device_id=None)
    rows = [await insert_row(store, task) for _ in range(3)]
    assert [(row.attempt, row.fencing_token, row.active) for row in rows] == [(n, None, True) for n in (1, 2, 3)]
    assert await store.executions_of(task.id) == rows


async def test_many_callers_inserting_for_one_device_have_one_winner(store: Store) -> None:
    tasks = [await insert_task(store, device_id="dev-1") for _ in range(20)]
    rows = [make_row(task) for task in tasks]
    applied = await asyncio.gather(*(one(store, InsertExecution(execution=row)) for row in rows))
    (winner,) = [row.id for row, outcome in zip(rows, applied, strict=True) if outcome.won]
    assert {outcome.holder for outcome in applied if not outcome.won} == {winner}
    assert [row.id for row in await store.open_executions(devices=["dev-1"])] == [winner]


# --- terms


async def test_a_stale_term_writes_nothing(store: Store) -> None:
    task = await insert_task(store)
    change = ChangeTask(task_id=task.id, expect={}, set={"step": "changed"}, history=note("changed"))
    await store.commit([], term=7)

    with pytest.raises(StaleTerm):
        await store.commit([change], term=6)

    assert await get_task(store, task.id) == task
    assert len(await store.history(task.id)) == 1
    assert (await one(store, change, term=7)).won
    assert (await one(store, change, term=8)).won
    with pytest.raises(StaleTerm):
        await store.commit([change], term=7)
    assert (await one(store, change)).won  # a writer without a term is no leader


async def test_a_stale_leader_does_not_spoil_those_who_write_beside_it(store: Store) -> None:
    tasks = [await insert_task(store) for _ in range(10)]
    await store.commit([], term=5)
    changes = [ChangeTask(task_id=task.id, expect={}, set={"step": "x"}) for task in tasks]
    answers = await asyncio.gather(
        *(store.commit([change], term=4 if i == 3 else None) for i, change in enumerate(changes)), return_exceptions=True
    )
    assert [isinstance(answer, StaleTerm) for answer in answers] == [i == 3 for i in range(10)]
    assert [task.step for task in await store.tasks([t.id for t in tasks]) if task] == ["x"] * 3 + [None] + ["x"] * 6


# --- every field

_TEXT = st.text(max_size=20)
_TIMES = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9990, 1, 1)).map(
    lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000, tzinfo=NOW.tzinfo)
)
_INTS = st.integers(-(2**53), 2**53)
_JSON = st.recursive(
    st.none() | st.booleans() | _INTS | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Anything a field of this type may hold."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_TEXT, values_of(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return records(kind)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: _TEXT, int: _INTS, bool: st.booleans(), datetime: _TIMES, type(None): st.none(), Any: _JSON,
        float: st.floats(allow_nan=False, allow_infinity=False),
    }  # fmt: skip
    return plain[kind]


def records(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: values_of(field.type) for field in msgspec.structs.fields(kind)})


_MANY = settings(max_examples=40, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate])


@_MANY
@given(task=records(Task))
async def test_every_field_of_a_task_comes_back_as_it_was(store: Store, task: Task) -> None:
    task = msgspec.structs.replace(task, id=fresh_id(), dedupe_key=None if task.dedupe_key is None else fresh_id())
    assert (await one(store, InsertTask(task=task, script=None, history=note("created")))).won
    assert await get_task(store, task.id) == task


@_MANY
@given(row=records(Execution))
async def test_every_field_of_an_execution_comes_back_as_it_was(store: Store, row: Execution) -> None:
    device_id = None if row.device_id is None else fresh_id()
    row = msgspec.structs.replace(row, id=fresh_id(), task_id=fresh_id(), device_id=device_id)
    given = await one(store, InsertExecution(execution=row))
    assert given.won
    assert await get_row(store, row.id) == msgspec.structs.replace(
        row, attempt=given.attempt, fencing_token=given.fencing_token
    )


@_MANY
@given(old=records(Task), new=records(Task))
async def test_every_field_of_a_task_can_be_expected_and_changed(store: Store, old: Task, new: Task) -> None:
    old = msgspec.structs.replace(old, id=fresh_id(), dedupe_key=None)
    new = msgspec.structs.replace(new, id=old.id, dedupe_key=None, labels=old.labels)
    assert (await one(store, InsertTask(task=old, script=None, history=note("created")))).won
    change = ChangeTask(task_id=old.id, expect=msgspec.structs.asdict(old), set=msgspec.structs.asdict(new))
    assert (await one(store, change)).won
    assert await get_task(store, old.id) == new


async def test_a_history_row_comes_back_as_it_was(store: Store) -> None:
    task, row = await start(store, await insert_task(store))
    error = Error(code="EXECUTION_FAILED", message="exit 3", details={"exit_code": 3})
    await store.commit([lifecycle.close(row, "failed", NOW, closed_by="closer", reason="exit 3", error=error)])
    change = lifecycle.settle(task, await get_row(store, row.id), NOW, 0.5)
    assert change is not None
    assert (await one(store, change)).won
    last = (await store.history(task.id))[-1]
    assert last == change.history
    assert (last.kind, last.from_status, last.to_status, last.error) == ("RETRY", "running", "failed_waiting_retry", error)


async def test_a_finished_task_keeps_its_place_in_the_counts_when_changed_again(store: Store) -> None:
    task = await finish(store, await insert_task(store), NOW)
    await finish(store, task, NOW)
    assert (await store.counts())["success"] == 1


# --- soon


async def test_tasks_that_are_inserted_soon_are_won_and_read_like_any_other(store: Store) -> None:
    tasks = [make_task() for _ in range(3)]
    inserts = [InsertTask(task=task, script=make_script(), history=note("created")) for task in tasks]
    outcomes = await store.commit(inserts, soon=True)
    assert [outcome.won for outcome in outcomes] == [True] * 3
    assert await store.tasks([task.id for task in tasks]) == tasks
    await store.confirm(inserts, outcomes)
    assert [outcome.won for outcome in await store.commit(inserts, soon=True)] == [True] * 3
    assert await store.tasks([task.id for task in tasks]) == tasks
    assert await store.scripts([make_script().id]) == [make_script()]


async def test_changes_of_other_kinds_take_no_notice_of_soon(store: Store) -> None:
    task, other = await insert_task(store), await insert_task(store)
    row = make_row(task)
    first, again = await store.commit([InsertExecution(execution=row), InsertExecution(execution=row)], soon=True)
    assert (first.won, first.attempt, first.fencing_token) == (again.won, again.attempt, again.fencing_token) == (True, 1, 1)
    busy = await one(store, InsertExecution(execution=make_row(other, device_id=task.device_id)), soon=True)
    assert (busy.won, busy.holder) == (False, row.id)
    change = lifecycle.start(task, await get_row(store, row.id), NOW)
    assert [(await one(store, change, soon=True)).won for _ in range(2)] == [True, False]
