"""What the competitors stand on: one redis-server, mongod, and the central control of `stub`.

The product has a mongod that is a replica set (of one), and a broker. The peers have a mongod without one: no oplog, no
sessions, nothing journaled before it is acknowledged. That is cheaper than what the product asks for, and it is what they
are measured on elsewhere; `same_mongod` gives them the product's.

Everything is on free loopback ports in a temporary folder, and
is ended by its pid.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pymongo
import redis

from tests.server_process import Server
from tests.servers import private
from tests.system.harness import free_port

SETTLE_S = 2.0
HERE = Path(__file__).resolve().parent


class Ground:
    def __init__(self, *, same_mongod: bool) -> None:
        self._same_mongod = same_mongod
        self.folder = Path(tempfile.mkdtemp(prefix="sd-peers-"))
        self._stack = contextlib.ExitStack()
        self.pids: dict[str, int] = {}
        self.urls: dict[str, str] = {}

    def __enter__(self) -> "Ground":
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        try:
            for name in ("redis", "mongo", "pulsar"):
                self._know(name, self._stack.enter_context(private(name, self.folder / name)))
            self.mongo = self._client(self.urls["mongo"])
            self.peers_mongo = self.mongo
            if not self._same_mongod:
                alone = self._stack.enter_context(private("mongo", self.folder / "alone", alone=True))
                self._know("peers' mongo", alone)
                self.peers_mongo = self._client(self.urls["peers' mongo"])
            self.redis: Any = self._stack.enter_context(redis.Redis.from_url(self.urls["redis"]))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _know(self, name: str, server: Server) -> None:
        self.pids[name], self.urls[name] = server.pid, server.url

    def _client(self, url: str) -> Any:
        client: Any = self._stack.enter_context(pymongo.MongoClient(url))
        # Enough for all that a run stores, as on a server of its own: the servers of tests are given less.
        client.admin.command({"setParameter": 1, "wiredTigerEngineRuntimeConfig": "cache_size=2G"})
        return client

    def settle(self) -> None:
        """What the last one has left to be written is written, so that nobody pays for his predecessor's disk."""
        for client in (self.mongo, self.peers_mongo):
            client.admin.command("fsync")
        time.sleep(SETTLE_S)

    def servers(self, mongo: str, *, broker: bool) -> dict[str, int]:
        """The processes that a competitor makes work, by role."""
        working = {"redis": self.pids["redis"], "mongo": self.pids.get(mongo, self.pids["mongo"])}
        return working | ({"pulsar": self.pids["pulsar"]} if broker else {})

    @contextlib.contextmanager
    def stub(self, *flags: str) -> Iterator["Stub"]:
        port = free_port()
        log = self.folder / "stub.log"
        with log.open("ab") as out:
            command = [sys.executable, str(HERE / "stub.py"), "--port", str(port), *flags]
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            stub = Stub(f"http://127.0.0.1:{port}", process.pid)
            wait_for(stub.answers, 30, "the stub to answer")
            yield stub
        finally:
            end(process)


class Stub:
    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self._client = httpx.Client(base_url=url, timeout=10)

    def answers(self) -> bool:
        try:
            return self._client.get("/count").status_code == 200
        except httpx.TransportError:
            return False

    def reset(self, lines: int = 5) -> None:
        self._client.get("/reset", params={"lines": lines})

    def count(self) -> int:
        return int(self._client.get("/count").json()["count"])

    def lost(self) -> int:
        return int(self._client.get("/count").json()["lost"])

    def latencies_ms(self) -> list[float]:
        return list(self._client.get("/stats").json()["ms"])


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.02) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(every_s)


def end(process: subprocess.Popen[bytes]) -> None:
    """A process of ours and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait(10)
