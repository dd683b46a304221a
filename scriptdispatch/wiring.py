"""Which implementation stands behind each port. The only file that knows; order is written top to bottom.

Call `connect` in the process that will use the result: connections and threads are not inherited.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scriptdispatch.clock import Clock, SystemClock
from scriptdispatch.locks.port import DeviceLocks, Leases
from scriptdispatch.mq.port import Stream
from scriptdispatch.queue.port import Events, Queue
from scriptdispatch.settings import Settings
from scriptdispatch.store.port import Store

if TYPE_CHECKING:
    from scriptdispatch.queue.redis_cache import RedisTaskCache


@dataclass(slots=True)
class Backends:
    store: Store
    queue: Queue
    events: Events
    locks: DeviceLocks
    leases: Leases
    stream: Stream
    clock: Clock
    cache: "RedisTaskCache | None" = None  # None: a read of the store costs no more (see `services.reading`)

    async def open(self) -> None:
        await self.store.open()
        await self.queue.open()  # locks, leases and events live with the queue
        await self.stream.open()

    async def close(self) -> None:
        await self.stream.close()
        await self.queue.close()
        await self.store.close()


async def connect(settings: Settings, *, clock: Clock | None = None) -> Backends:
    backends = make(settings, clock or SystemClock())
    await backends.open()
    return backends


def make(settings: Settings, clock: Clock) -> Backends:
    """Not connected yet."""
    if settings.store_url.startswith("memory://"):
        return _memory(clock)
    embedded = _Embedded(settings) if settings.store_url.startswith("sqlite") else None
    queue, events, locks, leases, cache = _queue(settings, embedded, clock)
    return Backends(
        store=_store(settings, embedded, clock),
        queue=queue,
        events=events,
        locks=locks,
        leases=leases,
        stream=_stream(settings, embedded, clock),
        clock=clock,
        cache=cache,
    )


class _Embedded:
    """One SQLite file and its bells, shared by all ports that live in it."""

    def __init__(self, settings: Settings) -> None:
        from scriptdispatch.bell import Bell
        from scriptdispatch.sqlite import Database

        self.database = Database(settings.database)
        self.bell = Bell(settings.database)


def _store(settings: Settings, embedded: _Embedded | None, clock: Clock) -> Store:
    if embedded is not None:
        from scriptdispatch.store.sqlite import SqliteStore

        return SqliteStore(embedded.database, clock)
    from scriptdispatch.store.mongo import MongoStore

    return MongoStore(settings.store_url, clock)


def _queue(
    settings: Settings, embedded: _Embedded | None, clock: Clock
) -> "tuple[Queue, Events, DeviceLocks, Leases, RedisTaskCache | None]":
    if settings.queue_url is not None:
        from scriptdispatch.locks.redis import RedisLocks
        from scriptdispatch.locks.redis_leases import RedisLeases
        from scriptdispatch.queue.redis import RedisQueue
        from scriptdispatch.queue.redis_cache import RedisTaskCache
        from scriptdispatch.queue.redis_channels import Channels
        from scriptdispatch.queue.redis_events import RedisEvents
        from scriptdispatch.redis_client import RedisClient

        client, prefix = RedisClient(settings.queue_url), settings.redis_prefix
        channels = Channels(client)
        return (
            RedisQueue(client, channels, prefix, clock),
            RedisEvents(client, channels, prefix),
            RedisLocks(client, prefix, clock),
            RedisLeases(client, prefix, clock),
            RedisTaskCache(client, prefix, clock, settings.retention_days * 86_400),
        )
    from scriptdispatch.locks.sqlite import SqliteLeases, SqliteLocks
    from scriptdispatch.queue.sqlite import BellEvents, SqliteQueue

    assert embedded is not None
    database, bell = embedded.database, embedded.bell
    return (
        SqliteQueue(database, bell, clock),
        BellEvents(bell),
        SqliteLocks(database, bell, clock),
        SqliteLeases(database, clock),
        None,
    )


def _stream(settings: Settings, embedded: _Embedded | None, clock: Clock) -> Stream:
    if settings.mq_url is not None:
        from scriptdispatch.mq.pulsar import PulsarStream

        return PulsarStream(settings.mq_url, settings.mq_topic, clock)
    from scriptdispatch.mq.sqlite import SqliteStream

    assert embedded is not None
    return SqliteStream(embedded.database, embedded.bell, clock)


def _memory(clock: Clock) -> Backends:
    from scriptdispatch.locks.memory import MemoryLeases, MemoryLocks
    from scriptdispatch.mq.memory import MemoryStream
    from scriptdispatch.queue.memory import MemoryEvents, MemoryQueue
    from scriptdispatch.store.memory import MemoryStore

    queue = MemoryQueue(clock)
    return Backends(
        store=MemoryStore(clock),
        queue=queue,
        events=MemoryEvents(),
        locks=MemoryLocks(queue, clock),
        leases=MemoryLeases(clock),
        stream=MemoryStream(clock),
        clock=clock,
    )
