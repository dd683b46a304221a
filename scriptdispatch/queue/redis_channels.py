"""What Redis announces (pub/sub), on a connection of its own: the bell of the queue, and events.

It reconnects for as long as it is open. Whoever listens is told each time that his channel is heard from now on: what was
said before that moment he may have missed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scriptdispatch import logs
from scriptdispatch.errors import ScriptdispatchError
from scriptdispatch.redis_client import Line, RedisClient

log = logs.get("queue")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # between attempts to connect
PING_S = 15.0  # a line that says nothing for so long is asked whether it is still there
SILENCE_S = 20.0  # ... and is given up

Heard = Callable[[bytes], None]
Begun = Callable[[bool], None]  # True: for the first time, and it was never down since somebody asked to listen


@dataclass(slots=True, eq=False)
class _Subscription:
    heard: Heard
    begun: Begun
    whole: bool = True  # nothing can have been missed since it was asked for
    confirmed: bool = False


class Channels:
    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._wanted: dict[bytes, _Subscription] = {}
        self._asked: Counter[bytes] = Counter()  # SUBSCRIBEs that were not answered yet
        self._line: Line | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._last = 0.0  # when the line last said something

    async def open(self) -> None:
        """Connected when it comes back, so that `listen` takes one write and no more."""
        self._line = await Line.open(self._client.url)
        self._task = asyncio.get_running_loop().create_task(self._stay())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._line is not None:
            self._line.drop()
            self._line = None

    def listen(self, channel: str, heard: Heard, begun: Begun) -> Callable[[], None]:
        """Asks for the channel at once; one listener each. Answers what ends it."""
        name = channel.encode()
        self._wanted[name] = _Subscription(heard, begun, whole=self._line is not None)
        self._settled.clear()
        if self._line is not None:
            self._ask(self._line, name)
        return lambda: self._end(name)

    async def settled(self, limit_s: float) -> None:
        """Until everything that was asked for is heard, or the time is over."""
        if all(subscription.confirmed for subscription in self._wanted.values()):
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._settled.wait()
        except TimeoutError:
            log.debug("channels not heard yet", channels=len(self._wanted))

    def _end(self, name: bytes) -> None:
        self._wanted.pop(name, None)
        if self._line is not None:
            self._line.write("UNSUBSCRIBE", name)

    async def _stay(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._line is None:
                    self._line = await self._connect()
                pause_s = FIRST_PAUSE_S
                await self._hear(self._line)
            except ScriptdispatchError as error:
                log.warning("announcements of Redis are not heard", event_name="redis.deaf", reason=str(error))
            self._line = None
            for subscription in self._wanted.values():
                subscription.whole = subscription.confirmed = False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _connect(self) -> Line:
        line = await Line.open(self._client.url)
        self._asked.clear()
        for name in self._wanted:
            self._ask(line, name)
        return line

    def _ask(self, line: Line, name: bytes) -> None:
        self._asked[name] += 1
        line.write("SUBSCRIBE", name)

    async def _hear(self, line: Line) -> None:
        """Until the line breaks."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        watch = loop.call_later(PING_S, self._watch, line)
        try:
            while True:
                said = await line.read()
                self._last = loop.time()
                self._take(said)
        finally:
            watch.cancel()
            line.drop()

    def _watch(self, line: Line) -> None:
        """A connection can die without a sign, and a bell that nobody hears rings in vain."""
        if line is not self._line:
            return
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._last
        if silent_s >= SILENCE_S:
            line.drop()
            return
        if silent_s >= PING_S - 1:
            line.write("PING")
        loop.call_later(SILENCE_S - PING_S, self._watch, line)

    def _take(self, said: object) -> None:
        if not isinstance(said, list) or len(said) != 3:
            return  # the answer to a PING
        kind, name, payload = said
        if kind == b"subscribe":
            self._asked[name] -= 1
        subscription = self._wanted.get(name)
        if subscription is None or self._asked[name]:
            return  # ended, or ended and asked for again: this is still about the one before
        if kind == b"message":
            subscription.heard(payload)
        elif kind == b"subscribe":
            self._confirm(subscription)

    def _confirm(self, subscription: _Subscription) -> None:
        subscription.confirmed = True
        first, subscription.whole = subscription.whole, False
        subscription.begun(first)
        if all(one.confirmed for one in self._wanted.values()):
            self._settled.set()
