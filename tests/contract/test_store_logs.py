"""Every store: log lines, quarantine, idempotency, tokens, and what clean-up leaves."""

import asyncio
from datetime import timedelta

from msgspec.structs import replace

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import InsertExecution
from scriptdispatch.domain.model import LogLine, Quarantined, Token
from scriptdispatch.store.port import LogQuery, Remembered, Store, TaskFilter
from tests.contract.store_values import (
    NOW,
    HeldClock,
    finish,
    fresh_id,
    get_row,
    insert_row,
    insert_task,
    make_line,
    make_row,
    make_script,
    one,
)

pytest_plugins = ("tests.contract.store_backends",)
PLENTY = 1000


async def contents(store: Store, task_id: str, **asked: object) -> list[str]:
    return [stored.line.content for stored in await store.logs(LogQuery(task_id=task_id, **asked))]  # type: ignore[arg-type]


# --- log lines


async def test_lines_come_back_as_they_were_in_the_order_of_arrival_over_all_executions(store: Store) -> None:
    task = await insert_task(store, device_id=None)
    a, b = await insert_row(store, task), await insert_row(store, task)
    lines = [
        make_line(a, 2, "second", time=NOW + timedelta(seconds=1)),
        make_line(b, 1, "of b", late=True),
        make_line(a, 1, "first, but later", truncated=True, stream="stderr"),
        make_line(a, None, "no number", late=True, truncated=True),
        make_line(b, 2, "line\0with \U0001f600 and\nmore"),
    ]
    assert await store.append_logs(lines[:3], max_per_execution=PLENTY) == 3
    assert await store.append_logs(lines[3:], max_per_execution=PLENTY) == 2
    stored = await store.logs(LogQuery(task_id=task.id))
    assert [s.line for s in stored] == lines
    assert [s.cursor for s in stored] == sorted({s.cursor for s in stored})
    assert await store.log_totals(task.id) == (5, 0)


