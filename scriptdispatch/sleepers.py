"""Waiting without polling, and without losing a wake-up: register first, then look, then sleep.

In one process and on one loop. What wakes the sleepers (a bell, a push to a memory queue) calls `wake`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Sleepers:
    def __init__(self) -> None:
        self._alarms: set[asyncio.Event] = set()

    def wake(self) -> None:
        for alarm in self._alarms:
            alarm.set()

    @contextmanager
    def alarm(self) -> Iterator[asyncio.Event]:
        """An event that every `wake` from now on sets. Clear it before each look: what happens after the look sets it."""
        event = asyncio.Event()
        self._alarms.add(event)
        try:
            yield event
        finally:
            self._alarms.discard(event)


async def sleep_until_rung(alarm: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await alarm.wait()
    except TimeoutError:
        return  # a look costs little; the caller looks at its own clock
