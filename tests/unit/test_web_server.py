"""The web process itself: a real server, a raw socket, signals, a busy port, and bodies that do not end (F06)."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.unit.web_helpers import API, SHELL, Site, served

pytestmark = pytest.mark.slow

RUN = (
    "import sys; from scriptdispatch.settings import load; from scriptdispatch.web.app import run_web\n"
    "fd = int(sys.argv[3]) if len(sys.argv) > 3 else None\n"
    "say = lambda url: print(url, flush=True)\n"
    "sys.exit(run_web(load({'store_url': sys.argv[1], 'port': int(sys.argv[2])}), ready=say, lifeline_fd=fd))\n"
)


@contextlib.contextmanager
def process(
    folder: Path, *, port: int = 0, lifeline: int | None = None, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    args = [sys.executable, "-c", RUN, f"sqlite:///{folder}/web.db", str(port)]
    child = subprocess.Popen(
        args + ([str(lifeline)] if lifeline is not None else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        pass_fds=[lifeline] if lifeline is not None else [],
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=10)


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """`scriptdispatch web`, which is to end on its own."""
    args = (sys.executable, "-m", "scriptdispatch", "web", "--store-url", f"sqlite:///{folder}/web.db", *args)
    return subprocess.run(args, capture_output=True, text=True, timeout=30, check=False)


def first_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_it_says_where_it_listens_answers_and_ends_cleanly_on_term(tmp_path: Path) -> None:
    with process(tmp_path) as child:
        url = first_line(child)
        assert httpx.get(f"{url}/healthz").text == "ok\n"
        assert httpx.get(f"{url}/readyz").text.startswith("store ok SQLite")
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
        assert any("web.stopped" in text for text in child.communicate(timeout=10))


def test_an_open_stream_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with process(tmp_path) as child:
        url = first_line(child)
        with httpx.stream("GET", f"{url}{API}/events", timeout=20) as stream:
            chunks = stream.iter_raw()
            assert next(chunks)
            began = time.monotonic()
            child.send_signal(signal.SIGTERM)
            assert child.wait(10) == 0
            assert time.monotonic() - began < 5


def test_it_ends_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with process(tmp_path, lifeline=read_end) as child:
        os.close(read_end)
        first_line(child)
        assert child.poll() is None
        os.close(write_end)
        assert child.wait(10) == 0


def test_a_busy_port_is_said_in_one_line_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = command(tmp_path, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("✕ port ")
    assert "--port" in lines[0]


def test_a_public_address_without_a_token_is_refused(tmp_path: Path) -> None:
    done = command(tmp_path, "--port", "0", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert done.stderr.startswith("✕ host 0.0.0.0 ")
    assert "no token is configured" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_death_between_insert_and_queue_push_keeps_the_task_for_the_loader(tmp_path: Path) -> None:
    faults = {"SCRIPTDISPATCH_TEST_CRASH": "web.after_insert=kill", "SCRIPTDISPATCH_TEST_CRASH_DIR": str(tmp_path)}
    with process(tmp_path, env=faults) as child:
        url = first_line(child)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}{API}/tasks", json={"script": SHELL, "name": "kept"})
        assert child.wait(10) == -signal.SIGKILL
    assert (tmp_path / "fired.web.after_insert").exists()
    with process(tmp_path) as child:
        url = first_line(child)
        [task] = httpx.get(f"{url}{API}/tasks").json()["items"]
        assert (task["name"], task["status"]) == ("kept", "waiting")
        assert httpx.get(f"{url}{API}/stats").json()["ready"]["normal"] == 0  # the queue never had it
        assert httpx.post(f"{url}{API}/reconcile").json()["tasks_queued"] == 1
        assert httpx.get(f"{url}{API}/stats").json()["counts"]["waiting"] == 1


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Site]:
    async with served("sqlite", tmp_path, max_body_bytes=1_000_000) as found:
        yield found


class Raw:
    """A connection that sends whatever it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, web: Site) -> "Raw":
        base = web.client.base_url
        return cls(*await asyncio.open_connection(base.host, base.port))

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(int(row[15:]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:"))
            return int(head.split()[1]), await self.reader.readexactly(length)


HEAD = f"POST {API}/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode()


async def test_a_chunked_body_without_end_is_cut_off_and_memory_stays_small(web: Site) -> None:
    raw = await Raw.to(web)
    before = psutil.Process().memory_info().rss
    raw.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    reading = asyncio.create_task(raw.answer())
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not reading.done() and sent < 500_000_000:
            raw.writer.write(chunk)
            await raw.writer.drain()
            sent += len(chunk)
    status, body = await reading
    assert (status, b"payload_too_large" in body) == (413, True)
    assert sent < 100_000_000  # it was told long before it had sent it all
    assert psutil.Process().memory_info().rss - before < 30_000_000
    assert (await web.ask("GET", "/version")).status_code == 200  # others are served
    raw.writer.close()


async def test_a_declared_length_of_500_mb_is_refused_before_a_byte_is_sent(web: Site) -> None:
    raw = await Raw.to(web)
    raw.writer.write(HEAD + b"Content-Length: 500000000\r\n\r\n")
    assert (await raw.answer())[0] == 413
    raw.writer.close()


async def test_two_content_types_are_refused(web: Site) -> None:
    raw = await Raw.to(web)
    raw.writer.write(HEAD + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}")
    status, body = await raw.answer()
    assert (status, b"Content-Type" in body) == (422, True)
    raw.writer.close()


async def test_a_client_that_goes_away_in_the_middle_of_its_body_leaves_nothing(
    web: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = await Raw.to(web)
    raw.writer.write(HEAD + b'Content-Length: 1000\r\n\r\n{"name": ')
    await raw.writer.drain()
    raw.writer.close()
    await raw.writer.wait_closed()
    assert (await web.ask("POST", "/tasks", json={"script": SHELL})).status_code == 201
    assert await web.stored() == 1
    assert "Traceback" not in capsys.readouterr().err


async def test_bad_bytes_get_a_quick_answer_on_the_wire(web: Site) -> None:
    for body in (b'{"name": "\xff"}', b'{"a": NaN}', b"[" * 200_000):
        raw = await Raw.to(web)
        raw.writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        began = time.monotonic()
        assert (await raw.answer())[0] == 422
        assert time.monotonic() - began < 2
        raw.writer.close()


async def test_the_answer_does_not_name_the_server(web: Site) -> None:
    assert "server" not in (await web.ask("GET", "/version")).headers
