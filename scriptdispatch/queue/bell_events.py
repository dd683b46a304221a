"""The event bus of the processes of one machine, as datagrams of the bell. Nobody listening costs one look at a folder.

A socket holds some 200 kB. A sender waits a few milliseconds for room, and no more once a listener has proved to be stuck;
what is lost then is noticed by the count of the letters, and a last, empty one tells who would not hear of it otherwise.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import msgspec
from msgspec import Struct

from scriptdispatch.bell import MAX_PAYLOAD, Bell
from scriptdispatch.ids import new_id
from scriptdispatch.queue.fanout import RESET, Fanout
from scriptdispatch.queue.port import Event

TOPIC = "events"
ROOM = MAX_PAYLOAD - 200  # for what surrounds the events
MAX_SENDERS = 1000
PAUSES_S = (0.001, 0.002, 0.005, 0.01, 0.02)  # while a listener catches up
NOTICES_S = (0.05, 0.2, 1.0, 5.0, 20.0)  # when to tell of a loss, as long as the socket is full


class _Letter(Struct, frozen=True, array_like=True):
    """A sender counts its letters, so that a listener sees that one was lost (its socket was full)."""

    sender: str
    number: int
    events: list[msgspec.Raw]


class _Opened(Struct, frozen=True, array_like=True):
    sender: str
    number: int
    events: list[Event]


class BellEvents:
    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._sender, self._number = new_id(), 0
        self._encoder, self._decoder = msgspec.json.Encoder(), msgspec.json.Decoder(_Opened)
        self._fanout = Fanout(self._begin)
        self._patient = True  # until a letter was lost all the same; again when one reached everybody
        self._notice: asyncio.TimerHandle | None = None
        self._heard: OrderedDict[str, int] = OrderedDict()  # last letter of each sender

    async def publish(self, events: Sequence[Event]) -> None:
        if not events or not self._bell.has_listeners(TOPIC):
            return
        for bundle in self._bundles(events):
            await self._send(bundle)

    def listen(self) -> AsyncIterator[Event]:
        return self._fanout.listen()

    async def _send(self, bundle: list[msgspec.Raw]) -> None:
        """Repeated to all while one has no room: who has it already knows its number."""
        letter = self._letter(bundle)
        for pause_s in PAUSES_S if self._patient else ():
            if self._bell.ring(TOPIC, letter):
                return
            await asyncio.sleep(pause_s)
        self._patient = self._bell.ring(TOPIC, letter)
        if not self._patient:
            self._tell_of_loss(0)

    def _letter(self, bundle: list[msgspec.Raw]) -> bytes:
        self._number += 1
        return self._encoder.encode(_Letter(self._sender, self._number, bundle))

    def _tell_of_loss(self, tries: int) -> None:
        if self._notice is not None:
            self._notice.cancel()
        loop = asyncio.get_running_loop()
        self._notice = loop.call_later(NOTICES_S[tries], self._send_notice, tries)

    def _send_notice(self, tries: int) -> None:
        self._notice = None
        self._patient = self._bell.ring(TOPIC, self._letter([]))
        if not self._patient and tries + 1 < len(NOTICES_S):
            self._tell_of_loss(tries + 1)

    def _bundles(self, events: Sequence[Event]) -> Iterator[list[msgspec.Raw]]:
        bundle: list[msgspec.Raw] = []
        size = 0
        for event in events:
            text = self._encoder.encode(event)
            if len(text) > ROOM:
                text = self._encoder.encode({"event": RESET})  # no datagram can carry it: whoever listens must read anew
            if bundle and size + len(text) + 1 > ROOM:
                yield bundle
                bundle, size = [], 0
            bundle.append(msgspec.Raw(text))
            size += len(text) + 1
        yield bundle

    def _begin(self) -> Callable[[], None]:
        self._heard.clear()
        return self._bell.listen(TOPIC, self._open_letter)

    def _open_letter(self, payload: bytes) -> None:
        try:
            letter = self._decoder.decode(payload)
        except msgspec.DecodeError:
            # Not from us, or cut short: it may have told of anything.
            self._fanout.put([{"event": RESET}])
            return
        before = self._heard.get(letter.sender)
        if before is not None and letter.number <= before:
            return  # repeated because somebody else had no room
        self._heard[letter.sender] = letter.number
        self._heard.move_to_end(letter.sender)
        if len(self._heard) > MAX_SENDERS:
            self._heard.popitem(last=False)
        if before is not None and letter.number != before + 1:
            self._fanout.put([{"event": RESET}])
        self._fanout.put(letter.events)
