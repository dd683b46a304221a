"""A peer as a competitor: its own workers and its own producer, in an environment of their own (`apps/`)."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ground import HERE, Ground, end

UNFINISHED = ["pending", "running", "send_success"]
QUIET = ["-l", "warning", "--without-gossip", "--without-mingle", "--without-heartbeat"]
# Settings from earlier measurements on two cores; not tuned again here.
PEERS = {
    "celery prefork 2": ("app_celery", ["celery", "-A", "apps.app_celery", "worker", "-P", "prefork", "-c", "2", *QUIET]),
    "dramatiq 2×8": ("app_dramatiq", ["dramatiq", "apps.app_dramatiq", "--processes", "2", "--threads", "8"]),
    "taskiq 2×64, aiohttp": ("app_taskiq", ["taskiq", "worker", "apps.app_taskiq:broker", "--workers", "2",
                                            "--max-async-tasks", "64", "--log-level", "WARNING"]),
}  # fmt: skip


class Peer:
    """Its writes are acknowledged before they are journaled (`w=1`), which is less than the product's promise."""

    mongo = "peers' mongo"

    def __init__(self, ground: Ground, name: str, environment: Path) -> None:
        self.name, self._ground, self._bin = name, ground, environment / "bin"
        self._module, self._command = PEERS[name]
        self._db: Any = ground.peers_mongo["peers"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._ground.redis.flushall()
        self._make_collections()
        with self._ground.stub() as self.stub, contextlib.ExitStack() as stack:
            workers = self._started(stack, self._command)
            self._producer = self._started(stack, ["python", "-m", "apps.producer", f"apps.{self._module}"], piped=True)
            self._hear("ready")
            self.trees = {"worker": workers.pid, "client": self._producer.pid, "stub": self.stub.pid}
            self.alone: dict[str, int] = {}
            yield

    def _started(self, stack: contextlib.ExitStack, command: list[str], *, piped: bool = False) -> subprocess.Popen[bytes]:
        urls = self._ground.urls
        named = {
            "BENCH_REDIS_URL": urls["redis"],
            "BENCH_MONGO_URL": urls.get("peers' mongo", urls["mongo"]) + "&w=1&journal=false",
            "BENCH_PUSH_URL": f"{self.stub.url}/scripts",
            "BENCH_DATABASE": self._db.name,
            "PYTHONPATH": str(HERE),
            "PYTHONUNBUFFERED": "1",
        }
        with tempfile.NamedTemporaryFile(
            "ab", dir=self._ground.folder, prefix=f"{self._module}-", suffix=".log", delete=False
        ) as log:
            pipe: Any = subprocess.PIPE if piped else None
            process = subprocess.Popen(
                [str(self._bin / command[0]), *command[1:]],
                cwd=HERE, env={**os.environ, **named}, stdin=pipe, stdout=pipe or log, stderr=log,
            )  # fmt: skip
        self._log = Path(log.name)
        stack.callback(end, process)
        return process

    def _hear(self, word: str) -> None:
        assert self._producer.stdout is not None
        if (said := self._producer.stdout.readline().decode().strip()) != word:
            raise RuntimeError(f"the producer of {self.name} says {said!r}: {self._log.read_text()[-2000:]}")

    def _order(self, order: str) -> None:
        assert self._producer.stdin is not None
        self._producer.stdin.write(f"{order}\n".encode())
        self._producer.stdin.flush()
        self._hear("done")

    def _make_collections(self) -> None:
        """The same documents for all peers, with the indexes that they need."""
        self._ground.peers_mongo.drop_database(self._db.name)
        self._db.tasks.create_index([("state", 1), ("updated_at", 1)])
        self._db.executions.create_index("task_id")
        self._db.logs.create_index("execution_id")

    # --- the work

    def create(self, tasks: int) -> None:
        self._order(f"load {tasks}")

    def trickle(self, tasks: int, per_second: float) -> None:
        self._order(f"trickle {tasks} {per_second}")

    # --- the end of it

    def fresh(self) -> None:
        self._before = self._counts()

    def finished(self) -> bool:
        """Asks for one that is not, which is cheap. An execution is closed after its task."""
        return (
            self._db.tasks.find_one({"state": {"$in": UNFINISHED}}, {"_id": 1}) is None
            and self._db.executions.find_one({"state": "running"}, {"_id": 1}) is None
            and not self._locks()
        )

    def wrong(self, tasks: int, lines: int) -> list[str]:
        now, wrong = self._counts(), []
        want = {"tasks": tasks, "executions": tasks, "rows": tasks, "lines": tasks * lines}
        for name, number in want.items():
            if now[name] - self._before[name] != number:
                wrong.append(f"{name}: {now[name] - self._before[name]} instead of {number}")
        if self.stub.count() != tasks:
            wrong.append(f"the stub took {self.stub.count()} pushes instead of {tasks}")
        if held := self._locks():
            wrong.append(f"{held} locks are left")
        return wrong

    def _locks(self) -> int:
        return sum(1 for _ in self._ground.redis.scan_iter("lock:*", count=1000))

    def _counts(self) -> dict[str, int]:
        return {
            "tasks": self._db.tasks.count_documents({"state": "success", "version": 3}),
            "executions": self._db.executions.count_documents({"state": "success"}),
            "rows": self._db.executions.count_documents({}),
            "lines": self._db.logs.count_documents({}),
        }
