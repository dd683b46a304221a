"""The stream of execution logs in one process: for tests and simulation. "Durable" lasts as long as the process."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from scriptdispatch.clock import Clock
from scriptdispatch.mq.port import Delivery
from scriptdispatch.sleepers import Sleepers, sleep_until_rung

LEASE = timedelta(seconds=30)
DEAD_LETTERS = 10_000


@dataclass(slots=True)
class _Message:
    number: int
    body: bytes
    until: datetime | None = None  # while in somebody's hand


class MemoryStream:
    most = 500

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._messages: dict[int, _Message] = {}  # by number, which only rises, so in order
        self._free: deque[int] = deque()
        self._number = 0
        self._sleepers = Sleepers()
        self.dead_letters: deque[bytes] = deque(maxlen=DEAD_LETTERS)

    async def open(self) -> None:
        return

    async def close(self) -> None:
        """What is in hand comes again at once, to whoever opens it next."""
        self._free.extend(message.number for message in self._messages.values() if message.until is not None)
        for message in self._messages.values():
            message.until = None

    async def ping(self) -> str:
        return "memory"

    async def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        for _, body in messages:
            self._number += 1
            self._messages[self._number] = _Message(self._number, body)
            self._free.append(self._number)
        if messages:
            self._sleepers.wake()

    async def receive(self, limit: int, wait_s: float) -> list[Delivery]:
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        with self._sleepers.alarm() as alarm:
            while limit > 0:
                alarm.clear()
                if taken := self._take(limit):
                    return taken
                left = until - loop.time()
                if left <= 0:
                    return []
                await sleep_until_rung(alarm, min(left, self._until_lease_ends(left)))
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._messages.pop(delivery.token, None)

    async def reject(self, deliveries: Sequence[Delivery]) -> None:
        self.dead_letters.extend(delivery.body for delivery in deliveries if delivery.token in self._messages)
        await self.ack(deliveries)

    async def lag(self) -> int | None:
        return len(self._messages)

    def _take(self, limit: int) -> list[Delivery]:
        now = self._clock.now()
        if not self._free:
            self._end_leases(now)
        taken: list[Delivery] = []
        while self._free and len(taken) < limit:
            message = self._messages.get(self._free.popleft())
            if message is None:
                continue  # acknowledged under a lease that had run out
            message.until = now + LEASE
            taken.append(Delivery(id=str(message.number), body=message.body, token=message.number))
        return taken

    def _end_leases(self, now: datetime) -> None:
        for message in self._messages.values():
            if message.until is not None and message.until <= now:
                message.until = None
                self._free.append(message.number)

    def _until_lease_ends(self, otherwise: float) -> float:
        ends = [message.until for message in self._messages.values() if message.until is not None]
        return (min(ends) - self._clock.now()).total_seconds() if ends else otherwise
