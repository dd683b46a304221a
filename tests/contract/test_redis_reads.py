"""Reading tasks through the cache on Redis: the answers are those of the store, whatever happens in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scriptdispatch.domain import lifecycle
from scriptdispatch.domain.model import Error, Execution, Task
from scriptdispatch.errors import StoreUnavailable
from scriptdispatch.queue import redis_cache
from scriptdispatch.queue.redis_cache import RedisTaskCache
from scriptdispatch.redis_client import RedisClient
from scriptdispatch.services import reading
from scriptdispatch.services.reading import read_task
from scriptdispatch.settings import Settings
from scriptdispatch.wiring import Backends, make
from tests.contract.store_values import NOW, HeldClock, finish, insert_task, one, start
from tests.server_process import Server
from tests.unit.web_helpers import Site, site

DAY_S = 24 * 3600.0
PATHS = ("", "/executions", "/history", "/script", "/logs")


class Reads:
    """Counts what a store is asked for, and lets a test hold or change the answers."""

    def __init__(self, backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: list[str] = []
        self.settled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.instead: Callable[[Task | None], Task | None] = lambda task: task
        real = backends.store.tasks

        async def counted(ids: Any, *, settled: bool = False) -> list[Task | None]:
            (self.settled if settled else self.plain).extend(ids)
            found = await real(ids, settled=settled)
            if settled:
                await self.gate.wait()
                found = [self.instead(task) for task in found]
            return found

        monkeypatch.setattr(backends.store, "tasks", counted)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a server that is away."""
    monkeypatch.setattr(redis_cache, "PATIENCE_S", 10.0)
    monkeypatch.setattr(reading, "SETTLED_WITHIN_S", 10.0)


# --- the web process


