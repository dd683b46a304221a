"""Announcements go out in order and together, and never hold up who makes them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.queue.port import Event
from scriptdispatch.services.announcer import MAX_UNSAID, RESET, Announcer


class Bus:
    def __init__(self) -> None:
        self.heard: list[list[Event]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.away = False
        self.asked = asyncio.Event()

    async def publish(self, events: Sequence[Event]) -> None:
        self.asked.set()
        await self.open.wait()
        if self.away:
            raise QueueUnavailable("the bus is away")
        self.heard.append(list(events))

    def listen(self) -> AsyncIterator[Event]:
        raise AssertionError("nobody listens here")


async def until_said(announcer: Announcer) -> None:
    while announcer._speaking is not None:
        await asyncio.sleep(0)


async def test_what_is_said_in_one_turn_goes_out_together_and_in_order() -> None:
    bus = Bus()
    announcer = Announcer(bus)
    for n in range(5):
        announcer.say([{"n": n}])
    await until_said(announcer)
    assert bus.heard == [[{"n": n} for n in range(5)]]


async def test_a_slow_bus_holds_up_nobody_and_gets_the_rest_at_once() -> None:
    bus = Bus()
    bus.open.clear()
    announcer = Announcer(bus)
    announcer.say([{"n": 0}])
    await bus.asked.wait()
    for n in range(1, 100):
        announcer.say([{"n": n}])
    bus.open.set()
    await until_said(announcer)
    assert [len(batch) for batch in bus.heard] == [1, 99]


async def test_what_is_too_much_becomes_a_reset() -> None:
    bus = Bus()
    announcer = Announcer(bus)
    announcer.say([{"n": n} for n in range(MAX_UNSAID + 1)])
    await until_said(announcer)
    assert bus.heard == [[RESET]]


async def test_a_bus_that_is_away_costs_the_announcement_and_nothing_else() -> None:
    bus = Bus()
    bus.away = True
    announcer = Announcer(bus)
    announcer.say([{"n": 1}])
    await until_said(announcer)
    bus.away = False
    announcer.say([{"n": 2}])
    await until_said(announcer)
    assert bus.heard == [[{"n": 2}]]
