"""Events to the listeners of one process: each has a bounded buffer, and none can hold up the sender."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from scriptdispatch.queue.port import Event

BUFFER = 1000
RESET = "reset"


class _Listener:
    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()
        self.filled = asyncio.Event()

    def put(self, events: Iterable[Event]) -> None:
        for event in events:
            if len(self.waiting) >= BUFFER:
                self.waiting.clear()
                self.waiting.append({"event": RESET})
            self.waiting.append(event)
        self.filled.set()


class Fanout:
    """`begin` is called when the first listener comes and answers what is to be called when the last one is gone."""

    def __init__(self, begin: Callable[[], Callable[[], None]] | None = None) -> None:
        self._begin = begin
        self._end: Callable[[], None] | None = None
        self._listeners: set[_Listener] = set()

    def put(self, events: Iterable[Event]) -> None:
        batch = list(events)
        for listener in self._listeners:
            listener.put(batch)

    async def listen(self) -> AsyncIterator[Event]:
        listener = _Listener()
        if not self._listeners and self._begin is not None:
            self._end = self._begin()
        self._listeners.add(listener)
        try:
            while True:
                await listener.filled.wait()
                while listener.waiting:
                    yield listener.waiting.popleft()
                listener.filled.clear()
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._end is not None:
                self._end()
                self._end = None
