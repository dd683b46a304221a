"""Queue, events, locks, leases and stream on every backend, for the contract suites. A backend is one entry of RIGS.

A rig stands for a cluster: `another()` is a second process's view of the same data.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from scriptdispatch.bell import Bell
from scriptdispatch.clock import Clock
from scriptdispatch.domain.lanes import lane_key
from scriptdispatch.domain.model import Priority
from scriptdispatch.ids import new_id
from scriptdispatch.locks.memory import MemoryLeases, MemoryLocks
from scriptdispatch.locks.port import Claim, DeviceLocks, Leases
from scriptdispatch.locks.redis import RedisLocks
from scriptdispatch.locks.redis_leases import RedisLeases
from scriptdispatch.locks.sqlite import SqliteLeases, SqliteLocks
from scriptdispatch.mq.memory import MemoryStream
from scriptdispatch.mq.port import Stream
from scriptdispatch.mq.sqlite import SqliteStream
from scriptdispatch.queue.memory import MemoryEvents, MemoryQueue
from scriptdispatch.queue.port import Events, Item, Queue
from scriptdispatch.queue.redis import RedisQueue
from scriptdispatch.queue.redis_channels import Channels
from scriptdispatch.queue.redis_events import RedisEvents
from scriptdispatch.queue.sqlite import BellEvents, SqliteQueue
from scriptdispatch.redis_client import RedisClient
from scriptdispatch.sqlite import Database
from tests.servers import ask

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self._now, self._uptime = START, 1000.0

    def now(self) -> datetime:
        return self._now

    def uptime(self) -> float:
        return self._uptime

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)
        self._uptime += seconds


@dataclass
class Rig:
    kind: str
    clock: Clock
    queue: Queue
    events: Events
    locks: DeviceLocks
    leases: Leases
    stream: Stream
    path: Path | None = None
    opened: list["Rig"] = field(default_factory=list)
    another: Callable[[], Awaitable["Rig"]] = lambda: _unset()

    async def open(self) -> "Rig":
        await self.queue.open()
        await self.stream.open()
        return self

    async def close(self) -> None:
        for other in self.opened:
            await other.close()
        self.opened.clear()
        await self.stream.close()
        await self.queue.close()


async def _unset() -> Rig:
    raise AssertionError("this rig was made without `another`")


def memory_rig(folder: Path, clock: Clock) -> Rig:
    queue = MemoryQueue(clock)
    rig = Rig("memory", clock, queue, MemoryEvents(), MemoryLocks(queue, clock), MemoryLeases(clock), MemoryStream(clock))

    async def another() -> Rig:
        return rig

    rig.another = another
    return rig


def sqlite_rig(folder: Path, clock: Clock) -> Rig:
    path = folder / "scriptdispatch.db"
    database, bell = Database(path), Bell(path)
    rig = Rig(
        "sqlite",
        clock,
        SqliteQueue(database, bell, clock),
        BellEvents(bell),
        SqliteLocks(database, bell, clock),
        SqliteLeases(database, clock),
        SqliteStream(database, bell, clock),
        path,
    )

    async def another() -> Rig:
        rig.opened.append(await sqlite_rig(folder, clock).open())
        return rig.opened[-1]

    rig.another = another
    return rig


class RedisRig(Rig):
    """Leaves nothing behind in a server that others use, too."""

    client: RedisClient
    prefix: str

    async def close(self) -> None:
        if keys := await self.client.command("KEYS", f"{self.prefix}*"):
            await self.client.command("UNLINK", *keys)
        await super().close()


def redis_rig(folder: Path, clock: Clock, url: str | None = None) -> RedisRig:
    url, prefix = url or ask("redis"), f"test:{folder}:"
    client = RedisClient(url)
    channels = Channels(client)
    rig = RedisRig(
        "redis",
        clock,
        RedisQueue(client, channels, prefix, clock),
        RedisEvents(client, channels, prefix),
        RedisLocks(client, prefix, clock),
        RedisLeases(client, prefix, clock),
        MemoryStream(clock),
    )
    rig.client, rig.prefix = client, prefix

    async def another() -> Rig:
        rig.opened.append(await redis_rig(folder, clock, url).open())
        return rig.opened[-1]

    rig.another = another
    return rig


RIGS: dict[str, Callable[[Path, Clock], Rig]] = {"memory": memory_rig, "sqlite": sqlite_rig, "redis": redis_rig}


def item(
    clock: Clock,
    device_id: str | None = "dev-1",
    *,
    priority: Priority = "normal",
    due_in: float = 0,
    kind: str = "script",
    task_id: str | None = None,
) -> Item:
    task_id = task_id or new_id()
    due_at = clock.now() + timedelta(seconds=due_in)
    key = lane_key(task_id, priority, due_at)
    return Item(task_id=task_id, device_id=device_id, lane_key=key, due_at=due_at, type=kind)


def claim(device_id: str, execution_id: str | None = None, *, ttl_s: float = 60) -> Claim:
    return Claim(device_id=device_id, execution_id=execution_id or new_id(), task_id=new_id(), ttl_s=ttl_s)


class Process:
    """Another process on the same file: it says `ready`, waits for `go`, carries out its action and says what came of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, action: str, path: Path, *args: str) -> "Process":
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.contract.queue_process", action, str(path), *args,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        started = cls(process)
        assert await started.line() == "ready"
        return started

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")

    async def line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            return (await self._process.stdout.readline()).decode().strip()

    async def end(self) -> None:
        async with asyncio.timeout(20):
            assert await self._process.wait() == 0

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    """Waits for something outside of this process; fails when it takes too long."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)