@pytest.fixture
async def web(redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    prefix = f"test:{tmp_path}:"
    async with site("sqlite", tmp_path, queue_url=redis_url, redis_prefix=prefix) as made:
        await made.backends.locks.set_intact()
        yield made
        client = RedisClient(redis_url)
        if keys := await client.command("KEYS", f"{prefix}*"):
            await client.command("UNLINK", *keys)
        await client.close()


async def ended(web: Site) -> tuple[Task, Execution]:
    """A task with all that there is to answer about it, and its execution."""
    created = await web.create(device_id="dev-001", labels={"site": "sh-1"}, params={"service": "edge"})
    [task] = await web.backends.store.tasks([created["id"]])
    assert task is not None
    task, row = await start(web.backends.store, task)
    error = Error(code="EXECUTION_FAILED", message="exit code 3", details={"exit_code": 3})
    now = web.backends.clock.now()
    return await finish(web.backends.store, task, now, "failed", error=error, result={"huge": 2**80, "pi": 3.14}), row


async def test_a_final_task_is_answered_by_redis(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = await ended(web)
    reads = Reads(web.backends, monkeypatch)
    first = await web.ask("GET", f"/tasks/{task.id}")
    assert (reads.plain, reads.settled) == ([task.id], [task.id])
    for _ in range(5):
        again = await web.ask("GET", f"/tasks/{task.id}")
        assert (again.status_code, again.content) == (200, first.content)
    assert (reads.plain, reads.settled) == ([task.id], [task.id]), "the store was asked by the first reader only"


async def test_every_answer_is_the_same_with_and_without_the_cache(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = await ended(web)
    names = (task.id, task.id[-12:], task.id.upper())
    await web.ask("GET", f"/tasks/{task.id}")
    reads = Reads(web.backends, monkeypatch)
    cached = [(await web.ask("GET", f"/tasks/{name}{path}")).content for name in names for path in PATHS]
    assert reads.plain == []
    web.backends.cache = None
    plain = [(await web.ask("GET", f"/tasks/{name}{path}")).content for name in names for path in PATHS]
    assert cached == plain
    assert len(reads.plain) == len(plain)


async def test_a_task_that_is_not_final_is_read_from_the_store_each_time(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    created = await web.create(run_at="2030-01-01T00:00:00Z")
    reads = Reads(web.backends, monkeypatch)
    for _ in range(3):
        assert (await web.ask("GET", f"/tasks/{created['id']}")).json()["status"] == "waiting"
    assert (len(reads.plain), reads.settled) == (3, [])
    await web.ask("DELETE", f"/tasks/{created['id']}")
    for _ in range(3):
        assert (await web.ask("GET", f"/tasks/{created['id']}")).json()["status"] == "canceled"
    assert reads.settled == [created["id"]], "from its end on it is in Redis"


async def test_what_comes_after_the_end_shows_in_the_history_and_leaves_the_task(web: Site) -> None:
    task, row = await ended(web)
    before = await web.ask("GET", f"/tasks/{task.id}")
    assert (await one(web.backends.store, lifecycle.late_note(task.id, row, "SUCCESS", NOW))).won
    after = await web.ask("GET", f"/tasks/{task.id}")
    history = await web.ask("GET", f"/tasks/{task.id}/history")
    web.backends.cache = None
    assert (await web.ask("GET", f"/tasks/{task.id}")).content == after.content == before.content
    assert "came after it was closed" in history.json()["items"][-1]["reason"]


async def test_an_action_is_decided_on_what_is_stored(web: Site) -> None:
    """A cache that is wrong, as it never is, misleads who looks and nobody else."""
    created = await web.create(run_at="2030-01-01T00:00:00Z")
    [task] = await web.backends.store.tasks([created["id"]])
    assert task is not None
    assert web.backends.cache is not None
    lie = await finish(web.backends.store, task, web.backends.clock.now())
    await web.backends.cache.put(lie)
    await finish(web.backends.store, task, web.backends.clock.now(), "waiting")
    assert (await web.ask("GET", f"/tasks/{task.id}")).json()["status"] == "success"
    canceled = await web.ask("POST", f"/tasks/{task.id}/cancel")
    assert (canceled.status_code, canceled.json()["status"]) == (200, "canceled")


async def test_tasks_are_read_as_ever_while_redis_is_away(tmp_path: Path, start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    async with site("sqlite", tmp_path, queue_url=server.url) as web:
        task, _ = await ended(web)
        there = await web.ask("GET", f"/tasks/{task.id}")
        server.kill()
        for _ in range(3):
            away = await web.ask("GET", f"/tasks/{task.id}")
            assert (away.status_code, away.content) == (200, there.content)
        server.restart()  # empty
        assert (await web.ask("GET", f"/tasks/{task.id}")).content == there.content


async def test_without_redis_there_is_no_cache(tmp_path: Path) -> None:
    for kind in ("memory", "sqlite"):
        async with site(kind, tmp_path) as web:
            assert web.backends.cache is None


# --- the races, on a clock that is moved by hand


@pytest.fixture
async def backends(redis_url: str, tmp_path: Path) -> AsyncIterator[Backends]:
    """A store in memory, and a cache that expects clean-up after one day."""
    clock, client, prefix = HeldClock(), RedisClient(redis_url), f"test:{tmp_path}:"
    made = make(Settings(store_url="memory://"), clock)
    yield replace(made, cache=RedisTaskCache(client, prefix, clock, DAY_S))
    if keys := await client.command("KEYS", f"{prefix}*"):
        await client.command("UNLINK", *keys)
    await client.close()


async def final_task(backends: Backends) -> Task:
    return await finish(backends.store, await insert_task(backends.store), NOW)


async def clean_up(backends: Backends) -> None:
    """A day later, as the leader does it."""
    clock = backends.clock
    assert isinstance(clock, HeldClock)
    clock.advance(seconds=DAY_S + 0.001)
    assert await backends.store.purge(clock.advance(days=-1), 10) == 1
    clock.advance(days=1)


async def test_a_reader_who_dawdles_does_not_bring_back_what_was_cleaned_up(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await final_task(backends)
    reads = Reads(backends, monkeypatch)
    reads.gate.clear()
    reader = asyncio.create_task(read_task(backends, task.id))
    async with asyncio.timeout(10):
        while not reads.settled:  # it has read the task, and is about to keep it
            await asyncio.sleep(0)
    await clean_up(backends)
    reads.gate.set()
    assert await reader == task, "it was there when he asked"
    assert await read_task(backends, task.id) is None


async def test_what_is_in_redis_when_clean_up_comes_is_not_answered_any_more(backends: Backends) -> None:
    task = await final_task(backends)
    assert await read_task(backends, task.id) == task
    assert backends.cache is not None
    assert await backends.cache.get(task.id) == task
    await clean_up(backends)
    assert await read_task(backends, task.id) is None, "though Redis has it still"


async def test_an_end_that_a_failover_may_take_back_is_answered_but_not_kept(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await insert_task(backends.store)
    done = await finish(backends.store, task, NOW)
    reads = Reads(backends, monkeypatch)
    reads.instead = lambda _: task  # what a majority of the servers has: the end is not there yet
    assert await read_task(backends, task.id) == done
    await finish(backends.store, done, NOW, "waiting", finished_at=None)  # and never comes there
    found = await read_task(backends, task.id)
    assert found is not None
    assert found.status == "waiting"


@pytest.mark.parametrize("trouble", ["away", "slow"])
async def test_a_store_that_can_not_say_whether_it_is_settled_is_no_trouble_for_the_reader(
    backends: Backends, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    task = await final_task(backends)
    reads = Reads(backends, monkeypatch)
    if trouble == "slow":
        monkeypatch.setattr(reading, "SETTLED_WITHIN_S", 0.01)
        reads.gate.clear()
    else:
        reads.instead = _away
    for _ in range(2):
        assert await read_task(backends, task.id) == task
    assert len(reads.plain) == 2
    assert backends.cache is not None
    assert await backends.cache.get(task.id) is None


def _away(_: Task | None) -> Task | None:
    raise StoreUnavailable("no primary")
