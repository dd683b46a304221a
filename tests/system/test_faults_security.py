"""The real web process against bodies without end, the real command line against settings that must not start (F06, S)."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.system.faultkit import installed
from tests.system.harness import API, Cluster, free_port

pytestmark = pytest.mark.system
LIMIT = 1024 * 1024
TOKEN = "sd_root_0123456789abcdef0123456789"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One web process; central control is not needed for any of it."""
    with installed(tmp_path_factory.mktemp("security"), max_body_bytes=LIMIT) as cluster:
        cluster.start_web()
        yield cluster


# ------------------------------------------------------------------------------------------------------------------ F06


def read_answer(sock: socket.socket) -> bytes:
    data = b""
    sock.settimeout(15)
    while b"\r\n\r\n" not in data and (more := sock.recv(65_536)):
        data += more
    return data


HEAD = f"POST {API}/tasks HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode()


def test_f06_a_chunked_body_of_500_mb_is_refused_early_while_others_are_served(web: Cluster) -> None:
    assert web.web is not None
    process = psutil.Process(web.web.pid)
    web.client.get("/version")
    before = process.memory_info().rss
    peak, served, over = before, 0, threading.Event()

    def others() -> None:
        nonlocal peak, served
        with httpx.Client(base_url=web.url + API, timeout=5) as client:
            while not over.is_set():
                assert client.get("/version").status_code == 200
                served += 1
                peak = max(peak, process.memory_info().rss)

    def sending(sock: socket.socket) -> None:
        """Whatever is answered: all of it, unless the server hangs up."""
        nonlocal sent
        chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while sent < 500_000_000:
                sock.sendall(chunk)
                sent += 65_536

    sent, began = 0, time.monotonic()
    with socket.create_connection(("127.0.0.1", web.web_port)) as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        threads = [threading.Thread(target=others), threading.Thread(target=sending, args=(sock,))]
        for thread in threads:
            thread.start()
        try:
            answer = read_answer(sock)
            told_s, told_after = time.monotonic() - began, sent
            threads[1].join(30)
        finally:
            over.set()
            threads[0].join(10)
    assert b" 413 " in answer.split(b"\r\n", 1)[0], answer[:200]
    assert told_s < 5
    assert told_after < 100_000_000, f"it was told only after {told_after} bytes"
    assert peak - before < 2 * LIMIT + 8_000_000, f"{(peak - before) / 1e6:.1f} MB"  # 8 MB: what a first request ever takes
    assert served > 3
    assert web.client.get("/version").status_code == 200


def test_f06_a_body_just_over_the_limit_is_answered_413_with_and_without_a_length(web: Cluster) -> None:
    for head, body in (
        (b"Transfer-Encoding: chunked\r\n\r\n", (b"10000\r\n" + b" " * 65_536 + b"\r\n") * 18),
        (b"Content-Length: 500000000\r\n\r\n", b""),
    ):
        with socket.create_connection(("127.0.0.1", web.web_port)) as sock:
            began = time.monotonic()
            sock.sendall(HEAD + head + body)
            answer = read_answer(sock)
            assert b" 413 " in answer.split(b"\r\n", 1)[0], answer[:300]
            assert time.monotonic() - began < 5


