"""One task's event stream over as many connections as it takes: no line lost or doubled. Knows the API, not HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from scriptdispatch.client_errors import ApiError, ClientError, Json, Unreachable
from scriptdispatch.client_sse import BadStream, Event, Parser
from scriptdispatch.domain.model import FINAL


class Source(Protocol):
    """What it needs of the client. All raise `ApiError` or `Unreachable`."""

    async def get(self, task: str) -> Json: ...

    async def log_page(self, task: str, **query: Any) -> Json: ...

    def stream_lines(self, task: str, after: str | None) -> AsyncGenerator[str, None]:
        """The lines of one connection, until the server ends it."""
        ...


class Follow:
    """One task's stream over as many connections as it takes."""

    def __init__(self, client: Source, task: str, after: str | None, patience_s: float) -> None:
        self._client, self._task, self._after, self._patience_s = client, task, after, patience_s
        self._status: str | None = None
        self._connected = False
        self._broken_at: float | None = None

    async def events(self) -> AsyncGenerator[Event, None]:
        # The first look tells a wrong id or token apart from a stream that breaks, and sees a task that is final already.
        task = await self._client.get(self._task)
        self._task, self._status = task["id"], task["status"]
        yield Event(name="state", data=task)
        while self._status not in FINAL:
            try:
                async with aclosing(self._one_connection()) as connection:
                    async for event in connection:
                        yield event
                        if self._status in FINAL:
                            break  # without waiting for the server's `end`, seconds later
                    else:
                        await self._look_again()
            except Unreachable as error:
                await self._back_off(error)
            except ApiError as error:
                if error.status < 500:
                    raise
                await self._back_off(error)
        async for event in self._rest():
            yield event

    async def _one_connection(self) -> AsyncGenerator[Event, None]:
        """Ends when the server ends the stream; raises `Unreachable` when it breaks."""
        parser = Parser()
        async with aclosing(self._client.stream_lines(self._task, self._after)) as lines:
            async for line in lines:
                if self._broken_at is not None and self._connected:
                    yield Event(name="reconnected", data={"after": self._after})
                self._broken_at, self._connected = None, True
                try:
                    event = parser.feed(line)
                except BadStream as error:
                    raise Unreachable(f"the stream cannot be read: {error}") from error
                if event is not None and self._take(event):
                    yield event

    def _take(self, event: Event) -> bool:
        """Notes what a resume needs; False for what the reader must not see: the server's `end`, and its `error`, after
        which the stream ends and is opened again."""
        if event.id is not None:
            self._after = event.id
        if event.name == "state":
            self._status = event.data.get("status", self._status)
        return event.name not in ("end", "error")

    async def _look_again(self) -> None:
        """The server ended the stream (it stops, or the stream was too slow): go on at a bounded pace."""
        self._broken_at = time.monotonic()
        self._status = (await self._client.get(self._task))["status"]
        if self._status not in FINAL:
            await asyncio.sleep(0.5)

    async def _back_off(self, error: ClientError) -> None:
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        if now - self._broken_at > self._patience_s:
            raise error
        await asyncio.sleep(min(2.0, 0.1 + (now - self._broken_at) / 4))

    async def _rest(self) -> AsyncIterator[Event]:
        """What was stored before the end and not streamed yet: the state may overtake the last lines."""
        while True:
            page = await self._client.log_page(self._task, after=self._after, limit=500)
            for line in page["items"]:
                yield Event(name="log", data=line)
            if not page["items"] or page.get("next_cursor") is None:
                return
            self._after = str(page["next_cursor"])
