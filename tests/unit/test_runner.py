"""W2 to W4 on memory backends: what a worker does when the task has changed since it was read beside the lock."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from scriptdispatch.central.breaker import Breaker
from scriptdispatch.central.outcomes import PushAnswer
from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.model import Retry, Task
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.locks.port import Claim
from scriptdispatch.master.recovery import Rescuer
from scriptdispatch.queue.port import Leased
from scriptdispatch.services.closing import Closing, item_of
from scriptdispatch.services.hearsay import tell
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends, connect
from scriptdispatch.worker.runner import Runner, Verdict
from tests.contract.store_values import get_task, insert_task, make_script, one, start


class Desk:
    """A central control that takes everything at once, unless it is told another answer, and a connection to it."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.answer = PushAnswer(outcome="taken", message="taken")

    async def checkout(self) -> "Desk":
        return self

    def release(self) -> None:
        return None

    async def push(self, _: Any, request: Any, **__: Any) -> PushAnswer:
        self.pushed.append(request.task_id)
        return self.answer


class Bench:
    """One worker, and a door in front of its lock: it opens when the test says so."""

    def __init__(self, backends: Backends) -> None:
        settings = Settings(store_url="memory://")
        self.backends, self.desk = backends, Desk()
        self.closing = Closing(backends, settings, role="worker")
        central: Any = self.desk
        self.runner = Runner(backends, settings, central, Breaker(), self.closing, "worker-1", "node-1")
        self.asked, self.door = asyncio.Event(), asyncio.Event()
        acquire = backends.locks.acquire

        async def behind_the_door(claims: Any) -> Any:
            self.asked.set()
            await self.door.wait()
            return await acquire(claims)

        backends.locks.acquire = behind_the_door  # type: ignore[method-assign]

    async def task(self, **values: Any) -> Task:
        now = self.backends.clock.now()
        due = values.pop("next_run_at", now)
        script = replace(make_script(), sha256=hashlib.sha256(b"echo hello").hexdigest())
        return await insert_task(
            self.backends.store, script=script, script_id=script.id, device_id="dev-1", next_run_at=due, **values
        )

    async def leased(self, task: Task, told: str | None = None, free: bool = False) -> Leased:
        await self.backends.queue.push([replace(item_of(task), due_at=self.backends.clock.now())])
        [item] = await self.backends.queue.take("node-1", 1, wait_s=1)
        return replace(item, told=told, free=free)

    async def meanwhile(self, item: Leased, change: Any) -> Verdict:
        """The worker has read the task, somebody changes it, then the lock is granted."""
        way = asyncio.create_task(self.runner.carry_out(item))
        await self.asked.wait()
        await asyncio.sleep(0)  # the read beside it, which waits for nothing in this store
        assert (await one(self.backends.store, change)).won
        self.door.set()
        return await way

    async def locked(self) -> bool:
        return bool(await self.backends.locks.holders(["dev-1"]))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    backends = await connect(Settings(store_url="memory://"))
    await backends.locks.set_intact()
    yield Bench(backends)
    await backends.close()


async def test_a_task_that_nobody_touches_is_pushed(bench: Bench) -> None:
    task = await bench.task()
    item = await bench.leased(task)
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]
    assert (await get_task(bench.backends.store, task.id)).status == "send_success"


async def test_the_history_and_the_event_of_a_push_tell_the_retry_that_is_under_way(bench: Bench) -> None:
    task = await bench.task(status="failed_waiting_retry", retry_count=2, attempt=3)
    item = await bench.leased(task)
    said: list[Any] = []

    async def publish(events: Any) -> None:
        said.extend(events)

    bench.backends.events.publish = publish  # type: ignore[method-assign]
    bench.door.set()
    await bench.runner.carry_out(item)
    history = await bench.backends.store.history(task.id)
    assert [(row.to_status, row.retry_count) for row in history[-2:]] == [("running", 3), ("send_success", 3)]
    async with asyncio.timeout(5):
        while not any(event.get("status") == "send_success" for event in said):
            await asyncio.sleep(0)
    [event] = [event for event in said if event.get("status") == "send_success"]
    assert (event["retry_count"], event["progress"]) == (3, 0)


