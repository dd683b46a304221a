"""The SQLite queue shared by processes: wake-ups, and never two tasks of a device out at a time."""

import asyncio
import time

import apsw
import pytest

from tests.contract.queue_backends import Process, Rig, claim, item, until

pytest_plugins = ["tests.contract.queue_fixtures"]
pytestmark = pytest.mark.slow


async def asleep_in_take(rig: Rig, owner: str = "other") -> Process:
    """A process that has begun to listen; it looks once more before it sleeps, so nothing is lost from here on."""
    assert rig.path is not None
    bells = rig.path.with_name(rig.path.name + "-bells")
    process = await Process.start("take", rig.path, owner)
    process.go()
    await until(lambda: bells.is_dir() and any(name.name.startswith("queue.") for name in bells.iterdir()))
    return process


async def woken_within(process: Process, began: float) -> tuple[float, str]:
    at, _, tasks = (await process.line()).partition(" ")
    await process.end()
    return float(at) - began, tasks


async def test_a_push_wakes_a_take_in_another_process(sqlite: Rig) -> None:
    process = await asleep_in_take(sqlite)
    pushed = item(sqlite.clock, "a")
    began = time.monotonic()
    await sqlite.queue.push([pushed])
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert took < 0.1


async def test_the_release_of_a_lock_wakes_a_take_in_another_process(sqlite: Rig) -> None:
    held = claim("a")
    await sqlite.locks.acquire([held])
    pushed = item(sqlite.clock, "a")
    await sqlite.queue.push([pushed])
    process = await asleep_in_take(sqlite)
    began = time.monotonic()
    assert await sqlite.locks.release([("a", held.execution_id)]) == [True]
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert took < 0.1


async def test_a_delayed_item_is_taken_on_time_by_a_process_that_slept(sqlite: Rig) -> None:
    process = await asleep_in_take(sqlite)
    pushed = item(sqlite.clock, "a", due_in=0.4)
    began = time.monotonic()
    await sqlite.queue.push([pushed])
    took, tasks = await woken_within(process, began)
    assert tasks == pushed.task_id
    assert 0.39 <= took < 0.55


async def test_processes_that_take_at_once_share_the_work_and_no_device_is_out_twice(sqlite: Rig) -> None:
    """Finishing a task is what lets the next one of its device out: so the k-th of a device is always its k-th task."""
    assert sqlite.path is not None
    items = [item(sqlite.clock, f"dev-{n % 6}") for n in range(90)]
    await sqlite.queue.push(items)
    processes = [await Process.start("take_all", sqlite.path, f"owner-{n}") for n in range(3)]
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
    db = apsw.Connection(str(sqlite.path))
    assert db.execute("PRAGMA integrity_check").get == "ok"
    assert db.execute("SELECT (SELECT count(*) FROM queue_item), (SELECT count(*) FROM queue_lane)").get == (0, 0)
    db.close()


async def test_what_a_killed_process_had_in_hand_comes_back_when_its_lease_runs_out(sqlite: Rig) -> None:
    assert sqlite.path is not None
    pushed = item(sqlite.clock, "a")
    await sqlite.queue.push([pushed])
    await sqlite.queue.renew("other", 2)
    process = await Process.start("take_and_hold", sqlite.path, "other")
    process.go()
    assert pushed.task_id in await process.line()
    await process.kill()
    async with asyncio.timeout(10):
        while not await sqlite.queue.reclaim():
            await asyncio.sleep(0.01)
    assert [one.task_id for one in await sqlite.queue.take("me", 1, wait_s=0)] == [pushed.task_id]
