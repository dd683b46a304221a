"""The product as a competitor: web, master, two workers and one consumer as real processes on redis, mongod and Pulsar.

Tasks are created in batches by the API; the stub plays central control and sends the results by Pulsar.
"""

import contextlib
import http.client
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ground import Ground, wait_for

from scriptdispatch.ids import new_id
from tests.system.harness import API, Cluster, on_servers

SCRIPT = "echo hello from scriptdispatch; uname -a\n" * 25  # 1 KiB
UNFINISHED = ["waiting", "running", "send_success", "failed_waiting_retry", "paused"]
NAME = "product"
SAME = "product, their mongod"


class Product:
    """One installation for each `running`: a database, a prefix and a topic of its own. `devices` is the size of the fleet;
    the tasks go round it, all with the same script (a script that is new each time costs a syntax check, see docs). `same`:
    on the mongod that the peers have, which is no replica set; its writes are journaled there, too."""

    def __init__(self, ground: Ground, *, batch: int, senders: int, devices: int, same: bool = False) -> None:
        self._ground, self._batch, self._senders, self._devices = ground, batch, senders, devices
        self.name = SAME if same else NAME
        self.mongo = "peers' mongo" if same else "mongo"
        self._client = ground.peers_mongo if same else ground.mongo
        self._made = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        urls = self._ground.urls
        settings = on_servers(urls[self.mongo], urls["redis"], urls["pulsar"])
        folder = Path(tempfile.mkdtemp(prefix="product-", dir=self._ground.folder))
        self._db: Any = self._client[settings["redis_prefix"].rstrip(":")]
        with self._ground.stub("--mq-url", urls["pulsar"], "--mq-topic", settings["mq_topic"]) as self.stub:
            given = {"central_url": self.stub.url, "workers": 2, "consumers": 1, "log_level": "warning"}
            self._cluster = Cluster(folder, **settings, **given)
            try:
                self._cluster.start_web()
                self._cluster.start_node()
                self._find_roles()
                yield
            finally:
                self._cluster.stop()
                self._client.drop_database(self._db.name)
                shutil.rmtree(folder, ignore_errors=True)

    def _find_roles(self) -> None:
        web, node = self._cluster.web, self._cluster.node
        assert web is not None
        assert node is not None
        wait_for(lambda: node.children("consumer"), 20, "the consumer")
        self.trees = {"web": web.pid, "stub": self.stub.pid}
        self.alone = {"master": node.pid}
        for role in ("worker", "consumer"):
            self.alone |= {f"{role} {n}": child.pid for n, child in enumerate(node.children(role), 1)}

    @property
    def database(self) -> Any:
        return self._db

    def restart_node(self) -> float:
        """Killed and started anew. Answers how long it took until it worked again, in seconds."""
        node = self._cluster.node
        assert node is not None
        node.kill()
        began = time.monotonic()
        self._cluster.start_node()
        self._find_roles()
        return time.monotonic() - began

    # --- the work

    def create(self, tasks: int) -> None:
        bodies = [self._body() for _ in range(tasks)]
        parts = [bodies[i : i + self._batch] for i in range(0, tasks, self._batch)]
        with ThreadPoolExecutor(self._senders) as pool:
            list(pool.map(self._post, parts))

    def _post(self, bodies: list[dict[str, Any]]) -> None:
        answer = self._cluster.client.post("/tasks/batch", json={"tasks": bodies})
        if answer.status_code != 200 or answer.json()["failed"]:
            raise RuntimeError(f"a batch was not taken: {answer.text[:500]}")

    def trickle(self, tasks: int, per_second: float) -> None:
        """By a bare connection: what a client's library costs is not the product's."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._cluster.web_port, timeout=30)) as client:
            start = time.perf_counter()
            for n in range(tasks):
                time.sleep(max(0.0, start + n / per_second - time.perf_counter()))
                body = json.dumps(self._body(params={"sent": f"#T={time.time():.6f};"})).encode()
                client.request("POST", f"{API}/tasks", body, {"Content-Type": "application/json"})
                answer = client.getresponse()
                if answer.status != 201:
                    raise RuntimeError(f"a create was not taken: {answer.read(500)!r}")
                answer.read()

    def _body(self, **more: Any) -> dict[str, Any]:
        self._made += 1
        return self._cluster.body(f"dev-{self._made % self._devices}", SCRIPT, **more)

    # --- the end of it

    def fresh(self) -> None:
        self._before, self._since = self._counts(), new_id()

    def finished(self) -> bool:
        """All that was created since `fresh` is final. Asks for one that is not: an index answers at once, so the asking
        costs nothing."""
        unfinished = {"status": {"$in": UNFINISHED}, "_id": {"$gt": self._since}}
        return self._db.script_task.find_one(unfinished, {"_id": 1}, hint="by_status") is None

    def stored_lines(self) -> int:
        """Each document of theirs is a block of lines."""
        found = list(self._db.task_exec_log.aggregate([{"$group": {"_id": None, "lines": {"$sum": "$n"}}}]))
        return int(found[0]["lines"]) if found else 0

    def wrong(self, tasks: int, lines: int) -> list[str]:
        """What is not as it must be after `tasks` tasks since `fresh`."""
        now, wrong = self._counts(), []
        want = {"tasks": tasks, "executions": tasks, "once": tasks, "lines": tasks * lines, "rows": tasks, "quarantined": 0}
        for name, number in want.items():
            if now[name] - self._before[name] != number:
                wrong.append(f"{name}: {now[name] - self._before[name]} instead of {number}")
        if self.stub.count() != tasks or self.stub.lost():
            wrong.append(f"the stub took {self.stub.count()} pushes instead of {tasks} and lost {self.stub.lost()} messages")
        if held := [key for key in self._ground.redis.scan_iter(f"{self._db.name}:*locks") if self._ground.redis.hlen(key)]:
            wrong.append(f"locks are left in {held}")
        return wrong

    def _counts(self) -> dict[str, int]:
        db = self._db
        return {
            "tasks": self._succeeded(db.script_task, "status"),
            "once": db.script_task.count_documents({"status": "success", "attempt": 1}),
            "executions": self._succeeded(db.task_execution, "outcome"),
            "rows": db.task_execution.count_documents({}),
            "lines": self.stored_lines(),
            "quarantined": db.quarantine.count_documents({}),
        }

    def _succeeded(self, collection: Any, field: str) -> int:
        return int(collection.count_documents({field: "success"}))
