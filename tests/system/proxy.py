"""A TCP proxy that breaks connections on demand, between the product and a server. Its loop runs in a thread of its own.

    with Proxy(server.port) as proxy:
        url = proxy.through(server.url)
        proxy.drop_reply(match=b"EVALSHA")  # the server executes the request, the client never hears
        ...
        assert proxy.fired["drop_reply"] == 1

Every method may be called from any thread while traffic flows. A fault stays until `heal`, or until its `times` are used up;
one fault at a time, the last call counts. `fired` counts what was really done to somebody, so that a test can assert that
its fault happened: `cut` per connection, `drop_reply` per reply, `black_hole`, `delay` and `slow` per piece of data.
A Pulsar client asks its broker for an address and then goes there directly: break that way with signals to the broker.
"""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

PIECE = 64 * 1024
TICK_S = 0.02  # grain of `slow`
SWALLOW_S = 10.0
CALL_S = 10.0  # a call from another thread into the loop

Direction = Literal["to_server", "to_client"]
BOTH: tuple[Direction, ...] = ("to_server", "to_client")
T = TypeVar("T")


@dataclass
class Fault:
    kind: str
    times: int | None = None  # None: until healed
    match: bytes = b""
    seconds: float = 0
    bytes_per_s: float = 0
    directions: tuple[Direction, ...] = BOTH
    reset: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def use_up(self) -> bool:
        """One more firing, if there is one left."""
        if self.times is not None:
            if self.times <= 0:
                return False
            self.times -= 1
        return True


