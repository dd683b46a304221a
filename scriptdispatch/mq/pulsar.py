"""The stream of execution logs on Apache Pulsar: topic `mq_topic`, subscription `scriptdispatch`, shared by all consumers.

The client library blocks, so it runs in threads of this stream (`pulsar_link.py`). A message is in hand from `receive`
until it is given up (`pulsar_hand.py`); what a dead or closed process had in hand the broker gives to others. After a
crash of the broker messages may come again that were acknowledged already: acknowledgements are sent a little later.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from scriptdispatch import logs
from scriptdispatch.clock import Clock
from scriptdispatch.errors import StreamUnavailable
from scriptdispatch.mq.port import Delivery
from scriptdispatch.mq.pulsar_hand import Hand, Received
from scriptdispatch.mq.pulsar_link import Batch, PulsarLink
from scriptdispatch.mq.pulsar_publisher import Publisher
from scriptdispatch.mq.pulsar_version import broker_version

T = TypeVar("T")
MOST = 2_000  # messages of one batch: with 500 of them each task costs a tenth more CPU, most of it mongod's
HEAVY = 16_000_000  # bytes of one batch, or a little more
PIECE = 20
THREADS = 6  # at most: a receive, a publish, a dead letter, a ping, acknowledgements
PING_S = 1.5
CLOSE_S = 5.0
log = logs.get("pulsar")


class PulsarStream:
    """`consumer`: may this process receive? The consumer itself is made by the first `receive`, so that a process which only
    publishes never holds messages. `publish` raises ValueError for a message larger than the broker takes."""

    most = MOST

    def __init__(self, url: str, topic: str, clock: Clock, *, consumer: bool = True) -> None:
        self._url, self._clock, self._may_receive = url, clock, consumer
        self._version: str | None = None  # of the broker, once it has said it
        self._link = PulsarLink(url, topic)
        self._hand = Hand()
        self._publisher = Publisher(self._link, topic, self._in_thread)
        self._dead_letters = Publisher(self._link, f"{topic}-dlq", self._in_thread)
        self._threads: ThreadPoolExecutor | None = None
        self._turn = asyncio.Lock()  # one receive at a time is with the library
        self._receiving: asyncio.Future[Batch] | None = None
        self._consumer = 0  # that our messages came by
        self._spare: deque[Received] = deque()  # received, and more than was asked for
        self._pinging: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Connects to nothing yet: most processes that open the stream never use it."""
        if self._threads is None:
            self._link.open()
            self._threads = ThreadPoolExecutor(THREADS, "pulsar")

    async def close(self) -> None:
        """What is in hand comes again at once, to others."""
        if self._threads is None:
            return
        await asyncio.gather(self._publisher.finish(CLOSE_S), self._dead_letters.finish(CLOSE_S))
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._in_thread(self._link.close)
        except TimeoutError:
            log.warning("closed without the broker, which is away", event_name="pulsar.closed")
        finally:
            self._threads.shutdown(wait=False)  # what still comes there hears that the stream is closed
            self._threads = self._receiving = None
            self._forget()

    async def ping(self) -> str:
        if self._pinging is None or self._pinging.done():  # one question at a time, however often we are asked
            self._pinging = self._started(self._link.ask)
        try:
            async with asyncio.timeout(PING_S):
                _, version = await asyncio.gather(asyncio.shield(self._pinging), self._ask_version())
        except TimeoutError:
            raise StreamUnavailable(f"{self._link.name} does not answer within {PING_S:g} s") from None
        return self._link.name.replace("Pulsar", f"Pulsar {version}" if version else "Pulsar (it does not say which)", 1)

    async def _ask_version(self) -> str | None:
        if self._version is None:
            self._version = await broker_version(self._url)
        return self._version

    async def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        await self._publisher.publish(messages)

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        if not self._may_receive:
            raise RuntimeError("this stream was made for publishing only")
        if limit <= 0:
            return []
        if again := self._hand.overdue(limit, self._clock.uptime()):
            return again
        try:
            async with asyncio.timeout(wait_s):
                await self._turn.acquire()
        except TimeoutError:
            return []
        try:
            if not self._spare:
                await self._fetch(limit, wait_s)
            return self._take(limit)
        finally:
            self._turn.release()

    async def _fetch(self, limit: int, wait_s: float) -> None:
        """More messages into the spare ones. One that is cancelled goes on in its thread: the next takes over what it
        brings, and waits for it no longer than it would wait itself."""
        job = self._receiving
        if job is None:
            job = self._receiving = self._started(self._link.receive, limit, wait_s)
            await asyncio.wait([job])  # bounded by the link
        elif not (await asyncio.wait([job], timeout=wait_s))[0]:
            return
        self._receiving = None
        batch = job.result()
        if batch.consumer != self._consumer:  # a new one: what came by the old one's connection comes again
            self._forget()
            self._consumer = batch.consumer
        self._spare.extend(batch.messages)

    def _take(self, limit: int) -> list[Delivery]:
        """From the spare ones, until there are enough of them or they are heavy enough."""
        taken: list[Delivery] = []
        room = HEAVY
        while self._spare and len(taken) < limit and room > 0:
            part = [self._spare.popleft() for _ in range(min(limit - len(taken), len(self._spare), PIECE))]
            new = self._hand.take(part, self._clock.uptime())
            room -= sum(len(delivery.body) for delivery in new)
            taken += new
        return taken

    def _forget(self) -> None:
        self._hand.drop()
        self._spare.clear()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Not in hand any more: it was given up, or its connection ended and it comes again."""
        if messages := self._hand.give_up(deliveries):
            await self._in_thread(self._link.acknowledge, self._consumer, messages)

    async def reject(self, deliveries: Sequence[Delivery]) -> None:
        """If we die between the two steps the message comes again, and is rejected again: twice there, never lost."""
        if held := self._hand.holding(deliveries):
            await self._dead_letters.publish([(one.message.partition_key() or None, one.delivery.body) for one in held])
            await self.ack([one.delivery for one in held])

    async def lag(self) -> int | None:
        """Unknown: the broker tells its backlog only to its admin API, whose address we do not have."""
        return None

    def _started(self, job: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Goes on when whoever waits for it is cancelled."""
        future = asyncio.ensure_future(self._in_thread(job, *args))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard of, though nobody may ask
        return future

    async def _in_thread(self, job: Callable[..., T], *args: Any) -> T:
        if self._threads is None:
            raise StreamUnavailable(f"{self._link.name}: the stream is closed")
        here = contextvars.copy_context()  # which process it is, for what is logged there
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(here.run, job, *args))