@pytest.mark.parametrize("body", [
    pytest.param(b'{"name": "\xff\xfe", "script": {"language": "shell", "content": "x"}}', id="bad UTF-8"),
    pytest.param(b'{"priority": NaN, "script": {"language": "shell", "content": "x"}}', id="NaN"),
    pytest.param(b'{"params": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", id="deep JSON"),
    pytest.param(b"[" * 500_000, id="deep list"),
    pytest.param(b'{"params": {"n": ' + b"9" * 500_000 + b"}}", id="a number of half a million digits"),
])  # fmt: skip
def test_f06_bodies_that_are_no_documents_are_refused_quickly(web: Cluster, body: bytes) -> None:
    began = time.monotonic()
    answer = web.client.post("/tasks", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text[:300]
    assert time.monotonic() - began < 3
    assert web.client.get("/tasks").json()["items"] == []
    assert web.web is not None
    assert web.web.alive()


# ------------------------------------------------------------------------------------------------------------------ S01


PATHS = [
    "/api/v1/tasks", "//api/v1/tasks", "/api/v1//tasks", "/api/v1/tasks/", "/API/V1/TASKS", "/api/v1/./tasks",
    "/healthz/../api/v1/tasks", "/healthz/..;/api/v1/tasks", "/api/v1/tasks;x=1", "/api/v1/tasks.json", "/api/v1/tasks%2f",
    "/%61pi/v1/tasks", "/api/v1/%74asks", "/api/v1/tasks%00", "/api/v1/devices/x%2f..%2f..%2ftasks",
]  # fmt: skip


def test_s01_without_a_valid_token_nothing_is_answered_whatever_the_path(tmp_path: Path) -> None:
    with installed(tmp_path, api_tokens=TOKEN) as cluster:
        cluster.start_web()
        owner = {"Authorization": f"Bearer {TOKEN}"}
        made = cluster.client.post("/tokens", headers=owner, json={"name": "reader", "scopes": ["task:read"]})
        assert made.status_code == 201, made.text
        reader = {"Authorization": f"Bearer {made.json()['token']}"}
        assert cluster.client.get("/tasks", headers=owner).status_code == 200
        assert cluster.client.get("/tasks", headers=reader).status_code == 200
        wrong: list[dict[str, str]] = [
            {}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer sd_root_"}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"X-Api-Key": TOKEN},
        ]  # fmt: skip
        for path in PATHS:
            for headers in wrong:
                for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE"):
                    status, body = raw(cluster, method, path, headers)
                    assert status in (400, 401, 403, 404, 405, 307), (method, path, headers, status)
                    assert b'"items"' not in body, (method, path, headers)
        task = {"name": "x", "script": {"language": "shell", "content": "echo"}}
        assert cluster.client.post("/tasks", headers=reader, json=task).status_code == 403
        assert cluster.client.post("/reconcile", headers=reader).status_code == 403
        assert cluster.client.delete(f"/tokens/{made.json()['id']}", headers=owner).status_code in (200, 204)
        assert cluster.client.get("/tasks", headers=reader).status_code == 401  # revoked: at once
        assert cluster.client.get("/tasks", headers=owner).json()["items"] == []


def raw(cluster: Cluster, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """A request whose path nobody tidies up on the way."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", cluster.web_port), timeout=10) as sock:
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        data = b""
        while more := sock.recv(65_536):
            data += more
    return int(data.split()[1]), data


# ------------------------------------------------------------------------------------------------------------------ S07


def run(folder: Path, *args: str, file: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SCRIPTDISPATCH_")}
    named = {f"SCRIPTDISPATCH_{name.upper()}": value for name, value in env.items()}
    if file:
        (folder / "scriptdispatch.toml").write_text(file)
    return subprocess.run(
        [sys.executable, "-m", "scriptdispatch", *args],
        cwd=folder, env={**clean, "SCRIPTDISPATCH_STORE_URL": f"sqlite:///{folder}/s.db", **named},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


MATRIX: list[tuple[str, dict[str, Any], str]] = [
    ("a public address without tokens", {"host": "0.0.0.0"}, "token"),
    ("a public IPv6 address without tokens", {"host": "::"}, "token"),
    ("an empty token list on a public address", {"host": "0.0.0.0", "api_tokens": ""}, "token"),
    ("a token with a short secret", {"api_tokens": "sd_root_short"}, "16 characters"),
    ("a token of another shape", {"api_tokens": "hunter2"}, "sd_<id>_<secret>"),
    ("one good token and a bad one", {"api_tokens": f"{TOKEN},secret"}, "sd_<id>_<secret>"),
    ("an unknown setting", {"centrall_url": "http://x"}, "central_url"),
    ("an unknown setting in the file", {"file": "wrokers = 2\n"}, "workers"),
    ("a file that is no TOML", {"file": "workers = = 2\n"}, "scriptdispatch.toml"),
    ("a value of the wrong type", {"workers": "many"}, "workers"),
    ("a value out of range", {"port": "99999"}, "port"),
    ("an address without scheme", {"central_url": "central:8090"}, "http://"),
    ("a store that this version does not have", {"store_url": "postgres://x"}, "sqlite:///"),
    ("a store of its own without a queue", {"store_url": "mongodb://x"}, "queue_url"),
    ("a lease shorter than two heartbeats", {"lease_ttl": "1", "heartbeat_interval": "2"}, "lease_ttl"),
    ("a store that cannot be opened", {"store_url": "sqlite:////proc/none/s.db"}, "/proc/none"),
]


@pytest.mark.parametrize(
    ("part", "given", "named"),
    [
        pytest.param(part, given, named, id=f"{part}: {name}")
        for part in ("web", "serve")
        for name, given, named in MATRIX
        if part == "web" or "host" not in given  # a node listens nowhere
    ],
)
def test_s07_a_start_that_must_not_be_is_refused_with_one_clear_line(
    tmp_path: Path, part: str, given: dict[str, str], named: str
) -> None:
    done = run(tmp_path, part, **{"port": str(free_port()), **given})
    assert done.returncode not in (0, None), done.stdout
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(said) == 1, said
    assert named in said[0], said
    assert "Traceback" not in said[0]
    assert "short" not in said[0] or "secret of" in said[0]
    assert "hunter2" not in said[0], "a secret, even a bad one, is not repeated"


def test_s07_secrets_are_masked_where_settings_are_shown(tmp_path: Path) -> None:
    secrets = {"api_tokens": TOKEN, "central_token": "central-token-value", "mq_secret": "mq-secret-value"}
    for args in (("config",), ("config", "--json")):
        done = run(tmp_path, *args, **secrets)
        assert done.returncode == 0, done.stderr
        for secret in secrets.values():
            assert secret not in done.stdout + done.stderr
    assert json.dumps("***") in done.stdout or "***" in done.stdout


def test_s07_a_public_address_with_a_token_starts_and_asks_for_it(tmp_path: Path) -> None:
    with installed(tmp_path, host="0.0.0.0", api_tokens=TOKEN) as cluster:
        cluster.start_web()
        assert cluster.client.get("/tasks").status_code == 401
        assert cluster.client.get("/tasks", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
