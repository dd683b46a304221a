"""The cache of final tasks on a real Redis: what is kept and for how long, what is not, and Redis being away."""

import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from scriptdispatch.domain.model import FINAL, STATUSES, Error, Retry, Status, Task
from scriptdispatch.queue import redis_cache
from scriptdispatch.queue.redis_cache import KEPT_S, MARGIN_S, REST_S, SHAPE, RedisTaskCache
from scriptdispatch.redis_client import RedisClient
from tests.contract.store_values import NOW, HeldClock, make_task
from tests.server_process import Server
from tests.system.proxy import Proxy

DAY_S = 24 * 3600.0


class Rig:
    """A cache, the client it uses, and what it has asked Redis for."""

    def __init__(self, url: str, prefix: str, retention_s: float = 30 * DAY_S) -> None:
        self.client, self.clock, self.prefix = RedisClient(url), HeldClock(), prefix
        self.cache = RedisTaskCache(self.client, prefix, self.clock, retention_s)
        self.asked: list[tuple[Any, ...]] = []
        command = self.client.command

        async def watched(*words: Any) -> Any:
            self.asked.append(words)
            return await command(*words)

        self.client.command = watched  # type: ignore[method-assign]

    async def redis(self, *words: Any) -> Any:
        return await RedisClient.command(self.client, *words)

    async def keys(self) -> list[bytes]:
        return sorted(await self.redis("KEYS", f"{self.prefix}*"))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not a Redis that is away."""
    monkeypatch.setattr(redis_cache, "PATIENCE_S", 10.0)


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(redis_url, f"test:{tmp_path}:")
    yield made
    if keys := await made.keys():
        await made.redis("UNLINK", *keys)
    await made.client.close()


def final(status: Status = "success", **values: Any) -> Task:
    return make_task(**{"status": status, "finished_at": NOW, "next_run_at": None, **values})


@pytest.mark.parametrize("status", sorted(FINAL))
async def test_a_final_task_comes_back_as_it_was(rig: Rig, status: Status) -> None:
    """Also what only JSON can hold: a script may answer any number."""
    task = final(
        status,
        params={"names": ["a", None, {"ü": "\x00\u2028"}], "number": 1e-9},
        labels={"site": "上海"},
        retry=Retry(strategy="daily", delay_seconds=7.0),
        result={"huge": 2**80, "small": -(2**63) - 1, "zero": -0.0, "text": "💾"},
        error=Error(code="TIMEOUT", message="too late", details={"unconfirmed": True}),
        run_at=NOW - timedelta(days=300),
    )
    assert rig.cache.wants(task)
    await rig.cache.put(task)
    kept = await rig.cache.get(task.id)
    assert kept == task
    assert msgspec.json.encode(kept) == msgspec.json.encode(task)


async def test_it_stays_for_five_minutes_under_its_id(rig: Rig) -> None:
    task = final()
    await rig.cache.put(task)
    assert await rig.keys() == [f"{rig.prefix}task:{task.id}".encode()]
    assert KEPT_S - 10 < await rig.redis("TTL", f"{rig.prefix}task:{task.id}") <= KEPT_S == 300


async def test_what_was_never_kept_is_not_there(rig: Rig) -> None:
    assert await rig.cache.get(make_task().id) is None


@pytest.mark.parametrize("status", sorted(set(STATUSES) - FINAL))
async def test_what_is_not_final_is_never_kept_nor_answered(rig: Rig, status: Status) -> None:
    task = make_task(status=status, finished_at=NOW)
    assert not rig.cache.wants(task)
    await rig.cache.put(task)
    assert await rig.keys() == []
    await rig.redis("SET", f"{rig.prefix}task:{task.id}", SHAPE + msgspec.json.encode(task))
    assert await rig.cache.get(task.id) is None


async def test_redis_is_not_asked_for_a_task_that_was_not_final_a_moment_ago(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_cache, "MOST_MOVING", 2)
    moving = [make_task() for _ in range(3)]
    for task in moving:
        assert not rig.cache.wants(task)
    for task in moving:
        assert await rig.cache.get(task.id) is None
    assert [words[1] for words in rig.asked] == [f"{rig.prefix}task:{moving[0].id}"], "the oldest was forgotten"
    done = final(id=moving[2].id)
    assert rig.cache.wants(done)
    await rig.cache.put(done)
    assert await rig.cache.get(done.id) == done


async def test_secrets_stay_in_the_store(rig: Rig) -> None:
    """S06."""
    task = final(params={"password": "hunter2!"}, secret_params=["password"], result="it was hunter2!")
    assert not rig.cache.wants(task)
    await rig.cache.put(task)
    assert await rig.keys() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: b"",
        lambda whole: b"\x00\xff\xfe",
        lambda whole: whole[:-1],
        lambda whole: whole.replace(b'"success"', b'"\xff\xfe"'),
        lambda whole: whole.replace(b'"success"', b'"unheard of"'),
        lambda whole: SHAPE + b"[" * 5000,
        lambda whole: SHAPE + b"{}",
        lambda whole: b"an older" + whole[len(SHAPE) :],
    ],
    ids=["empty", "bytes", "cut", "no text", "no status", "too deep", "no task", "another version"],
)
async def test_what_can_not_be_read_is_not_there_and_is_replaced(rig: Rig, spoil: Callable[[bytes], bytes]) -> None:
    task = final()
    key = f"{rig.prefix}task:{task.id}"
    await rig.cache.put(task)
    await rig.redis("SET", key, spoil(await rig.redis("GET", key)))
    assert await rig.cache.get(task.id) is None
    await rig.cache.put(task)
    assert await rig.cache.get(task.id) == task


async def test_a_key_of_another_kind_is_not_there(rig: Rig) -> None:
    task = final()
    await rig.redis("HSET", f"{rig.prefix}task:{task.id}", "a", "b")
    assert await rig.cache.get(task.id) is None


def test_a_task_with_another_field_has_another_shape() -> None:
    changed = msgspec.defstruct("Task", [("more", int, 0)], bases=(Task,), frozen=True, kw_only=True)
    assert msgspec.json.schema(changed) != msgspec.json.schema(Task)
    assert len(SHAPE) == 8


# --- clean-up


async def test_what_clean_up_may_soon_remove_is_neither_kept_nor_answered(rig: Rig) -> None:
    task = final()
    rig.clock.advance(seconds=30 * DAY_S - MARGIN_S - 1)
    assert rig.cache.wants(task)
    await rig.cache.put(task)
    assert await rig.cache.get(task.id) == task
    rig.clock.advance(seconds=1)
    assert await rig.cache.get(task.id) is None, "though Redis has it for five minutes more"
    assert not rig.cache.wants(task)
    await rig.redis("DEL", f"{rig.prefix}task:{task.id}")
    await rig.cache.put(task)
    assert await rig.keys() == []


@pytest.mark.parametrize("retention_s", [0.0, 1e300, float("inf")])
async def test_without_clean_up_age_does_not_matter(redis_url: str, rig: Rig, retention_s: float) -> None:
    cache = RedisTaskCache(rig.client, rig.prefix, rig.clock, retention_s)
    task = final(finished_at=NOW - timedelta(days=4000))
    assert cache.wants(task)
    await cache.put(task)
    assert await cache.get(task.id) == task


# --- the room in Redis, which queue and locks need


async def test_a_large_task_is_not_kept(rig: Rig) -> None:
    task = final(result="x" * redis_cache.MOST_BYTES)
    assert not rig.cache.wants(task)
    await rig.cache.put(task)
    assert await rig.keys() == []


async def test_no_more_is_kept_in_five_minutes_than_there_is_room_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "ROOM_BYTES", 6_000)
    tasks = [final(result="x" * 1_800) for _ in range(4)]
    for task in tasks:
        await rig.cache.put(task)
    assert len(await rig.keys()) == 3
    assert not rig.cache.wants(tasks[3])
    rig.clock.advance(seconds=KEPT_S)
    assert rig.cache.wants(tasks[3])
    await rig.cache.put(tasks[3])
    assert await rig.cache.get(tasks[3].id) == tasks[3]


# --- Redis is away


async def test_a_redis_that_is_away_is_left_alone_for_a_second(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    rig, task = Rig(server.url, "test:"), final()
    await rig.cache.put(task)
    server.kill()
    rig.asked.clear()
    assert await rig.cache.get(task.id) is None
    assert len(rig.asked) == 1
    assert await rig.cache.get(task.id) is None
    assert not rig.cache.wants(task)
    await rig.cache.put(task)
    assert len(rig.asked) == 1, "nobody asks it again so soon"
    server.restart()
    rig.clock.advance(seconds=REST_S)
    assert rig.cache.wants(task)
    await rig.cache.put(task)
    assert await rig.cache.get(task.id) == task
    await rig.client.close()


async def test_a_redis_that_stands_still_delays_one_reader_for_a_moment(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server("redis")
    rig, task = Rig(server.url, "test:"), final()
    await rig.cache.put(task)
    monkeypatch.setattr(redis_cache, "PATIENCE_S", 0.1)
    server.pause()
    began = time.monotonic()
    for _ in range(50):
        assert await rig.cache.get(task.id) is None
    assert time.monotonic() - began < 2
    server.resume()
    monkeypatch.setattr(redis_cache, "PATIENCE_S", 10.0)
    rig.clock.advance(seconds=REST_S)
    assert await rig.cache.get(task.id) == task
    await rig.client.close()


async def test_a_lost_answer_is_no_task_and_no_error(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    with Proxy(server.port) as proxy:
        rig, task = Rig(proxy.through(server.url), "test:"), final()
        proxy.drop_reply(match=b"task:")
        await rig.cache.put(task)
        assert proxy.fired["drop_reply"] == 1
        rig.clock.advance(seconds=REST_S)
        assert await rig.cache.get(task.id) == task, "it was kept all the same"
        proxy.drop_reply(match=b"task:")
        assert await rig.cache.get(task.id) is None
        assert proxy.fired["drop_reply"] == 2
        await rig.client.close()


async def test_a_full_redis_keeps_nothing_and_is_no_error(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    rig, task = Rig(server.url, "test:"), final()
    await rig.redis("CONFIG", "SET", "maxmemory", "1")
    await rig.cache.put(replace(task, name="full"))
    await rig.redis("CONFIG", "SET", "maxmemory", "0")
    rig.clock.advance(seconds=REST_S)
    assert await rig.cache.get(task.id) is None
    await rig.client.close()