async def test_the_limit_holds_also_for_one_who_says_how_many_lines_are_there(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    lines = [make_line(row, n, str(n)) for n in range(6)]
    assert await store.append_logs(lines[:2], max_per_execution=4, there={row.id: 0}) == 2
    assert await store.append_logs(lines[1:], max_per_execution=4, there={row.id: 2}) == 2
    assert await contents(store, row.task_id) == ["0", "1", "2", "3"]
    assert await store.log_totals(row.task_id) == (4, 2)


async def test_a_line_delivered_again_is_stored_once(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    lines = [make_line(row, n, str(n)) for n in range(5)]
    assert await store.append_logs(lines[:3], max_per_execution=PLENTY) == 3
    assert await store.append_logs([*lines, lines[4]], max_per_execution=PLENTY) == 2
    assert await contents(store, row.task_id) == ["0", "1", "2", "3", "4"]
    assert (await get_row(store, row.id)).log_lines == 5
    assert (await get_row(store, row.id)).log_dropped == 0


async def test_lines_without_a_number_are_never_taken_for_the_same(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    for _ in range(2):
        assert await store.append_logs([make_line(row, None)] * 2, max_per_execution=PLENTY) == 2
    assert await store.log_totals(row.task_id) == (4, 0)


async def test_beyond_the_limit_lines_are_counted_not_stored(store: Store) -> None:
    task = await insert_task(store, device_id=None)
    loud, quiet = await insert_row(store, task), await insert_row(store, task)
    lines = [make_line(loud, n, str(n)) for n in range(8)]
    assert await store.append_logs([*lines[:4], make_line(quiet, 0, "quiet")], max_per_execution=5) == 5
    assert await store.append_logs(lines[4:], max_per_execution=5) == 1
    assert await store.append_logs(lines[:2], max_per_execution=5) == 0  # delivered again: neither stored nor dropped
    assert await contents(store, task.id, execution_id=loud.id) == ["0", "1", "2", "3", "4"]
    assert [(row.log_lines, row.log_dropped) for row in await store.executions_of(task.id)] == [(5, 3), (1, 0)]
    assert await store.log_totals(task.id) == (6, 3)


async def test_lines_are_stored_and_rows_closed_in_one_call(store: Store) -> None:
    rows = [await insert_row(store, await insert_task(store)) for _ in range(5)]
    lost, goes_on = rows[3], rows[4]
    await store.commit([lifecycle.close(lost, "canceled", NOW, closed_by="me", reason="mine")])
    lines = [make_line(row, n, str(n)) for n in range(3) for row in rows]
    closing = [lifecycle.close(row, "success", NOW, closed_by="central", reason="ok", result=row.id) for row in rows[:4]]
    outcomes = await store.append_and_close([*lines, make_line(rows[0], 9)], closing, max_per_execution=PLENTY)
    assert [outcome.won for outcome in outcomes] == [True, True, True, False]
    stored = [await get_row(store, row.id) for row in rows]
    assert [row.log_lines for row in stored] == [4, 3, 3, 3, 3]
    assert [row.outcome for row in stored] == ["success"] * 3 + ["canceled", None]
    assert [row.result for row in stored[:3]] == [row.id for row in rows[:3]]
    for row in rows:
        assert (await contents(store, row.task_id))[:3] == ["0", "1", "2"]
    again = await store.append_and_close(lines, closing, max_per_execution=PLENTY)  # the batch was not acknowledged
    assert [outcome.won for outcome in again] == [False] * 4
    assert [(await get_row(store, row.id)).log_lines for row in rows] == [4, 3, 3, 3, 3]
    last = lifecycle.close(goes_on, "success", NOW, closed_by="central", reason="ok")
    assert [o.won for o in await store.append_and_close([], [last], max_per_execution=PLENTY)] == [True]
    assert await store.append_and_close([make_line(goes_on, 7)], [], max_per_execution=PLENTY) == []
    assert (await get_row(store, goes_on.id)).log_lines == 4


async def test_the_limit_holds_in_the_batch_that_closes(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    closing = [lifecycle.close(row, "success", NOW, closed_by="central", reason="ok")]
    lines = [make_line(row, n, str(n)) for n in range(9)]
    assert [o.won for o in await store.append_and_close(lines, closing, max_per_execution=4, there={row.id: 0})] == [True]
    assert await contents(store, row.task_id) == ["0", "1", "2", "3"]
    assert await store.log_totals(row.task_id) == (4, 5)


async def test_counting_lines_leaves_the_rest_of_the_row_alone(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    await store.commit([lifecycle.close(row, "success", NOW, closed_by="closer", reason="ok")])
    closed = await get_row(store, row.id)
    await store.append_logs([make_line(row, 1, late=True)], max_per_execution=PLENTY)
    assert await get_row(store, row.id) == replace(closed, log_lines=1)


async def test_a_log_is_read_forwards_backwards_and_from_its_end(store: Store) -> None:
    task = await insert_task(store)
    row = await insert_row(store, task)
    noise = await insert_row(store, await insert_task(store))
    for n in range(10):
        await store.append_logs([make_line(row, n, str(n)), make_line(noise, n, "noise")], max_per_execution=PLENTY)
    cursors = [stored.cursor for stored in await store.logs(LogQuery(task_id=task.id))]

    assert await contents(store, task.id, limit=3) == ["0", "1", "2"]
    assert await contents(store, task.id, after=cursors[2], limit=3) == ["3", "4", "5"]
    assert await contents(store, task.id, after=cursors[9]) == []
    assert await contents(store, task.id, tail=3) == ["7", "8", "9"]
    assert await contents(store, task.id, tail=0) == []
    assert await contents(store, task.id, before=cursors[7], limit=3) == ["4", "5", "6"]
    assert await contents(store, task.id, before=cursors[7], tail=2) == ["5", "6"]
    assert await contents(store, task.id, before=cursors[5], after=cursors[1], limit=2) == ["2", "3"]
    assert await contents(store, "unknown") == []


async def test_a_long_log_is_paged_from_any_line_in_either_direction(store: Store) -> None:
    task = await insert_task(store, device_id=None)
    row, other = await insert_row(store, task), await insert_row(store, task)
    for start in (0, 250):  # each batch is more than a store keeps together
        batch = [make_line(row, n, str(n), stream="stderr" if n % 7 == 0 else "stdout") for n in range(start, start + 250)]
        batch.insert(130, make_line(other, start, "other"))
        await store.append_logs(batch, max_per_execution=PLENTY)
    stored = await store.logs(LogQuery(task_id=task.id, limit=1000))
    said = [one.line.content for one in stored]
    assert len(said) == 502
    assert [line for line in said if line != "other"] == [str(n) for n in range(500)]
    for page in (1, 37, 100, 333):
        there: list[str] = []
        after = 0
        while found := await store.logs(LogQuery(task_id=task.id, after=after, limit=page)):
            after = found[-1].cursor
            there += [one.line.content for one in found]
        assert there == said
        back: list[str] = []
        before = stored[-1].cursor + 1
        while found := await store.logs(LogQuery(task_id=task.id, before=before, limit=page)):
            back = [one.line.content for one in found] + back
            before = found[0].cursor
        assert back == said
    assert await contents(store, task.id, tail=123) == said[-123:]
    errors = [str(n) for n in range(0, 500, 7)]
    assert await contents(store, task.id, stream="stderr", limit=1000) == errors
    assert (
        await contents(store, task.id, stream="stderr", after=stored[100].cursor, limit=5)
        == [one.line.content for one in stored[101:] if one.line.stream == "stderr"][:5]
    )
    assert await contents(store, task.id, contains="99", tail=3) == ["299", "399", "499"]


async def test_a_log_is_narrowed_by_execution_stream_and_text(store: Store) -> None:
    task = await insert_task(store, device_id=None)
    a, b = await insert_row(store, task), await insert_row(store, task)
    lines: list[LogLine] = [
        make_line(a, 1, "100% done"),
        make_line(a, 2, "error: Disk", stream="stderr"),
        make_line(b, 1, "100 done"),
        make_line(b, 2, "error: disk", stream="stderr"),
    ]
    await store.append_logs(lines, max_per_execution=PLENTY)
    assert await contents(store, task.id, execution_id=b.id) == ["100 done", "error: disk"]
    assert await contents(store, task.id, stream="stderr") == ["error: Disk", "error: disk"]
    assert await contents(store, task.id, contains="0%") == ["100% done"]
    assert await contents(store, task.id, contains="disk", execution_id=b.id, stream="stderr", tail=5) == ["error: disk"]
    assert await contents(store, task.id, contains="") == [line.content for line in lines]


async def test_lines_appended_by_many_at_once_are_all_there_once(store: Store) -> None:
    row = await insert_row(store, await insert_task(store))
    batches = [[make_line(row, n, str(n)) for n in range(start, start + 20)] for start in range(0, 200, 10)]
    stored = await asyncio.gather(*(store.append_logs(batch, max_per_execution=PLENTY) for batch in batches))
    assert sum(stored) == 210
    assert sorted(map(int, await contents(store, row.task_id))) == list(range(210))
    assert await store.log_totals(row.task_id) == (210, 0)


# --- quarantine


async def test_quarantined_messages_are_kept_once_newest_first(store: Store) -> None:
    items = [Quarantined(id=fresh_id(), at=NOW, reason="not_json", detail=f"{i}", body=bytes(range(i))) for i in range(5)]
    await store.quarantine(items[:3])
    await store.quarantine([replace(items[0], detail="again"), *items[3:]])
    assert await store.quarantined(10) == items[::-1]
    assert await store.quarantined(2) == [items[4], items[3]]
    assert await store.quarantined(2, before_id=items[3].id) == [items[2], items[1]]
    assert await store.quarantine_count() == 5
    assert await store.unquarantine(items[2].id) is True
    assert await store.unquarantine(items[2].id) is False
    assert await store.quarantined_one(items[2].id) is None
    assert await store.quarantined_one(items[1].id) == items[1]
    assert await store.quarantine_count() == 4
    await store.quarantine([])


# --- idempotency


def request(seed: str = "seed-1") -> Remembered:
    return Remembered(seed=seed, request_hash="hash", begun_at=NOW)


async def test_the_first_under_a_key_is_remembered_and_the_second_gets_it(store: Store) -> None:
    assert await store.remember("me", "key", request()) is None
    assert await store.remember("me", "key", request("other")) == request()
    assert await store.remember("you", "key", request("yours")) is None
    assert await store.remember("me", "key 2", request()) is None


async def test_an_answer_is_given_to_every_repeat(store: Store) -> None:
    await store.remember("me", "key", request())
    await store.answer("me", "key", 201, b"\x00body")
    assert await store.remember("me", "key", request("other")) == replace(request(), status=201, answer=b"\x00body")


async def test_a_dead_request_is_taken_over_by_one(store: Store) -> None:
    await store.remember("me", "key", request())
    later = NOW + timedelta(seconds=30)
    won = await asyncio.gather(*(store.take_over("me", "key", NOW, later) for _ in range(10)))
    assert won.count(True) == 1
    assert await store.remember("me", "key", request("other")) == replace(request(), begun_at=later)
    await store.answer("me", "key", 200, b"")
    assert not await store.take_over("me", "key", later, later + timedelta(seconds=30))
    assert not await store.take_over("me", "unknown", NOW, later)


async def test_a_forgotten_request_may_come_again(store: Store) -> None:
    await store.remember("me", "key", request())
    await store.forget("me", "key")
    await store.forget("me", "key")
    assert await store.remember("me", "key", request("other")) is None


async def test_old_requests_are_purged(store: Store) -> None:
    for i in range(4):
        await store.remember("me", f"{i}", replace(request(), begun_at=NOW + timedelta(hours=i)))
    assert await store.purge_remembered(NOW + timedelta(hours=2)) == 2
    assert [await store.remember("me", f"{i}", request("again")) is None for i in range(4)] == [True, True, False, False]


# --- tokens


async def test_a_token_is_saved_and_changed(store: Store) -> None:
    token = Token(id="b", name="ci", hash="h", scopes=["read", "write"], created_at=NOW)
    other = Token(id="a", name="me", hash="g", scopes=[], created_at=NOW, expires_at=NOW + timedelta(days=1))
    await store.save_token(token)
    await store.save_token(other)
    await store.save_token(replace(token, revoked_at=NOW))
    assert await store.tokens() == [other, replace(token, revoked_at=NOW)]


# --- clean-up


async def test_purge_removes_a_final_task_with_all_that_belongs_to_it(store: Store) -> None:
    script = make_script()
    task = await insert_task(store, script=script, labels={"site": "a"}, dedupe_key="key", device_id=None)
    row = await insert_row(store, task)
    await store.append_logs([make_line(row, n) for n in range(5)], max_per_execution=PLENTY)
    await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
    await finish(store, task, NOW)

    assert await store.purge(NOW, 10) == 0
    assert await store.purge(NOW + timedelta(milliseconds=1), 10) == 1

    assert await store.tasks([task.id]) == [None]
    assert await store.executions([row.id]) == [None]
    assert await store.history(task.id) == []
    assert await store.logs(LogQuery(task_id=task.id)) == []
    assert await store.list_tasks(TaskFilter(labels=(("site", "a"),)), 5) == []
    assert sum((await store.counts()).values()) == 0
    await insert_task(store, dedupe_key="key")  # the key is free again


async def test_purge_leaves_what_is_not_final_or_still_open(store: Store) -> None:
    waiting = await insert_task(store)
    restarted = await finish(store, await insert_task(store), NOW, "waiting")
    half_done = await insert_task(store)
    await insert_row(store, half_done)
    await finish(store, half_done, NOW, "canceled")
    assert await store.purge(NOW + timedelta(days=1), 10) == 0
    assert None not in await store.tasks([waiting.id, restarted.id, half_done.id])


async def test_purge_takes_the_oldest_first_and_no_more_than_asked(store: Store) -> None:
    tasks = [await finish(store, await insert_task(store), NOW - timedelta(minutes=i)) for i in range(5)]
    assert await store.purge(NOW + timedelta(days=1), 2) == 2
    assert [task is None for task in await store.tasks([t.id for t in tasks])] == [False, False, False, True, True]


async def test_purge_keeps_the_row_with_the_highest_fence_so_that_fences_go_on_rising(store: Store) -> None:
    rows = []
    for i in range(3):
        task = await insert_task(store, device_id="dev-1")
        row = await insert_row(store, task)
        await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
        await finish(store, task, NOW + timedelta(seconds=i))
        rows.append(row)

    assert await store.purge(NOW + timedelta(days=1), 10) == 3

    left = await store.executions([row.id for row in rows])
    assert [row and row.fencing_token for row in left] == [None, None, 3]
    task = await insert_task(store, device_id="dev-1")
    given = await one(store, InsertExecution(execution=make_row(task)))
    assert (given.attempt, given.fencing_token) == (1, 4)


async def test_a_row_kept_for_its_fence_goes_when_a_higher_one_is_kept_instead(store: Store) -> None:
    rows = []
    for i in range(2):
        task = await insert_task(store, device_id="dev-1")
        row = await insert_row(store, task)
        await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
        await finish(store, task, NOW + timedelta(seconds=i))
        assert await store.purge(NOW + timedelta(days=1), 10) == 1
        rows.append(row.id)
    assert [row is None for row in await store.executions(rows)] == [True, False]


async def test_purge_keeps_rows_of_tasks_that_stay(store: Store) -> None:
    old, young = await insert_task(store, device_id="dev-1"), await insert_task(store, device_id="dev-1")
    rows = []
    for task in (young, old, young):
        row = await insert_row(store, task)
        await store.commit([lifecycle.close(row, "success", NOW, closed_by="t", reason="t")])
        rows.append(row.id)
    await finish(store, old, NOW)
    await finish(store, young, NOW + timedelta(days=2))
    assert await store.purge(NOW + timedelta(days=1), 10) == 1
    assert [row is None for row in await store.executions(rows)] == [False, True, False]


async def test_old_lines_are_purged_by_the_time_they_came(store: Store, clock: HeldClock) -> None:
    row = await insert_row(store, await insert_task(store))
    for n in range(6):
        await store.append_logs([make_line(row, n, str(n), time=NOW + timedelta(days=9 - n))], max_per_execution=PLENTY)
        clock.advance(hours=1)
    last = (await store.logs(LogQuery(task_id=row.task_id)))[-1].cursor
    assert await store.purge_logs(NOW + timedelta(hours=4), 3) == 3
    assert await contents(store, row.task_id) == ["3", "4", "5"]
    assert await store.purge_logs(NOW + timedelta(hours=4), 3) == 1
    assert await store.purge_logs(NOW + timedelta(days=4), 100) == 2
    assert await contents(store, row.task_id) == []
    assert await store.log_totals(row.task_id) == (6, 0)
    await store.append_logs([make_line(row, 7, "new")], max_per_execution=PLENTY)
    assert (await store.logs(LogQuery(task_id=row.task_id, after=last)))[0].line.content == "new"  # no cursor twice


async def test_a_store_says_what_it_is(store: Store) -> None:
    answer = await store.ping()
    assert answer
    assert "\n" not in answer
