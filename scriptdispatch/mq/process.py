"""A consumer process: receives execution logs in batches and closes them out, one batch after the other."""

import asyncio
import os
import socket
from typing import Any

from scriptdispatch import child, crashpoints, logs, wire
from scriptdispatch.errors import Unavailable
from scriptdispatch.metrics import Metrics
from scriptdispatch.mq.closer import Closer
from scriptdispatch.mq.port import Delivery
from scriptdispatch.settings import Settings

IDLE_WAIT_S = 5.0  # the safety net; a new message rings the bell
log = logs.get("consumer")


def main(sock: socket.socket, settings: Settings, consumer_id: str, node_id: str) -> None:
    """Runs in another process."""
    child.run(sock, settings, "consumer", consumer_id, node_id, Consumer)


class Consumer:
    def __init__(self, context: child.Context) -> None:
        self._stream = context.backends.stream
        self._metrics = Metrics()
        self._closer = Closer(context.backends, context.settings, self._metrics)
        self._stopping = asyncio.Event()
        self._load = 0
        self._lag: int | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._loop = asyncio.create_task(self._consume())
        self._loop.add_done_callback(self._ended)

    async def handle(self, message: Any) -> None:
        log.warning("a message that is not for consumers", message=type(message).__name__)

    def beat(self) -> wire.Beat:
        return wire.Beat(load=self._load, lag=self._lag, metrics=self._metrics.snapshot())

    async def stop(self, grace_s: float, hurry: bool) -> None:
        """Ends the batch in hand. What is not acknowledged comes again, to another."""
        self._stopping.set()
        if self._loop is None or self._loop.done():
            return
        if self._load == 0:
            self._loop.cancel()
        await asyncio.wait([self._loop], timeout=grace_s)

    def _ended(self, loop: "asyncio.Task[None]") -> None:
        """A bug has ended the loop. Alive it would look well and consume nothing: dead, it is replaced at once."""
        if not loop.cancelled() and (error := loop.exception()) is not None:
            log.error("a bug in the consumer; it ends", event_name="consumer.bug", error=repr(error), exc_info=error)
            os._exit(1)

    async def _consume(self) -> None:
        most = self._stream.most
        while not self._stopping.is_set():
            await crashpoints.reach("consumer.before_receive")
            try:
                batch = await self._stream.receive(most, IDLE_WAIT_S)
                self._lag = await self._stream.lag() if len(batch) in (0, most) else len(batch)
            except Unavailable as error:
                await self._pause(error, 1.0)
                continue
            if batch:
                await self._close_out(batch)
                self._lag = 0 if len(batch) < most else self._lag

    async def _close_out(self, batch: list[Delivery]) -> None:
        """Until it is done: unacknowledged, it would only come again."""
        self._load = len(batch)
        pause_s = 0.1
        while True:
            try:
                await self._closer.close_out(batch)
                break
            except Unavailable as error:
                if self._stopping.is_set():
                    break
                await self._pause(error, pause_s)
                pause_s = min(5.0, pause_s * 2)
            except Exception as error:
                await self._isolate(batch, error)
                break
        self._load = 0

    async def _isolate(self, batch: list[Delivery], error: Exception) -> None:
        """A bug of ours that one of them brings out: alone it is quarantined, so that its neighbours go on."""
        if len(batch) == 1:
            log.error("a message brings out a bug; quarantined", event_name="closer.bug", error=repr(error), id=batch[0].id)
            try:
                await self._closer.set_aside(batch[0], error)
            except Unavailable as away:  # not acknowledged, so it comes again when its lease has run out
                log.warning("not quarantined yet", reason=str(away))
            return
        log.warning("a batch brings out a bug; one by one now", error=repr(error))
        for delivery in batch:
            await self._close_out([delivery])

    async def _pause(self, error: Unavailable, seconds: float) -> None:
        log.warning("waits for a part that is away", reason=str(error))
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return
