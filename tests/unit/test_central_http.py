"""The pool and its connections on real sockets, on asyncio's loop and on uvloop."""

import asyncio
import contextlib
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from scriptdispatch.central.http import Broken, ConnectFailed, Misconfigured, NotSent, Pool, Response

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


class Server:
    """A peer that does as it is told, and counts."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self.connections, self.requests = peer, 0, 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._peer(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(peer: Peer, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, str]]:
    server = Server(peer)
    listener = await asyncio.start_server(server.connected, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield server, f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        listener.close()
        await server.end()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


def answering(answer: bytes, *, then_close: bool = False) -> Peer:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()
            if then_close:
                return

    return peer


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def get(pool: Pool, path: str = "/x", **how: Any) -> Response:
    with await pool.checkout() as connection:
        return await connection.request("GET", path, **{"timeout_s": 5.0, **how})


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------------------------- the good days


async def test_one_connection_carries_many_requests() -> None:
    async with serving(answering(OK)) as (server, url):
        pool = Pool(url, 4)
        for _ in range(20):
            assert (await get(pool)).body == b"ok"
        assert server.connections == 1
        assert (pool.in_use, pool.idle) == (0, 1)
        await pool.close()


async def test_the_request_on_the_wire_has_path_prefix_headers_and_body() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    async with serving(peer) as (_, url):
        pool = Pool(f"{url}/base/", 1, headers=[("Authorization", "Bearer t")])
        with await pool.checkout() as connection:
            await connection.request("POST", "/scripts", b'{"a":1}', b"Content-Type: application/json\r\n", timeout_s=5)
        await pool.close()
    head, body = seen[0]
    assert head.startswith(b"POST /base/scripts HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer t\r\n" in head
    assert b"\r\nContent-Type: application/json\r\n" in head
    assert b"\r\nContent-Length: 7\r\n" in head
    assert body == b'{"a":1}'


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * 20_000
    seen: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await read_request(reader))[1])
        writer.write(OK)

    async with serving(peer) as (_, url):
        pool = Pool(url, 1)
        with await pool.checkout() as connection:
            await connection.request("POST", "/", body, timeout_s=10)
        await pool.close()
    assert seen == [body]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", 200, b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 202 Accepted\r\nContent-Length: 1\r\n\r\nx", 202, b"x"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n", 302, b""),
    ],
)
async def test_answers_of_all_shapes_are_read_and_the_connection_lives_on(answer: bytes, status: int, body: bytes) -> None:
    async with serving(answering(answer)) as (server, url):
        pool = Pool(url, 1)
        for _ in range(3):
            response = await get(pool)
            assert (response.status, response.body, response.truncated) == (status, body, False)
        assert server.connections == 1
        await pool.close()


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\nall of it", then_close=True)) as (server, url):
        pool = Pool(url, 1)
        assert (await get(pool)).body == b"all of it"
        assert (await get(pool)).body == b"all of it"
        assert server.connections == 2
        await pool.close()


async def test_a_server_that_closes_after_its_answer_is_believed() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    async with serving(answering(answer, then_close=True)) as (server, url):
        pool = Pool(url, 1)
        for _ in range(3):
            assert (await get(pool)).status == 200
            assert pool.idle == 0
        assert server.connections == 3
        await pool.close()


async def test_an_answer_beyond_the_cap_is_cut_and_its_connection_closed() -> None:
    async with serving(answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)) as (_, url):
        pool = Pool(url, 1)
        response = await get(pool, cap=65_536)
        assert (response.status, len(response.body), response.truncated) == (200, 65_536, True)
        assert pool.idle == 0
        await pool.close()


# ------------------------------------------------------------------------------------------------------- certainly not sent


async def test_a_refused_connection_is_a_connect_failure_and_costs_no_place() -> None:
    pool = Pool(f"http://127.0.0.1:{free_port()}", 1)
    for _ in range(3):
        with pytest.raises(ConnectFailed, match=r"no connection to 127\.0\.0\.1"):
            await pool.checkout()
    assert pool.in_use == 0
    await pool.close()


async def test_a_connect_that_hangs_ends_in_time() -> None:
    with socket.socket() as full:  # a listener that never accepts, its backlog full: further SYNs are dropped
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        pool = Pool(f"http://127.0.0.1:{full.getsockname()[1]}", 1, connect_timeout_s=0.3)
        begun = time.monotonic()
        with pytest.raises(ConnectFailed, match=r"within 0.3 s"):
            await pool.checkout()
        assert time.monotonic() - begun < 2
        for filler in fillers:
            filler.close()
        await pool.close()


async def test_a_name_that_does_not_resolve_is_misconfigured() -> None:
    pool = Pool("http://no-such-host.invalid:80", 1)
    with pytest.raises(Misconfigured, match=r"no-such-host\.invalid does not resolve"):
        await pool.checkout()
    await pool.close()


async def test_who_finds_the_pool_full_waits_for_a_place_and_then_gives_up() -> None:
    async with serving(answering(OK)) as (_, url):
        pool = Pool(url, 1, pool_timeout_s=0.2)
        held = await pool.checkout()
        with pytest.raises(ConnectFailed, match="all 1 connections"):
            await pool.checkout()
        waiting = asyncio.create_task(pool.checkout())
        await asyncio.sleep(0)
        held.release()
        held.release()  # again does nothing
        (await waiting).release()
        assert (pool.in_use, pool.idle) == (0, 1)
        await pool.close()


async def test_a_veto_right_before_the_first_byte_sends_nothing_and_keeps_the_connection() -> None:
    bodies: list[bytes] = []

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            bodies.append((await read_request(reader))[1])
            writer.write(OK)

    async with serving(peer) as (server, url):
        pool = Pool(url, 1)
        with await pool.checkout() as connection:
            with pytest.raises(NotSent) as caught:
                await connection.request("POST", "/", b"first", timeout_s=5, before_first_byte=lambda: False)
            assert caught.value.vetoed
            response = await connection.request("POST", "/", b"second", timeout_s=5, before_first_byte=lambda: True)
            assert response.status == 200
        assert server.connections == 1
        assert bodies == [b"second"]
        await pool.close()


async def test_a_connection_closed_while_idle_is_proven_unsent_even_before_the_loop_has_seen_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        pool = Pool(f"http://127.0.0.1:{listener.getsockname()[1]}", 1)
        connection = await pool.checkout()
        accepted, _ = listener.accept()
        accepted.close()  # no await in between: the loop cannot have noticed
        with pytest.raises(NotSent) as caught:
            await connection.request("POST", "/", b"x", timeout_s=5)
        assert not caught.value.vetoed
        await connection.reconnect()
        accepted, _ = listener.accept()
        asked = asyncio.create_task(connection.request("POST", "/", b"x", timeout_s=5))
        await asyncio.sleep(0)
        accepted.sendall(OK)
        assert (await asked).status == 200
        connection.release()
        accepted.close()
        await pool.close()


async def test_connections_closed_while_idle_are_not_handed_out() -> None:
    async def one_then_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with serving(one_then_close) as (server, url):
        pool = Pool(url, 2)
        for n in range(5):
            response = await get(pool)
            assert response.status == 200
            await until(lambda: pool.idle == 0 or not pool._idle[0].usable)
            assert server.connections == n + 1
        await pool.close()


async def test_idle_connections_are_closed_after_their_time() -> None:
    async with serving(answering(OK)) as (server, url):
        pool = Pool(url, 2, idle_s=0.1)
        await get(pool)
        assert pool.idle == 1
        await until(lambda: pool.idle == 0)
        await get(pool)
        assert server.connections == 2
        await pool.close()


async def test_a_server_that_says_how_long_it_keeps_idle_connections_is_believed() -> None:
    answer = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(answer)) as (server, url):
        pool = Pool(url, 1)
        await get(pool)
        await get(pool)
        assert server.connections == 2
        await pool.close()


# ------------------------------------------------------------------------------------------------- sent, and then trouble


async def broken(peer: Peer, message: str, **how: Any) -> None:
    async with serving(peer) as (server, url):
        pool = Pool(url, 1)
        with pytest.raises(Broken, match=message):
            await get(pool, **how)
        assert (pool.in_use, pool.idle) == (0, 0)
        assert server.connections == 1
        await pool.close()


async def test_a_black_hole_ends_with_the_time_limit() -> None:
    begun = time.monotonic()
    await broken(never, "no complete answer within 0.2 s", timeout_s=0.2)
    assert time.monotonic() - begun < 2


async def test_a_byte_per_moment_ends_with_the_time_limit_too() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in OK:
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.05)

    await broken(peer, "no complete answer", timeout_s=0.3)


async def test_a_reset_is_broken() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    await broken(peer, "lost before the answer")


async def test_a_close_without_an_answer_is_broken() -> None:
    await broken(answering(b"", then_close=True), "before the answer was complete")


@pytest.mark.parametrize(
    "part",
    [
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_broken(part: bytes) -> None:
    await broken(answering(part, then_close=True), "before the answer was complete")


@pytest.mark.parametrize(
    "junk", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x01\x02", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_is_not_http_is_broken(junk: bytes) -> None:
    await broken(answering(junk), "not HTTP")


async def test_endless_headers_are_broken() -> None:
    await broken(answering(b"HTTP/1.1 200 OK\r\n" + b"X-Y: %s\r\n" % (b"z" * 1000) * 200), "headers are longer|not HTTP")


async def test_bytes_beyond_the_answer_do_not_become_the_next_answer() -> None:
    for beyond in (b"HTTP/1.1 500 Evil\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 500 Ev", b"junk"):
        async with serving(answering(OK + beyond)) as (server, url):
            pool = Pool(url, 1)
            for _ in range(3):
                assert (await get(pool)).status == 200
                assert pool.idle == 0
            assert server.connections == 3
            await pool.close()


# ----------------------------------------------------------------------------------------------------------- cancellation


async def test_after_two_thousand_cancellations_every_place_is_there_again() -> None:
    limit = 50

    async def sometimes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            if b"/answer" in head:
                writer.write(OK)

    async with serving(sometimes) as (_, url):
        pool = Pool(url, limit, pool_timeout_s=5)
        for round_no in range(20):
            tasks = [asyncio.create_task(get(pool, "/hang")) for _ in range(100)]  # half of them wait for a place
            for _ in range(round_no % 7):  # cancelled in all kinds of moments
                await asyncio.sleep(0)
            if round_no % 2:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        assert pool.in_use == 0
        answers = await asyncio.gather(*(get(pool, "/answer") for _ in range(limit * 3)))
        assert all(answer.body == b"ok" for answer in answers)
        held = [await pool.checkout() for _ in range(limit)]
        assert pool.in_use == limit
        for connection in held:
            connection.release()
        await pool.close()


async def test_the_answer_to_a_cancelled_request_is_nobody_elses() -> None:
    go = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            if b"/late" in head:
                await go.wait()
            body = head.split()[1]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(peer) as (_, url):
        pool = Pool(url, 1)
        late = asyncio.create_task(get(pool, "/late"))
        await until(lambda: pool.in_use == 1)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        go.set()
        for n in range(5):
            assert (await get(pool, f"/{n}")).body == f"/{n}".encode()
        await pool.close()


async def test_a_closed_pool_gives_nothing_out() -> None:
    async with serving(answering(OK)) as (_, url):
        pool = Pool(url, 1)
        await get(pool)
        await pool.close()
        with pytest.raises(ConnectFailed, match="closed"):
            await pool.checkout()


# -------------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    try:
        subprocess.run(
            [*command, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return key, cert


def server_context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    return context


async def test_https_with_a_trusted_certificate_works_and_is_kept_alive(certificate: tuple[Path, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate[1]))
    async with serving(answering(OK), server_context(certificate)) as (server, url):
        pool = Pool(url, 1, tls=trusting)
        for _ in range(5):
            with await pool.checkout() as connection:
                response = await connection.request("POST", "/", b"x" * 100_000, timeout_s=5)
            assert response.body == b"ok"
        assert server.connections == 1
        await pool.close()


async def test_an_untrusted_certificate_is_misconfigured(certificate: tuple[Path, Path]) -> None:
    async with serving(answering(OK), server_context(certificate)) as (_, url):
        pool = Pool(url, 1)
        with pytest.raises(Misconfigured, match="TLS with"):
            await pool.checkout()
        assert pool.in_use == 0
        await pool.close()


async def test_https_to_a_server_that_speaks_http_is_misconfigured() -> None:
    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(peer) as (_, url):
        pool = Pool(url.replace("http:", "https:"), 1)
        with pytest.raises(Misconfigured, match="TLS with"):
            await pool.checkout()
        await pool.close()


# ------------------------------------------------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/a\tb", "/ü"])
async def test_a_path_that_would_break_the_request_line_is_refused(path: str) -> None:
    async with serving(answering(OK)) as (_, url):
        pool = Pool(url, 1)
        with await pool.checkout() as connection, pytest.raises(ValueError, match="not a path"):
            await connection.request("GET", path, timeout_s=1)
        await pool.close()


def test_a_token_that_would_add_a_header_is_refused() -> None:
    with pytest.raises(ValueError, match="Authorization"):
        Pool("http://127.0.0.1:1", 1, headers=[("Authorization", "Bearer x\r\nX-Evil: 1")])
