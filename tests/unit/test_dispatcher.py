"""The dispatcher decides who gets what, on a real (in-memory) queue and children that only note what they are sent."""

from datetime import UTC, datetime
from typing import Any

from scriptdispatch import ids, wire
from scriptdispatch.clock import SystemClock
from scriptdispatch.domain.lanes import lane_key
from scriptdispatch.master.dispatcher import Dispatcher
from scriptdispatch.queue.memory import MemoryQueue
from scriptdispatch.queue.port import Item, Leased
from scriptdispatch.settings import Settings

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Noting:
    """A child process as the dispatcher sees it."""

    def __init__(self) -> None:
        self.id = ids.new_id()
        self.items: list[Leased] = []

    def send(self, message: Any) -> None:
        assert isinstance(message, wire.Assign)
        self.items += message.items

    def report(self, dispatcher: Dispatcher, *, finished: bool = True) -> None:
        items, self.items = self.items, []
        done = wire.Done(finished=items if finished else [], given_back=[] if finished else items)
        dispatcher.done(self, done)  # type: ignore[arg-type]


class Bench:
    def __init__(self, workers: int = 2, **settings: Any) -> None:
        self.queue = MemoryQueue(SystemClock())
        self.workers = [Noting() for _ in range(workers)]
        self.poisoned: list[Leased] = []
        self.dispatcher = Dispatcher(
            self.queue,
            Settings(**settings),
            "node",
            lambda: self.workers,  # type: ignore[arg-type,return-value]
            3,
            self.poisoned.append,
        )

    async def push(self, *devices: str | None, priority: str = "normal") -> list[str]:
        pushed = [ids.new_id() for _ in devices]
        await self.queue.push(
            [
                Item(task_id=id, device_id=device, lane_key=lane_key(id, priority, NOW), due_at=NOW)  # type: ignore[arg-type]
                for id, device in zip(pushed, devices, strict=True)
            ]
        )
        return pushed

    async def hear(self, limit: int = 100) -> list[Leased]:
        heard = await self.queue.take("node", limit, wait_s=0)
        self.dispatcher._refresh += heard
        self.dispatcher.check()
        return heard

    def out(self) -> list[list[str]]:
        return [[item.task_id for item in worker.items] for worker in self.workers]


async def test_tasks_are_spread_over_workers_and_devices() -> None:
    bench = Bench()
    await bench.push("a", "b", "c", "d")
    await bench.hear()
    assert [len(items) for items in bench.out()] == [2, 2]


async def test_nobody_gets_more_than_its_capacity_and_the_rest_waits() -> None:
    bench = Bench(worker_capacity=2)
    await bench.push(*(f"d{i}" for i in range(7)))
    await bench.hear()
    assert [len(items) for items in bench.out()] == [2, 2]
    assert bench.dispatcher.in_hand() == 4
    bench.workers[0].report(bench.dispatcher)
    assert [len(items) for items in bench.out()] == [2, 2]


async def test_what_is_reported_is_finished_in_the_queue_and_opens_the_lane() -> None:
    bench = Bench(workers=1)
    first, second = await bench.push("a", "a")
    await bench.hear()
    assert bench.out() == [[first]]
    bench.workers[0].report(bench.dispatcher)
    await bench.dispatcher.give_up()
    await bench.hear()
    assert bench.out() == [[second]]
    assert await bench.queue.known([first, second]) == {second}


async def test_what_is_given_back_keeps_its_place() -> None:
    bench = Bench(workers=1)
    first, _ = await bench.push("a", "a")
    await bench.hear()
    bench.workers[0].report(bench.dispatcher, finished=False)
    await bench.dispatcher.give_up()
    await bench.hear()
    assert bench.out() == [[first]]


async def test_an_item_whose_worker_died_goes_out_alone() -> None:
    bench = Bench(workers=2)
    [suspect] = await bench.push("a")
    [item] = await bench.hear()
    victim = next(worker for worker in bench.workers if worker.items)
    assert bench.dispatcher.lost(victim) == [item]  # type: ignore[arg-type]
    victim.items = []
    await bench.queue.give_back([item], crashed=True)
    await bench.push("b", "c", "d")
    await bench.hear()
    alone = next(worker for worker in bench.workers if suspect in [i.task_id for i in worker.items])
    assert len(alone.items) == 1
    assert sorted(len(worker.items) for worker in bench.workers) == [1, 3]
    alone.report(bench.dispatcher)
    await bench.push("e", "f")
    await bench.hear()
    assert sum(len(worker.items) for worker in bench.workers) == 5


async def test_an_item_that_killed_too_many_workers_is_reported_as_poison() -> None:
    bench = Bench(workers=1)
    [task_id] = await bench.push("a")
    for _ in range(3):
        [item] = await bench.hear()
        bench.dispatcher.lost(bench.workers[0])  # type: ignore[arg-type]
        bench.workers[0].items = []
        await bench.queue.give_back([item], crashed=True)
    await bench.hear()
    assert [item.task_id for item in bench.poisoned] == [task_id]
    assert bench.out() == [[]]


async def test_while_the_breaker_is_open_nothing_stays_in_hand() -> None:
    bench = Bench(workers=0)
    [task_id] = await bench.push("a")
    bench.dispatcher.breaker_open = True
    await bench.hear()
    await bench.dispatcher.give_up()
    [again] = await bench.queue.take("other", 1, wait_s=0)
    assert again.task_id == task_id
