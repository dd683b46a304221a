"""F45: the broker is killed in the middle of batches and comes back. On a broker of the test's own."""

import asyncio
import http.client
import json
import time
from collections import Counter
from collections.abc import Callable

import pytest
import structlog

from scriptdispatch.clock import SystemClock
from scriptdispatch.errors import StreamUnavailable
from tests.contract.pulsar_library import need_pulsar
from tests.server_process import Server

need_pulsar()

from scriptdispatch.mq import pulsar_log  # noqa: E402
from scriptdispatch.mq.pulsar import PulsarStream  # noqa: E402
from tests.contract.pulsar_rig import new_topic  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
MESSAGES = 3000


class Consumer:
    """Takes small batches, gives half of each up at once and the other half a batch later, as slow closers do."""

    def __init__(self, stream: PulsarStream) -> None:
        self._stream = stream
        self.seen: Counter[bytes] = Counter()
        self.away = 0
        self.in_hand: set[str] = set()

    async def run(self) -> None:
        later: list = []  # type: ignore[type-arg]
        while True:
            try:
                got = await self._stream.receive(50, 1)
                assert not self.in_hand & {delivery.id for delivery in got}, "a message that is in hand was handed out again"
                self.in_hand |= {delivery.id for delivery in got}
                self.seen.update(delivery.body for delivery in got)
                half = len(got) // 2
                await self._give_up([*later, *got[:half]])
                later = got[half:]
            except StreamUnavailable:
                self.away += 1
                await asyncio.sleep(0.2)

    async def _give_up(self, deliveries: list) -> None:  # type: ignore[type-arg]
        self.in_hand -= {delivery.id for delivery in deliveries}
        await self._stream.ack(deliveries)


class Publisher:
    """Publishes until the broker has it; what it is unsure of it publishes again."""

    def __init__(self, stream: PulsarStream) -> None:
        self._stream, self.published, self.away = stream, 0, 0

    async def run(self) -> None:
        while self.published < MESSAGES:
            batch = [(f"dev-{n % 5}", str(n).encode()) for n in range(self.published, self.published + 20)]
            try:
                await self._stream.publish(batch)
                self.published += len(batch)
            except StreamUnavailable:
                self.away += 1
            await asyncio.sleep(0.001)


def admin(server: Server, method: str, topic: str, what: str, body: str | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[1], timeout=20)
    path = f"/admin/v2/{topic.replace('://', '/')}/{what}"
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status in (200, 204), content
    return content


def backlog(server: Server, topic: str, partitions: int) -> int:
    stats = json.loads(admin(server, "GET", topic, "partitioned-stats" if partitions else "stats"))
    return int(stats["subscriptions"]["scriptdispatch"]["msgBacklog"])


@pytest.mark.parametrize("partitions", [0, 3])
async def test_a_broker_killed_in_the_middle_of_batches_loses_nothing(
    start_server: Callable[..., Server], partitions: int
) -> None:
    server, topic, clock = start_server("pulsar"), new_topic(), SystemClock()
    if partitions:
        admin(server, "PUT", topic, "partitions", str(partitions))
    publishing, consuming = PulsarStream(server.url, topic, clock, consumer=False), PulsarStream(server.url, topic, clock)
    await publishing.open()
    await consuming.open()
    publisher, consumer = Publisher(publishing), Consumer(consuming)
    with structlog.testing.capture_logs() as lines:
        consumes = asyncio.create_task(consumer.run())
        publishes = asyncio.create_task(publisher.run())
        await until(lambda: publisher.published > 500 and len(consumer.seen) > 200, 30, publishes, consumes)
        server.kill()
        assert publisher.published < MESSAGES, "the fault came too late"
        await until(lambda: publisher.away > 0 and consumer.away > 0, 30, publishes, consumes)
        with pytest.raises(StreamUnavailable):
            await publishing.ping()
        await asyncio.to_thread(server.start)
        healed = time.monotonic()
        everything = {str(n).encode() for n in range(MESSAGES)}
        await until(lambda: publisher.published >= MESSAGES and set(consumer.seen) == everything, 60, publishes, consumes)
        assert time.monotonic() - healed < 60
        # Acknowledged message by message, over two copies of some batches: nothing is left of any.
        await until(lambda: backlog(server, topic, partitions) == 0, 30, publishes, consumes)
    consumes.cancel()
    await asyncio.gather(consumes, return_exceptions=True)
    await publishing.close()
    await consuming.close()
    said = [line for line in lines if line.get("event_name") == "pulsar.library"]
    assert len(said) <= pulsar_log.BURST * 3, "the library's complaints are few"


async def until(condition: Callable[[], bool], limit_s: float, *tasks: asyncio.Task[None]) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            for task in tasks:
                if task.done() and (task.cancelled() or task.exception()):
                    await task
            await asyncio.sleep(0.02)
