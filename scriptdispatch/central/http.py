"""A pool of HTTP/1.1 connections to one base URL, http or https: what stands between us and central control.

Our own, because PROTOCOL W5 wants the connection in hand before the stamp, W6 a clock check as the last thing before the
first byte, and the outcome table certain knowledge whether a byte was sent. No redirects, no retries, no cookies.
Used by workers, the web process and the lab; knows nothing of tasks.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit

from scriptdispatch.central.http_link import Broken, ConnectFailed, Link, Misconfigured, NotSent, Response, Trouble

__all__ = ["Broken", "ConnectFailed", "Connection", "Misconfigured", "NotSent", "Pool", "Response", "Trouble"]

# Many servers close what was idle for 5 s. A request that crosses such a close on the wire ends as unknown, and blocks its
# device until the deadline; a fresh connection costs next to nothing. So ours are closed first.
IDLE_S: Final = 4.0
RESOLVED_S: Final = 30.0  # a looked-up name counts this long
SMALL_ANSWER: Final = 64 * 1024
LARGE_ANSWER: Final = 1024 * 1024


class Connection:
    """A place in the pool with an open connection in it. Give it back with `release` (again does nothing) or `with`."""

    __slots__ = ("_link", "_pool", "_released")

    def __init__(self, pool: "Pool", link: Link) -> None:
        self._pool, self._link, self._released = pool, link, False

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: bytes = b"",
        *,
        timeout_s: float,
        cap: int = SMALL_ANSWER,
        before_first_byte: Callable[[], bool] | None = None,
    ) -> Response:
        """One request; `headers` are whole lines, each ended by CRLF. Raises `NotSent` or `Broken`, ends within
        `timeout_s`. Cancelling closes the connection; the place is still to be released."""
        if self._released:
            raise RuntimeError("this connection was given back to its pool")
        data = self._pool.encode(method, path, body, headers)
        return await self._link.exchange(data, timeout_s=timeout_s, cap=cap, before_first_byte=before_first_byte)

    async def reconnect(self) -> None:
        """A fresh connection in the same place, after `NotSent`. Raises as `Pool.checkout`."""
        self._link = await self._pool.replace(self._link)

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._pool.take_back(self._link)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Pool:
    """At most `limit` connections; who finds none free waits `pool_timeout_s`, then gets `ConnectFailed`.

    Made on any thread, used on one loop. The newest idle connection is used first, so that a small load keeps few open.
    """

    def __init__(
        self,
        base_url: str,
        limit: int,
        *,
        connect_timeout_s: float = 5.0,
        pool_timeout_s: float = 5.0,
        idle_s: float = IDLE_S,
        headers: Iterable[tuple[str, str]] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"not an http or https address: {base_url!r}")
        self._host, self._tls_wanted = url.hostname, url.scheme == "https"
        self._port = url.port or (443 if self._tls_wanted else 80)
        self._prefix = url.path.rstrip("/")
        self._tls = tls
        self._limit, self._idle_s = limit, idle_s
        self._connect_timeout_s, self._pool_timeout_s = connect_timeout_s, pool_timeout_s
        self._slots = asyncio.Semaphore(limit)
        self._idle: deque[Link] = deque()  # oldest on the left
        self._links: set[Link] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._resolved: tuple[float, list[tuple[Any, ...]]] = (0.0, [])
        self._closed = False
        self._head = _common_headers(url.netloc.rpartition("@")[2], headers)

    @property
    def in_use(self) -> int:
        return len(self._links) - len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    async def checkout(self) -> Connection:
        """An open connection. Raises `ConnectFailed` or `Misconfigured`; either way nothing was sent."""
        await self._take_slot()
        try:
            link = self._idle_link() or await self._connect()
        except BaseException:
            self._slots.release()
            raise
        return Connection(self, link)

    def checkin(self, connection: Connection) -> None:
        connection.release()

    async def close(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in list(self._links):
            link.close("the pool was closed")
        self._idle.clear()
        self._links.clear()

    # ---------------------------------------------------------------------------------------- what a Connection calls

    def encode(self, method: str, path: str, body: bytes, headers: bytes) -> bytes:
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n"
        if len(line.split()) != 3 or not line.isascii():  # a space or line break would smuggle in a second request
            raise ValueError(f"not a path: {path!r}")
        length = b"Content-Length: %d\r\n" % len(body) if body or method != "GET" else b""
        return b"".join((line.encode(), self._head, headers, length, b"\r\n", body))

    async def replace(self, link: Link) -> Link:
        self._drop(link, "replaced")
        return await self._connect()

    def take_back(self, link: Link) -> None:
        if link.usable and not self._closed:
            said = link.keep_alive_s
            keep = self._idle_s if said is None else min(self._idle_s, max(0.0, said - 1))
            link.idle_until = asyncio.get_running_loop().time() + keep
            self._idle.append(link)
            self._plan_sweep()
        else:
            self._drop(link, "used up")
        self._slots.release()

    # ---------------------------------------------------------------------------------------------------------- inside

    async def _take_slot(self) -> None:
        if self._closed:
            raise ConnectFailed("the pool is closed")
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout(self._pool_timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise ConnectFailed(
                f"all {self._limit} connections to {self._host}:{self._port} were busy for {self._pool_timeout_s:g} s"
            ) from None

    def _idle_link(self) -> Link | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            link = self._idle.pop()
            if link.usable and link.idle_until > now:
                return link
            self._drop(link, "idle for too long")
        return None

    def _plan_sweep(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(self._idle_s, self._sweep)

    def _sweep(self) -> None:
        """Close what was idle for long enough, also when nobody asks for a connection any more."""
        self._sweeper = None
        now = asyncio.get_running_loop().time()
        for link in list(self._idle):
            if link.idle_until <= now or not link.usable:
                self._idle.remove(link)
                self._drop(link, "idle for too long")
        if self._idle:
            self._plan_sweep()

    def _drop(self, link: Link, why: str) -> None:
        self._links.discard(link)
        link.close(why)

    async def _connect(self) -> Link:
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                link = await self._open()
        except TimeoutError:
            raise ConnectFailed(f"no connection to {where} within {self._connect_timeout_s:g} s") from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:  # it went away in the middle of the handshake
            raise ConnectFailed(f"{where} closed the connection during the TLS handshake") from error
        except ssl.SSLError as error:
            raise Misconfigured(f"TLS with {where} failed: {error}") from error
        except (socket.gaierror, UnicodeError) as error:
            raise Misconfigured(f"the name {self._host} does not resolve: {error}") from error
        except OSError as error:
            raise ConnectFailed(f"no connection to {where}: {error.strerror or error}") from error
        if self._closed:
            link.close("the pool was closed")
            raise ConnectFailed("the pool is closed")
        self._links.add(link)
        return link

    async def _open(self) -> Link:
        trouble: OSError = OSError(f"no address for {self._host}")
        for family, _, _, _, address in await self._addresses():
            try:
                return await self._open_one(family, address)
            except (ssl.SSLError, TimeoutError):
                raise
            except OSError as error:
                trouble = error
        raise trouble

    async def _open_one(self, family: int, address: Any) -> Link:
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, socket.SOCK_STREAM)
        link = Link(sock, tls=self._tls_wanted)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            tls = self._tls_context() if self._tls_wanted else None
            await loop.create_connection(lambda: link, sock=sock, ssl=tls, server_hostname=self._host if tls else None)
        except BaseException:
            link.close("not connected")
            sock.close()
            raise
        return link

    async def _addresses(self) -> list[tuple[Any, ...]]:
        until, found = self._resolved
        loop = asyncio.get_running_loop()
        if loop.time() < until:
            return found
        try:
            version = ipaddress.ip_address(self._host).version
        except ValueError:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        else:
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            found = [(family, socket.SOCK_STREAM, 0, "", (self._host, self._port))]
        self._resolved = (loop.time() + RESOLVED_S, found)
        return found

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _common_headers(netloc: str, headers: Iterable[tuple[str, str]]) -> bytes:
    lines = [("Host", netloc), ("User-Agent", "scriptdispatch"), ("Accept", "application/json"), *headers]
    for name, value in lines:
        if any(ord(sign) < 32 for sign in name + value) or not (name + value).isascii():
            raise ValueError(f"header {name} has characters that a header must not have")
    return "".join(f"{name}: {value}\r\n" for name, value in lines).encode()
