"""The stream on a real Pulsar broker, for the contract suite; queue and locks are in memory and not looked at.

What was published takes a moment to get to a consumer, so a receive of 0 s says nothing there. `PatientStream` knows how
much is on its way: it waits for that, and for a little while where nothing should come.
"""

import time
from dataclasses import dataclass, field

import pulsar

from scriptdispatch.clock import Clock
from scriptdispatch.ids import new_id
from scriptdispatch.locks.memory import MemoryLeases, MemoryLocks
from scriptdispatch.mq.port import Delivery
from scriptdispatch.mq.pulsar import PulsarStream
from scriptdispatch.mq.pulsar_log import library_logger
from scriptdispatch.queue.memory import MemoryEvents, MemoryQueue
from tests.contract.queue_backends import Rig

PATIENCE_S = 10.0  # for what must come
LOOK_S = 0.2  # for what must not


@dataclass
class Traffic:
    """Of all streams on one topic."""

    topic: str
    published: int = 0
    seen: set[str] = field(default_factory=set)

    @property
    def on_its_way(self) -> int:
        return self.published - len(self.seen)


class PatientStream(PulsarStream):
    def __init__(self, url: str, traffic: Traffic, clock: Clock) -> None:
        super().__init__(url, traffic.topic, clock)
        self.url, self.traffic = url, traffic

    async def publish(self, messages) -> None:  # type: ignore[no-untyped-def]
        await super().publish(messages)
        self.traffic.published += len(messages)

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        began = time.monotonic()
        got: list[Delivery] = []
        while limit > len(got):
            got += await super().receive(limit - len(got), LOOK_S if got or self.traffic.on_its_way else max(wait_s, LOOK_S))
            self.traffic.seen.update(delivery.id for delivery in got)
            if not self.traffic.on_its_way or time.monotonic() - began > PATIENCE_S:
                break
        return got


def pulsar_rig(url: str, clock: Clock, traffic: Traffic | None = None) -> Rig:
    queue = MemoryQueue(clock)
    traffic = traffic or Traffic(new_topic())
    stream = PatientStream(url, traffic, clock)
    rig = Rig("pulsar", clock, queue, MemoryEvents(), MemoryLocks(queue, clock), MemoryLeases(clock), stream)

    async def another() -> Rig:
        rig.opened.append(await pulsar_rig(url, clock, traffic).open())
        return rig.opened[-1]

    rig.another = another
    return rig


def new_topic() -> str:
    return f"persistent://public/default/test-{new_id()}"


def bodies_in(url: str, topic: str) -> list[bytes]:
    """Everything that the broker keeps in a topic, acknowledged or not."""
    client = pulsar.Client(url, logger=library_logger())
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    bodies = []
    while reader.has_message_available():
        bodies.append(reader.read_next(5000).data())
    client.close()
    return bodies