async def test_an_unclear_push_of_a_dead_worker_tells_the_retry_that_was_under_way(bench: Bench) -> None:
    store, now = bench.backends.store, bench.backends.clock.now()
    task, row = await start(store, await bench.task(status="failed_waiting_retry", retry_count=2, attempt=3))
    assert (await one(store, lifecycle.stamp(row, row.worker_id, now, 30))).won
    await Rescuer(bench.backends, bench.closing).worker_died(row.worker_id, [], "killed")
    last = (await store.history(task.id))[-1]
    assert (last.to_status, last.retry_count) == ("send_success", 3)


@pytest.mark.parametrize(
    ("answer", "wait_code"),
    [
        (PushAnswer(outcome="wait", message="HTTP 429", http_status=429, retry_after_s=30.0), "central"),
        (PushAnswer(outcome="misconfigured", message="HTTP 401", http_status=401), "central_away"),
    ],
)
async def test_a_task_handed_back_knows_whether_central_control_asked_to_wait(
    bench: Bench, answer: PushAnswer, wait_code: str
) -> None:
    bench.desk.answer = answer
    task = await bench.task()
    item = await bench.leased(task)
    bench.door.set()
    await bench.runner.carry_out(item)
    after = await get_task(bench.backends.store, task.id)
    assert (after.status, after.wait_code, after.retry_count) == ("waiting", wait_code, 0)
    [row] = await bench.backends.store.executions_of(task.id)
    assert row.push_ms is not None
    assert row.run_ms is None


async def test_a_task_canceled_between_the_read_and_the_lock_is_not_pushed_and_its_device_is_free(bench: Bench) -> None:
    task = await bench.task()
    cancel = lifecycle.cancel_waiting(task, "a user", "not needed", bench.backends.clock.now())
    assert await bench.meanwhile(await bench.leased(task), cancel) is Verdict.FINISHED
    assert bench.desk.pushed == []
    assert (await get_task(bench.backends.store, task.id)).status == "canceled"
    assert not await bench.locked()
    [row] = await bench.backends.store.executions_of(task.id)
    assert (row.active, row.outcome, row.push) == (False, "handed_back", "not_sent")


async def test_no_counts_only_if_it_was_read_under_the_lock(bench: Bench) -> None:
    """Read too early a task looks as if it were not due; by the time the device is ours it is."""
    now = bench.backends.clock.now()
    task = await bench.task(next_run_at=now + timedelta(hours=1))
    due = lifecycle.ChangeTask(task_id=task.id, expect={}, set={"next_run_at": now})
    assert await bench.meanwhile(await bench.leased(task), due) is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]


async def test_a_task_that_is_not_due_is_queued_for_its_time_and_its_device_is_free(bench: Bench) -> None:
    later = bench.backends.clock.now() + timedelta(hours=1)
    task = await bench.task(next_run_at=later)
    item = await bench.leased(task)
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == []
    assert not await bench.locked()
    place = (await bench.backends.queue.places([task.id]))[task.id]
    assert (place.leased, place.due) == (False, False)


# --- what a fresh queue entry tells


async def test_a_task_that_the_entry_tells_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = bench.backends.clock.now()
    task = await bench.task(created_at=now, updated_at=now)
    item = await bench.leased(task, told=tell(task))

    async def read(_: Any) -> Any:
        raise AssertionError("it was read")

    monkeypatch.setattr(bench.backends.store, "tasks", read)
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]


async def test_what_an_old_entry_tells_is_not_believed(bench: Bench) -> None:
    before = bench.backends.clock.now() - timedelta(seconds=6)
    task = await bench.task(created_at=before, updated_at=before)
    item = await bench.leased(task, told=tell(replace(task, script_id="another")))
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]
    assert (await bench.backends.store.executions_of(task.id))[0].script_id == task.script_id


async def test_a_task_canceled_since_the_entry_told_it_is_not_pushed_and_its_device_is_free(bench: Bench) -> None:
    now = bench.backends.clock.now()
    task = await bench.task(created_at=now, updated_at=now)
    item = await bench.leased(task, told=tell(task))
    assert (await one(bench.backends.store, lifecycle.cancel_waiting(task, "a user", "not needed", now))).won
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == []
    assert (await get_task(bench.backends.store, task.id)).status == "canceled"
    assert not await bench.locked()
    [row] = await bench.backends.store.executions_of(task.id)
    assert (row.active, row.outcome) == (False, "handed_back")


# --- a device that was free when its task was handed out


