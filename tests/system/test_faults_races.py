"""F62 by the hundred: results against deadline, forced release and retry, with the real store and services in one process.

Each side has connections of its own to one SQLite file, as processes have, and a clock that the test holds; both are let
go at once. Whatever the order: one winner, the task follows it once, the lock goes once, the late line is stored.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scriptdispatch.clock import SystemClock
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.changes import InsertExecution
from scriptdispatch.domain.model import Execution, Retry, Script, Task
from scriptdispatch.errors import Refused
from scriptdispatch.ids import new_id
from scriptdispatch.locks.port import Claim
from scriptdispatch.metrics import Metrics
from scriptdispatch.mq.closer import Closer
from scriptdispatch.mq.port import Delivery
from scriptdispatch.services.actions import Actions
from scriptdispatch.services.closing import Closing
from scriptdispatch.services.reconcile import Reconciler
from scriptdispatch.settings import Settings
from scriptdispatch.store.port import LogQuery
from scriptdispatch.wiring import Backends, connect

pytestmark = pytest.mark.system
ROUNDS = 200


class HeldClock(SystemClock):
    """Real time, moved ahead by the test."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead


class Arena:
    """Two sides on one file."""

    def __init__(self, settings: Settings, left: Backends, right: Backends, clock: HeldClock) -> None:
        self.settings, self.left, self.right, self.clock = settings, left, right, clock
        self.closer = Closer(left, settings, Metrics())
        self.reconciler = Reconciler(right, settings)
        self.actions = Actions(right, settings)
        self.chance = random.Random(62)

    async def sent(self, n: int, retry: Retry | None = None) -> tuple[Task, Execution]:
        """A task that is out: W2 to W7 as a worker does them."""
        task, row = await self.waiting(n, retry or Retry(max_retries=1, delay_seconds=0, jitter=False))
        return await self.send(task, row)

    async def waiting(self, n: int, retry: Retry) -> tuple[Task, Execution]:
        now = self.clock.now()
        script = Script(id="s" * 64, language="shell", content="echo", sha256="s" * 64, created_at=now)
        id = new_id()
        task = Task(
            id=id, name="race", device_id=f"dev-{n}", script_id=script.id, lane_key=f"1-{id}", retry=retry,
            next_run_at=now, created_at=now, updated_at=now, timeout_seconds=1800,
        )  # fmt: skip
        await self.left.store.commit([lifecycle.create(task, script)])
        return task, self.row_of(task)

    def row_of(self, task: Task) -> Execution:
        return Execution(
            id=new_id(), task_id=task.id, round=task.round, device_id=task.device_id, script_id=task.script_id,
            timeout_seconds=task.timeout_seconds, worker_id="w", node_id="n", from_status=task.status,
            previous_execution_id=task.execution_id, previous_push=task.push, created_at=self.clock.now(),
        )  # fmt: skip

    async def begin(self, backends: Backends, task: Task, row: Execution) -> tuple[Execution, bool]:
        """W2 to W4."""
        assert row.device_id is not None
        claim = Claim(device_id=row.device_id, execution_id=row.id, task_id=task.id, ttl_s=86_400)
        [grant] = await backends.locks.acquire([claim])
        assert grant.verdict == "granted", grant
        [inserted] = await backends.store.commit([InsertExecution(execution=row)])
        assert inserted.won
        row = msgspec.structs.replace(row, attempt=inserted.attempt, fencing_token=inserted.fencing_token)
        [started] = await backends.store.commit([lifecycle.start(task, row, self.clock.now())])
        return row, started.won

    async def send(self, task: Task, row: Execution) -> tuple[Task, Execution]:
        row, won = await self.begin(self.left, task, row)
        assert won
        now, grace = self.clock.now(), self.settings.timeout_grace
        [stamped] = await self.left.store.commit([lifecycle.stamp(row, "w", now, grace)])
        assert stamped.won
        row = await self.row(row.id)
        changes = [
            lifecycle.record_push(row, "sent", now, grace), lifecycle.sent(task, row, "sent", now, "taken", "w"),
        ]  # fmt: skip
        assert all(outcome.won for outcome in await self.left.store.commit(changes))
        return await self.task(task.id), await self.row(row.id)

    async def publish(self, row: Execution, kind: str) -> list[Delivery]:
        about = {"execution_id": row.id, "task_id": row.task_id, "device_id": row.device_id}
        said = [{**about, "type": "LOG", "seq": 1, "content": "end"}, {**about, "type": kind, "seq": 2, "exit_code": 0}]
        await self.left.stream.publish([(row.device_id, msgspec.json.encode(one)) for one in said])
        deliveries = await self.left.stream.receive(10, 5)
        assert len(deliveries) == 2
        return deliveries

    async def race(self, *sides: Any) -> list[Any]:
        """Let go at once; a turn or two of the loop apart, so that every order comes up."""
        barrier = asyncio.Event()

        async def run(side: Any, turns: int) -> Any:
            await barrier.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.sleep(0 if turns < 3 else self.chance.uniform(0, 0.004))
            return await side

        tasks = [asyncio.create_task(run(side, self.chance.randrange(6))) for side in sides]
        await asyncio.sleep(0)
        barrier.set()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)

    async def task(self, id: str) -> Task:
        [task] = await self.left.store.tasks([id])
        assert task is not None
        return task

    async def row(self, id: str) -> Execution:
        [row] = await self.left.store.executions([id])
        assert row is not None
        return row

    async def moves(self, task_id: str) -> list[str]:
        return [row.to_status for row in await self.left.store.history(task_id) if row.to_status is not None]

    async def is_locked(self, device_id: str | None) -> bool:
        assert device_id is not None
        return bool(await self.left.locks.holders([device_id]))

    async def check_stored_once(self, row: Execution) -> None:
        stored = await self.left.store.logs(LogQuery(task_id=row.task_id))
        assert [found.line.seq for found in stored] == [1]
        assert await self.left.stream.lag() == 0


