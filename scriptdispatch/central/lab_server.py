"""The lab's HTTP server: small, fast, and able to misbehave on the wire.

Our own, because a simulated central control must break in the middle of an answer on demand: an ordinary server knows
only how to answer properly. One request at a time per connection; what comes meanwhile waits in the socket.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal
from urllib.parse import unquote

import httptools
import msgspec
from msgspec import Struct

from scriptdispatch import logs

MAX_BODY: Final = 16 * 1024 * 1024
MAX_PIPELINE: Final = 16  # requests of one connection that wait for their turn
REASONS: Final = {
    200: "OK",
    202: "Accepted",
    204: "No Content",
    404: "Not Found",
    409: "Conflict",
    503: "Service Unavailable",
}
Wire = Literal["well", "close", "reset", "half_header", "never", "slow"]
log = logs.get("lab")


class Request(Struct):
    method: str
    path: str
    segments: list[str]
    query: dict[str, str]
    body: bytes


class Reply(Struct):
    """What to answer, and how the wire behaves while it is answered."""

    status: int
    body: bytes = b""
    headers: list[tuple[str, str]] = []
    wire: Wire = "well"
    after_s: float = 0.0  # answer only then
    idle_close_s: float | None = None  # and close the connection after so long without a request


Handler = Callable[[Request], Reply | Awaitable[Reply]]


def json_reply(status: int, value: Any, **rest: Any) -> Reply:
    return Reply(status, msgspec.json.encode(value), **rest)


class Session(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, handler: Handler, sessions: "set[Session]") -> None:
        self._handler, self._sessions = handler, sessions
        self._waiting: deque[Request] = deque()
        self._busy = False
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._transport: Any = None

    # ------------------------------------------------------------------------------------------------------ from asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._sessions.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sessions.discard(self)
        self._waiting.clear()
        self._stop_idle()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._stop_idle()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._write(json_reply(400, {"error": "not_http", "message": str(error)}))
            self._transport.close()

    # ---------------------------------------------------------------------------------------------------- from httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._body: list[bytes] = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            raise ValueError("the body is too large")
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        pairs = (part.partition("=") for part in query.split("&") if part)
        request = Request(
            self._parser.get_method().decode(),
            path,
            [unquote(segment) for segment in path.split("/")[1:]],
            {unquote(name): unquote(value) for name, _, value in pairs},
            self._body[0] if len(self._body) == 1 else b"".join(self._body),
        )
        if len(self._waiting) >= MAX_PIPELINE:
            raise ValueError("too many requests at once on one connection")
        self._waiting.append(request)
        if not self._busy:
            self._next()

    # ---------------------------------------------------------------------------------------------------------- answering

    def _next(self) -> None:
        while self._waiting and not self._busy:
            request = self._waiting.popleft()
            try:
                reply = self._handler(request)
            except Exception as error:
                log.exception("lab.handler_failed", path=request.path)
                reply = json_reply(500, {"error": "internal_error", "message": str(error)})
            if isinstance(reply, Reply) and reply.wire == "well" and not reply.after_s:
                self._write(reply)
                self._plan_idle(reply.idle_close_s)
            else:
                self._busy = True
                self._task = asyncio.get_running_loop().create_task(self._answer_slowly(request, reply))

    async def _answer_slowly(self, request: Request, coming: Reply | Awaitable[Reply]) -> None:
        try:
            reply = coming if isinstance(coming, Reply) else await coming
        except Exception as error:
            log.exception("lab.handler_failed", path=request.path)
            reply = json_reply(500, {"error": "internal_error", "message": str(error)})
        if reply.after_s:
            await asyncio.sleep(reply.after_s)
        if not await self._misbehave(reply):
            self._write(reply)
        self._task = None
        self._busy = False
        self._plan_idle(reply.idle_close_s)
        self._next()

    async def _misbehave(self, reply: Reply) -> bool:
        """True: the wire is done with, nothing is to be written any more."""
        if reply.wire == "close":
            self._transport.close()
        elif reply.wire == "reset":
            sock: socket.socket = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        elif reply.wire == "half_header":
            self._transport.write(self._encode(reply)[:20])
            self._transport.close()
        elif reply.wire == "never":
            await asyncio.get_running_loop().create_future()  # until the client gives up: connection_lost cancels it
        elif reply.wire == "slow":
            for byte in self._encode(reply):
                self._transport.write(bytes((byte,)))
                await asyncio.sleep(1)
        else:
            return False
        return True

    def _write(self, reply: Reply) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._encode(reply))

    def _encode(self, reply: Reply) -> bytes:
        reason = REASONS.get(reply.status, "Status")
        extra = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
        head = (
            f"HTTP/1.1 {reply.status} {reason}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(reply.body)}\r\n{extra}\r\n"
        )
        return head.encode("latin-1") + reply.body

    def _plan_idle(self, after_s: float | None) -> None:
        if after_s is not None and not self._transport.is_closing():
            self._idle = asyncio.get_running_loop().call_later(after_s, self._transport.close)

    def _stop_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def abort(self) -> None:
        self._transport.abort()