async def rows(bench: Bench, task: Task) -> list[tuple[bool, str | None]]:
    return [(row.active, row.outcome) for row in await bench.backends.store.executions_of(task.id)]


async def test_the_row_is_inserted_beside_the_lock_and_goes_no_further_without_it(bench: Bench) -> None:
    task = await bench.task()
    way = asyncio.create_task(bench.runner.carry_out(await bench.leased(task, free=True)))
    async with asyncio.timeout(5):
        while not await bench.backends.store.executions_of(task.id):
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert await rows(bench, task) == [(True, None)]
    assert (await get_task(bench.backends.store, task.id)).status == "waiting"
    bench.door.set()
    assert await way is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]
    [row] = await bench.backends.store.executions_of(task.id)
    assert (await bench.backends.locks.holders(["dev-1"]))["dev-1"].value == row.id


@pytest.mark.parametrize(
    ("holder", "status"), [("01a1f66f-e8bd-7000-84c3-33ddab34e737", "waiting"), ("a person", "failed_waiting_retry")]
)
async def test_a_row_whose_lock_somebody_got_first_is_handed_back(bench: Bench, holder: str, status: str) -> None:
    task = await bench.task(retry=Retry(max_retries=1))
    item = await bench.leased(task, free=True)
    await bench.backends.locks.restore([Claim(device_id="dev-1", execution_id=holder, task_id="t", ttl_s=60)])
    bench.door.set()
    assert await bench.runner.carry_out(item) is (Verdict.GIVE_BACK if status == "waiting" else Verdict.FINISHED)
    assert bench.desk.pushed == []
    assert await rows(bench, task) == [(False, "handed_back")]
    assert (await get_task(bench.backends.store, task.id)).status == status
    assert (await bench.backends.locks.holders(["dev-1"]))["dev-1"].value == holder


async def test_a_row_whose_lock_service_is_away_is_handed_back_and_one_that_is_being_rebuilt_waits(bench: Bench) -> None:
    task = await bench.task()
    item = await bench.leased(task, free=True)
    acquire = bench.backends.locks.acquire

    async def away(_: Any) -> Any:
        raise QueueUnavailable("away")

    bench.backends.locks.acquire = away  # type: ignore[method-assign]
    assert await bench.runner.carry_out(item) is Verdict.WAIT
    assert await rows(bench, task) == [(False, "handed_back")]
    assert (await get_task(bench.backends.store, task.id)).status == "waiting"
    bench.backends.locks.acquire = acquire  # type: ignore[method-assign]
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert bench.desk.pushed == [task.id]
    assert await rows(bench, task) == [(False, "handed_back"), (True, None)]
    assert (await get_task(bench.backends.store, task.id)).retry_count == 0


async def test_a_device_that_was_not_free_after_all_keeps_its_execution(bench: Bench) -> None:
    """Its lock was lost: the store's index is the wall, and the lock is set right."""
    other = await bench.task()
    _, open_row = await start(bench.backends.store, other)
    task = await bench.task()
    item = await bench.leased(task, free=True)
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.GIVE_BACK
    assert await rows(bench, task) == []
    assert (await bench.backends.locks.holders(["dev-1"]))["dev-1"].value == open_row.id


async def test_a_free_device_of_a_task_that_is_not_due_is_freed_again(bench: Bench) -> None:
    task = await bench.task(next_run_at=bench.backends.clock.now() + timedelta(hours=1))
    item = await bench.leased(task, free=True)
    bench.door.set()
    assert await bench.runner.carry_out(item) is Verdict.FINISHED
    assert await rows(bench, task) == []
    assert not await bench.locked()


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("known", [True, False])
async def test_the_lock_holds_for_as_long_as_the_script_may_run(bench: Bench, free: bool, known: bool) -> None:
    now = bench.backends.clock.now()
    task = await bench.task(timeout_seconds=7200, created_at=now, updated_at=now)
    item = await bench.leased(task, told=tell(task) if known else None, free=free)
    claims: list[Claim] = []
    acquire = bench.backends.locks.acquire

    async def noted(asked: Any) -> Any:
        claims.extend(asked)
        return await acquire(asked)

    bench.backends.locks.acquire = noted  # type: ignore[method-assign]
    bench.door.set()
    await bench.runner.carry_out(item)
    assert len(claims) == (1 if known else 2)
    assert claims[-1].ttl_s > 7200