@asynccontextmanager
async def arena(folder: Path) -> AsyncIterator[Arena]:
    settings = Settings(store_url=f"sqlite:///{folder}/sd.db", timeout_grace=30)
    left, right = await connect(settings), await connect(settings)
    left.clock = right.clock = clock = HeldClock()
    await left.locks.set_intact()
    try:
        yield Arena(settings, left, right, clock)
    finally:
        await left.close()
        await right.close()


@pytest.mark.parametrize("kind", ["SUCCESS", "FAILURE"])
async def test_f62_a_result_and_the_deadline_have_one_winner(tmp_path: Path, kind: str) -> None:
    won: Counter[str | None] = Counter()
    async with arena(tmp_path) as ground:
        for n in range(ROUNDS):
            task, row = await ground.sent(n)
            deliveries = await ground.publish(row, kind)
            ground.clock.ahead += timedelta(seconds=1831)
            ends = await ground.race(ground.closer.close_out(deliveries), ground.reconciler.overdue())
            assert not [end for end in ends if isinstance(end, BaseException)], ends
            task, row = await ground.task(task.id), await ground.row(row.id)
            won[row.outcome] += 1
            moves = await ground.moves(task.id)
            assert not row.active
            assert not await ground.is_locked(row.device_id)
            assert task.retry_count == 0
            if kind == "SUCCESS":  # a success in time, or a late one of the latest execution
                assert task.status == "success"
                assert moves.count("failed_waiting_retry") <= (row.outcome == "timeout")
            else:
                assert (task.status, moves.count("failed_waiting_retry")) == ("failed_waiting_retry", 1)
                assert task.error is not None
                assert task.error.code == ("TIMEOUT" if row.outcome == "timeout" else "EXECUTION_FAILED")
            await ground.check_stored_once(row)
    assert set(won) == {"timeout", "success" if kind == "SUCCESS" else "failed"}, f"no race: {won}"


async def test_f62_a_result_and_a_forced_release_have_one_winner(tmp_path: Path) -> None:
    won: Counter[str | None] = Counter()
    async with arena(tmp_path) as ground:
        for n in range(ROUNDS):
            task, row = await ground.sent(n)
            deliveries = await ground.publish(row, "SUCCESS")
            assert row.device_id is not None
            release = ground.actions.unlock(row.device_id, actor="anna", reason="stuck", fencing_token=row.fencing_token)
            consumed, released = await ground.race(ground.closer.close_out(deliveries), release)
            assert consumed is None
            task, row = await ground.task(task.id), await ground.row(row.id)
            won[row.outcome] += 1
            history = await ground.left.store.history(task.id)
            if row.outcome == "released":
                assert isinstance(released, dict)
                assert (task.status, task.error and task.error.code) == ("failed", "LOCK_RELEASED")
                assert len([entry for entry in history if "lock released by anna" in entry.reason]) == 1
                assert row.late_result == "SUCCESS"
            else:
                assert isinstance(released, Refused)
                assert (released.status, task.status) in ((409, "success"), (404, "success"))
                assert not [entry for entry in history if "anna" in entry.reason]
            assert (await ground.moves(task.id))[3:] == [task.status]
            assert not await ground.is_locked(row.device_id)
            await ground.check_stored_once(row)
    assert set(won) == {"success", "released"}, f"no race: {won}"


