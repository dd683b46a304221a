"""The event bus on Redis: each event is one message on the channel `<prefix>events`, as JSON, for any program to hear.
Those that only our own processes understand (`port.INNER`) go to `<prefix>events:inner`.

A sender waits a moment for Redis to take what it says, so that what is said later is heard later; no longer, and it never
fails because of it. What could not be said is made up for by a `reset` before the next event; who may have missed something
because his own line was down gets one, too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from scriptdispatch import logs
from scriptdispatch.errors import QueueUnavailable
from scriptdispatch.queue.fanout import RESET, Fanout
from scriptdispatch.queue.port import INNER, Event
from scriptdispatch.queue.redis_channels import Channels
from scriptdispatch.queue.redis_gather import Gathering
from scriptdispatch.redis_client import RedisClient

log = logs.get("queue")
# Short, and so sent whole each time: a script that Redis had forgotten would be sent again behind the next announcement.
_PUBLISH = "for _, said in ipairs(cmsgpack.unpack(ARGV[2])) do redis.call('PUBLISH', ARGV[1] .. said[1], said[2]) end"
_INNER = ":inner"
PATIENCE_S = 0.25
BATCH = 500
MAX_UNDER_WAY = 10_000  # events that Redis has not taken yet


class RedisEvents:
    def __init__(self, client: RedisClient, channels: Channels, prefix: str) -> None:
        self._client, self._channels, self._channel = client, channels, f"{prefix}events"
        self._encoder, self._decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Event)
        self._fanout = Fanout(self._begin)
        self._gathering = Gathering(self._say, BATCH)
        self._under_way = 0
        self._lost = False  # something could not be said since the last time

    async def publish(self, events: Sequence[Event]) -> None:
        if not events:
            return
        await self._channels.settled(PATIENCE_S)  # who listens here from now on hears it, too
        for chunk in (events[start : start + BATCH] for start in range(0, len(events), BATCH)):
            if self._under_way >= MAX_UNDER_WAY:
                self._lost = True
                return
            self._under_way += len(chunk)
            said = self._gathering.add(chunk)
            said.add_done_callback(partial(self._taken, len(chunk)))
            await asyncio.wait({said}, timeout=PATIENCE_S)

    def listen(self) -> AsyncIterator[Event]:
        return self._fanout.listen()

    def _taken(self, count: int, _: object) -> None:
        self._under_way -= count

    async def _say(self, events: list[Event]) -> list[Any]:
        made_up, self._lost = self._lost, False
        said = [self._letter(event) for event in ([{"event": RESET}] if made_up else []) + events]
        try:
            await self._client.command("EVAL", _PUBLISH, 0, self._channel, msgspec.msgpack.encode(said))
        except QueueUnavailable as error:
            self._lost = True
            log.warning("events were not announced", event_name="events.lost", count=len(events), reason=str(error))
        return []

    def _letter(self, event: Event) -> tuple[str, str]:
        """What its channel's name has behind `<prefix>events`, and its text."""
        return _INNER if event.get("event") in INNER else "", self._encoder.encode(event).decode()

    def _begin(self) -> Callable[[], None]:
        end_public = self._channels.listen(self._channel, self._hear, lambda _: None)
        # Asked for last, on the same line: from its confirmation on both are heard.
        end_inner = self._channels.listen(self._channel + _INNER, self._hear, self._hears)

        def end() -> None:
            end_public()
            end_inner()

        return end

    def _hears(self, whole: bool) -> None:
        if not whole:
            self._fanout.put([{"event": RESET}])

    def _hear(self, payload: bytes) -> None:
        try:
            event = self._decoder.decode(payload)
        except msgspec.DecodeError:
            event = {"event": RESET}  # not from us: it may have told of anything
        self._fanout.put([event])