@dataclass(eq=False)
class Link:
    """One client's connection and ours to the server for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    withhold: Fault | None = None  # its request went through; the reply must not
    open_ways: int = 2
    tail: bytes = b""  # the end of the last piece of the request, for a match over the seam

    def asks_for(self, match: bytes, data: bytes) -> bool:
        seen = self.tail + data
        self.tail = seen[len(seen) - len(match) + 1 :] if len(match) > 1 else b""
        return match in seen


class Proxy:
    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy of {port}", daemon=True)
        self._listener: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: Fault | None = None
        self._changed = threading.Condition()
        self.fired: Counter[str] = Counter()
        self.accepted = 0
        self.port = 0

    # --- life

    def start(self) -> "Proxy":
        self._thread.start()
        self._listener = self._call(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        """Closes the port and every connection. May be called twice."""
        if self._loop.is_closed():
            return
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def __enter__(self) -> "Proxy":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def through(self, url: str) -> str:
        """The address with our port in it. For MongoDB a direct one: a client of a replica set would go to its members."""
        parts = urlsplit(url)
        login, at, _ = parts.netloc.rpartition("@")
        parts = parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}")
        if parts.scheme == "mongodb":
            options = [option for option in parts.query.split("&") if option and not option.startswith("replicaSet=")]
            parts = parts._replace(path=parts.path or "/", query="&".join([*options, "directConnection=true"]))
        return urlunsplit(parts)

    # --- faults

    def drop_reply(self, times: int = 1, *, match: bytes = b"", reset: bool = False) -> None:
        """Requests pass; the connection of one that contains `match` is cut instead of the reply.

        The server reads and executes all that was sent before it sees the connection's end. `reset`: the client gets RST.
        """
        self._set(lambda: Fault("drop_reply", times, match=match, reset=reset))

    def cut(self, *, reset: bool = False) -> None:
        """Closes every connection, and each new one at once, until `heal`."""
        self._set(lambda: Fault("cut", reset=reset))
        self._call(self._cut_all(reset))

    def cut_once(self, *, reset: bool = False) -> None:
        """Closes every connection of now; new ones are served."""
        self._call(self._cut_all(reset))

    def black_hole(self, *directions: Direction) -> None:
        """Connections stay open and new ones are accepted, but nothing arrives (in one direction, if it is named).

        What was sent meanwhile arrives after `heal`, as after a network that was away.
        """
        self._set(lambda: Fault("black_hole", directions=directions or BOTH))

    def delay(self, seconds: float, *directions: Direction) -> None:
        """Every piece of data arrives later by this."""
        self._set(lambda: Fault("delay", seconds=seconds, directions=directions or BOTH))

    def slow(self, bytes_per_s: float, *directions: Direction) -> None:
        """Data trickles, at this rate for each connection and direction."""
        self._set(lambda: Fault("slow", bytes_per_s=bytes_per_s, directions=directions or BOTH))

    def heal(self) -> None:
        self._set(lambda: None)

    def wait_fired(self, kind: str, times: int = 1, timeout: float = 10) -> None:
        """Until the fault has fired so many times in all; AssertionError when it has not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.fired[kind] >= times, timeout):
                raise AssertionError(f"{kind} fired {self.fired[kind]} times within {timeout:g} s, not {times}")

    @property
    def connections(self) -> int:
        """Open now, whole ways from client to server."""
        return len(self._links)

    # --- from here on: in the loop's thread, but for _call and _set

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def _set(self, make: Callable[[], Fault | None]) -> None:
        async def change() -> None:
            if self._fault is not None:
                self._fault.over.set()
            self._fault = make()

        self._call(change())

    def _count(self, kind: str) -> None:
        with self._changed:
            self.fired[kind] += 1
            self._changed.notify_all()

    def _active(self, kind: str, direction: Direction | None = None) -> Fault | None:
        fault = self._fault
        if fault is None or fault.kind != kind or (direction and direction not in fault.directions):
            return None
        return fault

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if fault := self._active("cut"):
            self._count("cut")
            _break(client, reset=fault.reset)
            return
        try:
            server_reader, server = await asyncio.open_connection(*self._target)
        except OSError:
            _break(client, reset=True)  # nobody listens there: close to what the client would see of a dead server
            return
        link = Link(client, server)
        self._links.add(link)
        self._begin(self._pump(link, "to_server", reader, server))
        self._begin(self._pump(link, "to_client", server_reader, client))

    def _begin(self, pump: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(pump)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, link: Link, direction: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        """Carries one direction until its end, and passes the end on: what was sent before it still arrives."""
        try:
            while data := await source.read(PIECE):
                if not await self._carry(link, direction, data, sink):
                    await self._swallow(link, source)
                    break
            sink.write_eof()
        except OSError:
            self._forget(link, reset=True)  # one side broke, or a fault broke it: the other learns it the same way
        link.open_ways -= 1
        if not link.open_ways:
            self._links.discard(link)
            link.client.close()
            link.server.close()

    async def _carry(self, link: Link, direction: Direction, data: bytes, sink: asyncio.StreamWriter) -> bool:
        """False when the piece is a reply that must not arrive."""
        if direction == "to_client" and link.withhold:
            self._count("drop_reply")
            return False
        if direction == "to_server" and (fault := self._active("drop_reply")) and not link.withhold:
            link.withhold = fault if link.asks_for(fault.match, data) and fault.use_up() else None
        while fault := self._active("black_hole", direction):
            self._count("black_hole")
            await fault.over.wait()  # ends with heal, with the next fault, or with stop
        if fault := self._active("delay", direction):
            self._count("delay")
            await asyncio.sleep(fault.seconds)
        if fault := self._active("slow", direction):
            self._count("slow")
            return await self._trickle(fault, data, sink)
        sink.write(data)
        await sink.drain()
        return True

    async def _trickle(self, fault: Fault, data: bytes, sink: asyncio.StreamWriter) -> bool:
        started, done = time.monotonic(), 0
        while done < len(data):
            due = len(data) if fault.over.is_set() else int((time.monotonic() - started) * fault.bytes_per_s)
            if due > done:
                sink.write(data[done:due])
                await sink.drain()
                done = min(due, len(data))
            else:
                await asyncio.sleep(TICK_S)
        return True

    async def _swallow(self, link: Link, source: asyncio.StreamReader) -> None:
        """The client is cut now; the server only after its requests, in an orderly way: on RST it may drop unread ones.

        The other direction sees the end of the client, and passes it on.
        """
        _break(link.client, reset=bool(link.withhold and link.withhold.reset))
        async with asyncio.timeout(SWALLOW_S):
            while await source.read(PIECE):
                continue

    async def _cut_all(self, reset: bool) -> None:
        for link in list(self._links):
            self._count("cut")
            self._forget(link, reset=reset)

    def _forget(self, link: Link, *, reset: bool = False) -> None:
        self._links.discard(link)
        _break(link.client, reset=reset)
        _break(link.server, reset=reset)

    async def _shut(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._fault is not None:
            self._fault.over.set()
            self._fault = None
        for link in list(self._links):
            self._forget(link)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _break(writer: asyncio.StreamWriter, *, reset: bool = False) -> None:
    """Closes a side at once; what was not sent yet is lost. Harmless on one that is closed."""
    sock = writer.get_extra_info("socket")
    if reset and sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