async def test_f62_a_late_success_and_the_retry_end_in_one_of_two_ways(tmp_path: Path) -> None:
    """The task waits for its retry. Either the success comes first and the retry undoes itself, or the retry has begun:
    then it is noted, and the task succeeds if that retry is handed back."""
    seen: Counter[str] = Counter()
    async with arena(tmp_path) as ground:
        for n in range(ROUNDS):
            task, first = await ground.sent(n)
            ground.clock.ahead += timedelta(seconds=1831)
            [closed] = await ground.reconciler.overdue()
            assert closed.id == first.id
            task = await ground.task(task.id)
            assert task.status == "failed_waiting_retry"
            deliveries = await ground.publish(first, "SUCCESS")
            second = ground.row_of(task)
            consumed, begun = await ground.race(
                ground.closer.close_out(deliveries), ground.begin(ground.right, task, second)
            )
            assert consumed is None
            second, started = begun
            # The worker undoes what it could not start, or is stopped before its stamp: handed back either way (W9, M1).
            assert await ground.reconciler.hand_back([second], "its worker is stopping") == 1
            task = await ground.task(task.id)
            seen["the retry had begun" if started else "the success was first"] += 1
            assert task.status == "success", (started, task)
            assert task.retry_count == 0
            assert (await ground.moves(task.id)).count("success") == 1
            assert not await ground.is_locked(task.device_id)
            await ground.check_stored_once(first)
    assert len(seen) == 2, f"no race: {seen}"


async def test_f62_two_consumers_and_the_deadline_with_the_same_result_settle_it_once(tmp_path: Path) -> None:
    async with arena(tmp_path) as ground:
        other = Closer(ground.right, ground.settings, Metrics())
        for n in range(ROUNDS // 2):
            task, row = await ground.sent(n)
            deliveries = await ground.publish(row, "FAILURE")
            ground.clock.ahead += timedelta(seconds=1831)
            ends = await ground.race(
                ground.closer.close_out(deliveries),
                other.close_out(deliveries),
                ground.reconciler.overdue(),
                Closing(ground.right, ground.settings, role="reconciler").settle_ids([row.id]),
            )
            assert not [end for end in ends if isinstance(end, BaseException)], ends
            task = await ground.task(task.id)
            assert (task.status, task.retry_count) == ("failed_waiting_retry", 0)
            assert await ground.moves(task.id) == ["waiting", "running", "send_success", "failed_waiting_retry"]
            assert not await ground.is_locked(row.device_id)
            await ground.check_stored_once(row)


async def test_f07_a_cancel_and_the_stamp_have_one_winner(tmp_path: Path) -> None:
    """U2 against W5: canceled and never pushed, or asked for and pushed once; never both."""
    seen: Counter[tuple[bool, bool]] = Counter()
    async with arena(tmp_path) as ground:
        for n in range(ROUNDS):
            task, row = await ground.waiting(n, Retry(max_retries=3))
            row, started = await ground.begin(ground.left, task, row)
            assert started
            stamp = lifecycle.stamp(row, "w", ground.clock.now(), ground.settings.timeout_grace)
            [stamped], (task, canceled) = await ground.race(
                ground.left.store.commit([stamp]), ground.actions.cancel(task.id, actor="anna", reason="no")
            )
            seen[stamped.won, canceled] += 1
            assert stamped.won != canceled, "pushed and canceled, or neither"
            row = await ground.row(row.id)
            if canceled:
                assert (task.status, row.outcome, row.push) == ("canceled", "canceled", "not_sent")
            else:
                assert (task.status, task.cancel_requested, row.active) == ("running", True, True)
            assert await ground.is_locked(row.device_id) is not canceled
    assert set(seen) == {(True, False), (False, True)}, f"no race: {seen}"


async def test_r2_a_lock_restored_while_its_execution_ends_does_not_stay_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment: the row is read as open, then closed and its lock released, and only then is the lock set."""
    async with arena(tmp_path) as ground:
        _, row = await ground.sent(1)
        assert row.device_id is not None
        assert await ground.left.locks.release([(row.device_id, row.id)]) == [True]  # lost, by whatever
        deliveries = await ground.publish(row, "SUCCESS")
        restore = ground.right.locks.restore

        async def late(claims: Any) -> list[bool]:
            await ground.closer.close_out(deliveries)
            return await restore(claims)

        monkeypatch.setattr(ground.right.locks, "restore", late)
        assert await ground.reconciler.restore_locks() == 0
        assert (await ground.task(row.task_id)).status == "success"
        assert not await ground.is_locked(row.device_id)
