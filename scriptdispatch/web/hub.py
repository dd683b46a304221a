"""One listener on the event bus for all streams of this web process. It listens only while somebody does.

Nothing here grows: a stream about one task has a flag that rings, a stream of events has a bounded buffer and learns
when something was dropped. Streams read the store by themselves, so a lost event costs them a second at most.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from scriptdispatch import logs
from scriptdispatch.errors import Unavailable
from scriptdispatch.queue.port import INNER, Event, Events
from scriptdispatch.web.exchange import too_many

BUFFER = 2000
STREAMS = 1000
AGAIN_S = 1.0
log = logs.get("hub")


class Watch:
    """What one stream waits on. `rung` is set for anything of interest; `events` is filled for `/events` only."""

    def __init__(self, task_id: str | None) -> None:
        self.task_id = task_id
        self.rung = asyncio.Event()
        self.events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        if self.task_id is None:
            if len(self.events) >= BUFFER:
                self.events.clear()
                self.events.append({"event": "reset"})
            self.events.append(event)
        self.rung.set()

    async def wait(self, timeout_s: float) -> None:
        """Until it rings, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.rung.wait()
        except TimeoutError:
            return
        finally:
            self.rung.clear()


class Hub:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._by_task: dict[str, set[Watch]] = {}
        self._all: set[Watch] = set()
        self._count = 0
        self._pump: asyncio.Task[None] | None = None
        self.closing = False

    def check_room(self) -> None:
        """Before a stream's answer begins: 429 if too many are open."""
        if self._count >= STREAMS:
            raise too_many(5, f"{STREAMS} streams are open on this server already")

    @contextmanager
    def watch(self, task_id: str | None = None) -> Iterator[Watch]:
        """For the life of one stream: about one task, or about everything."""
        watch = Watch(task_id)
        group = self._all if task_id is None else self._by_task.setdefault(task_id, set())
        group.add(watch)
        self._count += 1
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._listen(), name="event-hub")
        try:
            yield watch
        finally:
            group.discard(watch)
            self._count -= 1
            if task_id is not None and not group:
                self._by_task.pop(task_id, None)
            if self._count == 0 and self._pump is not None:
                self._pump.cancel()
                self._pump = None

    def close(self) -> None:
        """The process ends: all streams end now, so that nobody waits for them."""
        self.closing = True
        for watch in self._watches():
            watch.rung.set()

    def _watches(self) -> list[Watch]:
        return [*self._all, *(watch for group in self._by_task.values() for watch in group)]

    async def _listen(self) -> None:
        while True:
            try:
                async for event in self._events.listen():
                    self._hear(event)
            except Unavailable as error:
                log.warning("the event bus does not answer", event_name="hub.away", error=str(error))
            await asyncio.sleep(AGAIN_S)
            self._hear({"event": "reset"})  # something may have been missed

    def _hear(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "reset":
            for watch in self._watches():
                watch.put(event)
            return
        if kind not in INNER:  # those are for our own streams
            for watch in self._all:
                watch.put(event)
        task_id = event.get("task_id")
        if isinstance(task_id, str):
            for watch in self._by_task.get(task_id, ()):
                watch.put(event)
