"""The Redis queue shared by processes: wake-ups, races, and never two tasks of a device out at a time."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scriptdispatch.clock import SystemClock
from tests.contract.queue_backends import RedisRig, claim, item, redis_rig
from tests.contract.redis_process import RedisProcess


@pytest.fixture
async def rig(tmp_path: Path, redis_url: str) -> AsyncIterator[RedisRig]:
    made = redis_rig(tmp_path, SystemClock(), redis_url)
    await made.open()
    await made.locks.set_intact()
    yield made
    await made.close()


async def start(rig: RedisRig, action: str, *args: str) -> RedisProcess:
    return await RedisProcess.start_on(
        rig.client.url, Path(rig.prefix.removeprefix("test:").removesuffix(":")), action, *args
    )


async def asleep_in_take(rig: RedisRig, owner: str = "other") -> RedisProcess:
    """A process that listens to the bell: it looks once more when it does, so nothing is lost from here on."""
    process = await start(rig, "take", owner)
    process.go()
    async with asyncio.timeout(10):
        while (await rig.client.command("PUBSUB", "NUMSUB", f"{rig.prefix}{{p0}}:bell"))[1] == 0:
            await asyncio.sleep(0.002)
    return process


async def woken_within(process: RedisProcess, began: float) -> tuple[float, str]:
    at, _, tasks = (await process.line()).partition(" ")
    await process.end()
    return float(at) - began, tasks


async def test_a_push_wakes_a_take_in_another_process(rig: RedisRig) -> None:
    process = await asleep_in_take(rig)
    pushed = item(rig.clock, "a")
    began = time.monotonic()
    await rig.queue.push([pushed])
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert took < 0.1


async def test_the_release_of_a_lock_wakes_a_take_in_another_process(rig: RedisRig) -> None:
    held = claim("a")
    await rig.locks.acquire([held])
    pushed = item(rig.clock, "a")
    await rig.queue.push([pushed])
    process = await asleep_in_take(rig)
    began = time.monotonic()
    assert await rig.locks.release([("a", held.execution_id)]) == [True]
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert took < 0.1


async def test_a_delayed_item_is_taken_on_time_by_a_process_that_slept(rig: RedisRig) -> None:
    process = await asleep_in_take(rig)
    pushed = item(rig.clock, "a", due_in=0.4)
    began = time.monotonic()
    await rig.queue.push([pushed])
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert 0.39 <= took < 0.55


async def test_a_sleeping_take_learns_of_an_item_due_earlier_than_it_knew(rig: RedisRig) -> None:
    later, sooner = item(rig.clock, "a", due_in=30), item(rig.clock, "b", due_in=0.3)
    await rig.queue.push([later])
    process = await asleep_in_take(rig)
    began = time.monotonic()
    await rig.queue.push([sooner])
    took, tasks = await woken_within(process, began)
    assert tasks == sooner.task_id
    assert took < 0.45


async def test_of_many_processes_that_race_for_a_lock_one_gets_it(rig: RedisRig) -> None:
    racers = await asyncio.gather(*(start(rig, "acquire", "a") for _ in range(4)))
    for racer in racers:
        racer.go()
    assert sorted([await racer.line() for racer in racers]) == ["granted", "held", "held", "held"]
    for racer in racers:
        await racer.end()


async def test_of_many_processes_that_race_one_leads(rig: RedisRig) -> None:
    racers = await asyncio.gather(*(start(rig, "lead", f"node-{n}") for n in range(4)))
    for racer in racers:
        racer.go()
    assert sorted([await racer.line() for racer in racers]) == ["1", "None", "None", "None"]
    for racer in racers:
        await racer.end()


async def test_an_event_crosses_processes(rig: RedisRig) -> None:
    process = await start(rig, "publish_event", "task.created")
    events = rig.events.listen()
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    process.go()
    async with asyncio.timeout(5):
        assert await first == {"event": "task.created"}
    await process.end()


async def test_processes_that_take_at_once_share_the_work_and_no_device_is_out_twice(rig: RedisRig) -> None:
    """Finishing a task is what lets the next one of its device out: so the k-th of a device is always its k-th task."""
    items = [item(rig.clock, f"dev-{n % 6}") for n in range(90)]
    await rig.queue.push(items)
    processes = await asyncio.gather(*(start(rig, "take_all", f"owner-{n}") for n in range(3)))
    for process in processes:
        process.go()
    rows: list[list[str]] = []
    for process in processes:
        while (line := await process.line()) != "end":
            rows.append(line.split())
        await process.end()
    assert sorted(row[0] for row in rows) == sorted(one.task_id for one in items), "each task exactly once"
    for device in {row[1] for row in rows}:
        in_time = [row[0] for row in sorted((row for row in rows if row[1] == device), key=lambda row: float(row[2]))]
        assert in_time == [one.task_id for one in items if one.device_id == device]


async def test_a_queue_that_is_empty_again_leaves_no_keys_but_those_of_owners_types_and_counts(rig: RedisRig) -> None:
    items = [item(rig.clock, f"dev-{n % 3}", due_in=n % 2 / 10) for n in range(12)] + [item(rig.clock, None)]
    await rig.queue.push(items)
    done = 0
    async with asyncio.timeout(10):
        while done < len(items):
            leased = await rig.queue.take("owner", 10, wait_s=1)
            held = [claim(one.device_id) for one in leased if one.device_id]
            await rig.locks.acquire(held)
            await rig.queue.finish(leased)
            await rig.locks.release([(one.device_id, one.execution_id) for one in held])
            done += len(leased)
    names = {key.decode().rpartition("}:")[2] for key in await rig.client.command("KEYS", f"{rig.prefix}*")}
    assert names == {"owners", "types", "counts", "epoch"}
    assert await rig.queue.ready() == {"high": 0, "normal": 0, "low": 0}


async def test_what_a_killed_process_had_in_hand_comes_back_when_its_lease_runs_out(rig: RedisRig) -> None:
    pushed = item(rig.clock, "a")
    await rig.queue.push([pushed])
    await rig.queue.renew("other", 2)
    process = await start(rig, "take_and_hold", "other")
    process.go()
    assert pushed.task_id in await process.line()
    await process.kill()
    async with asyncio.timeout(10):
        while not await rig.queue.reclaim():
            await asyncio.sleep(0.01)
    assert [one.task_id for one in await rig.queue.take("me", 1, wait_s=0)] == [pushed.task_id]
