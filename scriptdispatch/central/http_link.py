"""One HTTP/1.1 connection: the asyncio protocol under `http.Pool`, and what can become of a request on it.

Its reason to exist is certainty: after `exchange` the caller knows whether a byte of the request can have left this
process. `NotSent` is a proof that none did; `Broken` says that some did and that no whole answer came back.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

import httptools
from msgspec import Struct

from scriptdispatch.errors import ScriptdispatchError

MAX_HEAD: Final = 64 * 1024  # bytes of status line and headers; more is no answer that we want to understand


class Trouble(ScriptdispatchError):
    """A request without a whole answer."""


class ConnectFailed(Trouble):
    """No connection: refused, unreachable, time over, or no place in the pool. Nothing was sent."""


class Misconfigured(Trouble):
    """No connection, and waiting will not help: the name does not resolve, or TLS fails. Nothing was sent."""


class NotSent(Trouble):
    """Provably no byte left. `vetoed`: the caller's own last check said no; else the connection was found closed."""

    def __init__(self, message: str, *, vetoed: bool = False) -> None:
        super().__init__(message)
        self.vetoed = vetoed


class Broken(Trouble):
    """At least one byte may have left, and no whole answer came: what the other side did is unknown."""


class Response(Struct, frozen=True):
    """A whole answer. Header names are in lower case; `truncated`: the body went on beyond the cap."""

    status: int
    headers: dict[str, str]
    body: bytes
    truncated: bool = False


class Link(asyncio.Protocol):
    """At most one request at a time. Any trouble closes it; `usable` tells whether it can carry another request."""

    def __init__(self, sock: socket.socket, *, tls: bool) -> None:
        self._sock, self._tls = sock, tls
        self.transport: Any = None
        self.idle_until = 0.0  # loop time; kept by the pool
        self._gone: str | None = None  # why it cannot be used any more
        self._waiter: asyncio.Future[Response] | None = None
        self._cap = 0
        self._parser: Any = None
        self._headers: dict[str, str] = {}
        self._head_done = self._finished = False

    @property
    def usable(self) -> bool:
        return self._gone is None and not self.transport.is_closing()

    async def exchange(
        self, data: bytes, *, timeout_s: float, cap: int, before_first_byte: Callable[[], bool] | None = None
    ) -> Response:
        """Send `data`, return the answer. Ends within `timeout_s`, however slowly the bytes come. Cancelling closes."""
        self._prove_open()
        self._begin(cap)
        # Nothing may come between this check and the send: PROTOCOL W6 reads its clock in it.
        if before_first_byte is not None and not before_first_byte():
            raise NotSent("the last check before sending said no", vetoed=True)
        self._send(data)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Response] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_later(timeout_s, self._fail, f"no complete answer within {timeout_s:.3g} s")
        try:
            return await waiter
        except BaseException:
            # Broken, or cancelled: an answer that still comes belongs to nobody, so the connection must not live on.
            self.close("the request on it was given up")
            raise
        finally:
            timer.cancel()
            self._waiter = None

    def close(self, why: str = "closed by us") -> None:
        self._gone = self._gone or why
        if self.transport is not None:
            self.transport.abort()

    # -------------------------------------------------------------------------------------------------------- sending

    def _prove_open(self) -> None:
        """The server may have closed an idle connection just now, before the loop had a chance to see it: look again."""
        if not self.usable:
            raise NotSent(f"the connection was closed before the request: {self._gone or 'by the server'}")
        try:
            peeked = self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(f"connection lost: {error}")
            raise NotSent(f"the connection was lost before the request: {error}") from error
        if not peeked or not self._tls:  # on TLS waiting bytes may be session tickets
            self.close("the server closed it, or spoke unasked")
            raise NotSent("the server had closed the idle connection before the request")

    def _send(self, data: bytes) -> None:
        """The first bytes go straight to the kernel, not into a transport's queue: they leave now, and if the kernel
        takes none of them that is a proof."""
        if self._tls:
            self.transport.write(data)
            return
        try:
            taken = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            taken = 0
        except OSError as error:
            self.close(f"connection lost: {error}")
            raise NotSent(f"the connection was lost before the first byte: {error}") from error
        if taken < len(data):
            self.transport.write(memoryview(data)[taken:])

    # ------------------------------------------------------------------------------------------------------ receiving

    def _begin(self, cap: int) -> None:
        self._cap = cap
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._body = bytearray()
        self._head_size = 0
        self._head_done = self._finished = self._keep_alive = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.close("the server spoke unasked")
            return
        if not self._head_done:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._gone = self._gone or "the server does not speak HTTP"
            self._fail(f"the answer is not HTTP: {error or type(error).__name__}")
            return
        if not self._head_done and self._head_size > MAX_HEAD:
            self._fail(f"the answer's headers are longer than {MAX_HEAD} bytes")

    def eof_received(self) -> bool:
        self._gone = self._gone or "the server closed it"
        if self._waiter is not None and not self._waiter.done():
            if self._head_done and not self._finished and not self._has_length():
                self._finish(truncated=False)  # a body without a length ends where the connection ends
            else:
                self._fail("the connection was closed before the answer was complete")
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._gone or f"connection lost: {exc or 'closed'}"
        self._fail(f"the connection was lost before the answer was complete: {exc or 'closed'}")

    # What httptools calls while it parses.

    def on_message_begin(self) -> None:
        if self._finished:  # bytes beyond the answer: what follows them must not become the next one
            self._gone = self._gone or "the server said more than it was asked"

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._head_done = True
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._finished:
            return
        self._body += body
        if len(self._body) > self._cap:
            self._finish(truncated=True)

    def on_message_complete(self) -> None:
        if not self._head_done:  # 1xx: the answer proper is still to come
            self._headers.clear()
        elif not self._finished:
            self._finish(truncated=False)

    def _has_length(self) -> bool:
        return "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "").lower()

    def _finish(self, *, truncated: bool) -> None:
        self._finished = True
        status = self._parser.get_status_code()
        # An answer that overtakes its request (413) leaves unsent bytes behind: such a connection is used up.
        if truncated or not self._keep_alive or self.transport.get_write_buffer_size():
            self._gone = self._gone or "the server keeps no connection after its answer"
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Response(status, self._headers, bytes(self._body[: self._cap]), truncated))

    def _fail(self, message: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken(message))

    @property
    def keep_alive_s(self) -> float | None:
        """What the server said about how long it keeps an idle connection (`Keep-Alive: timeout=5`)."""
        for part in self._headers.get("keep-alive", "").split(","):
            name, _, value = part.strip().partition("=")
            if name.lower() == "timeout" and value.strip().isdigit():
                return float(value)
        return None
