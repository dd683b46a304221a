"""Publishing to one topic, by group commit: what is published while a batch is under way goes together as the next one.

A lone message leaves at once. Each caller hears of its own messages only.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from scriptdispatch.errors import StreamUnavailable
from scriptdispatch.mq.pulsar_link import Outcome, PulsarLink, Sending

MAX_WAITING = 50_000  # messages, beside the batch that is under way
InThread = Callable[..., Awaitable[Any]]
Caller = tuple[Sending, asyncio.Future[None]]


class Publisher:
    def __init__(self, link: PulsarLink, topic: str, in_thread: InThread) -> None:
        self._link, self._topic, self._in_thread = link, topic, in_thread
        self._waiting: list[Caller] = []
        self._messages = 0  # of those waiting
        self._sender: asyncio.Task[None] | None = None

    async def publish(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        """Durable when it returns. Raises `StreamUnavailable` (the messages may be there or not), ValueError (too large)."""
        if not messages:
            return
        if self._messages >= MAX_WAITING:
            raise StreamUnavailable(f"{self._link.name}: {self._messages} messages wait to be published already")
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((Sending(messages), told))
        self._messages += len(messages)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(), name="pulsar-publisher")
        await told

    async def finish(self, within_s: float) -> None:
        """Until everything that was to be published has its answer, or the time is over."""
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=within_s)

    async def _send_all(self) -> None:
        while self._waiting:
            callers, self._waiting, self._messages = self._waiting, [], 0
            try:
                outcomes = await self._in_thread(self._link.send, self._topic, [sending for sending, _ in callers])
            except Exception as error:  # for those who wait for it; it ends here for us
                for _, told in callers:
                    _tell(told, error)
            else:
                for (_, told), outcome in zip(callers, outcomes, strict=True):
                    _tell(told, _error(outcome))
        self._sender = None  # nothing is awaited since the last look: whoever comes now starts the next


def _error(outcome: Outcome) -> Exception | None:
    if outcome.error is None:
        return None
    return ValueError(outcome.error) if outcome.too_large else StreamUnavailable(outcome.error)


def _tell(told: asyncio.Future[None], error: Exception | None) -> None:
    if told.done():
        return  # the caller was cancelled
    if error is None:
        told.set_result(None)
    else:
        told.set_exception(error)
