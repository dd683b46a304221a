"""Says what happened without waiting for it to be heard: events of one turn of the loop, and of all the time that the bus
takes for the last ones, go out together. They are announcements: a bus that is away costs them, never the work."""

import asyncio
from collections.abc import Sequence
from typing import Final

from scriptdispatch import logs
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.queue.port import Event, Events

SOON_S: Final = 0.002  # the work goes on first, and under load more is said at once
MAX_UNSAID: Final = 10_000
RESET: Final[Event] = {"event": "reset"}  # whoever listens has to read anew
log = logs.get("announcer")


class Announcer:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._unsaid: list[Event] = []
        self._speaking: asyncio.Task[None] | None = None

    def say(self, events: Sequence[Event]) -> None:
        """In order, soon. Never blocks."""
        if not events:
            return
        self._unsaid += events
        if len(self._unsaid) > MAX_UNSAID:
            self._unsaid = [RESET]
        if self._speaking is None:
            self._speaking = asyncio.get_running_loop().create_task(self._speak())

    async def _speak(self) -> None:
        await asyncio.sleep(SOON_S)
        while self._unsaid:
            batch, self._unsaid = self._unsaid, []
            try:
                await self._events.publish(batch)
            except QueueUnavailable as error:
                log.warning("not announced", event_name="events.lost", events=len(batch), reason=str(error))
        self._speaking = None
