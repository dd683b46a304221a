"""Starts the product as its users do: real processes for lab, node and web on one SQLite file in a temporary folder.

Every process is a child of the test and ends with it, by its pid. A test that injects a fault says where (`crash`), and
asks `fired` whether it happened.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.servers import with_database

API = "/api/v1"


class Process:
    def __init__(self, name: str, args: list[str], env: dict[str, str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "scriptdispatch", *args], env=env, stdout=out, stderr=out, cwd=folder
            )
        self.pid = self._popen.pid

    def alive(self) -> bool:
        return self._popen.poll() is None

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        return self._popen.wait(timeout)

    def kill(self) -> None:
        if self.alive():
            self._popen.kill()
        self._popen.wait(10)

    def children(self, kind: str = "") -> list[psutil.Process]:
        """Live child processes, by their title ("worker", "consumer")."""
        found = []
        try:
            for child in psutil.Process(self.pid).children(recursive=True):
                try:
                    title = " ".join(child.cmdline())
                    if f"scriptdispatch: {kind}" in title and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child)
                except psutil.NoSuchProcess:
                    continue
        except psutil.NoSuchProcess:
            return []
        return found


def on_servers(mongo_url: str, redis_url: str, pulsar_url: str) -> dict[str, str]:
    """Settings of an installation on shared servers, under names of its own."""
    name = f"t{uuid.uuid4().hex[:12]}"
    return {
        "store_url": with_database(mongo_url, name),
        "queue_url": redis_url,
        "redis_prefix": f"{name}:",
        "mq_url": pulsar_url,
        "mq_topic": f"persistent://public/default/{name}",
    }


class Cluster:
    """One installation, embedded unless the settings say otherwise. `settings` are settings of the service, by name."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.web_port, self.lab_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.web_port}"
        self.lab_url = f"http://127.0.0.1:{self.lab_port}"
        self.crash_folder = folder / "crashes"
        self.crash_folder.mkdir(exist_ok=True)
        self.settings: dict[str, Any] = {
            "store_url": f"sqlite:///{folder}/sd.db",
            "central_url": self.lab_url,
            "port": self.web_port,
            "workers": 2,
            "node_name": "node-a",
            "log_format": "json",
            "rate_limit_per_second": 0,
            **settings,
        }
        self.processes: list[Process] = []
        self.lab: Process | None = None
        self.node: Process | None = None
        self.web: Process | None = None
        self.client = httpx.Client(base_url=self.url + API, timeout=30)
        self.lab_client = httpx.Client(base_url=self.lab_url, timeout=30)

    # --- processes

    def env(self, crash: str = "", **settings: Any) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("SCRIPTDISPATCH_")}
        named = {f"SCRIPTDISPATCH_{name.upper()}": str(value) for name, value in {**self.settings, **settings}.items()}
        if crash:
            named |= {"SCRIPTDISPATCH_TEST_CRASH": crash, "SCRIPTDISPATCH_TEST_CRASH_DIR": str(self.crash_folder)}
        return {**clean, **named, "PYTHONUNBUFFERED": "1"}

    def start(self, *, crash: str = "", lab: tuple[str, ...] = ("--simulate", "--duration", "0.05")) -> "Cluster":
        """Lab, web and node; `crash` goes to node and web."""
        self.start_lab(*lab)
        self.start_web(crash=crash)
        self.start_node(crash=crash)
        return self

    def start_lab(self, *flags: str) -> Process:
        args = ["lab", "--port", str(self.lab_port), "--deliver-url", self.url, "--folder", str(self.folder / "lab"), *flags]
        if "mq_url" in self.settings:
            args += ["--mq-url", str(self.settings["mq_url"])]
        self.lab = self._start("lab", args, self.env())
        self.until(lambda: self._answers(f"{self.lab_url}/healthz"), 20, "the lab to answer")
        return self.lab

    def start_web(self, *, crash: str = "", **settings: Any) -> Process:
        self.web = self._start("web", ["web"], self.env(crash, **settings))
        self.until(lambda: self._answers(f"{self.url}/healthz"), 20, "the web process to answer")
        return self.web

    def start_node(self, *, crash: str = "", wait: bool = True, **settings: Any) -> Process:
        self.node = self._start(f"node{len(self.processes)}", ["serve"], self.env(crash, **settings))
        if wait:
            self.wait_ready()
        return self.node

    def wait_ready(self, workers: int | None = None) -> None:
        want = workers or int(self.settings["workers"])

        def ready() -> bool:
            items = self.client.get("/workers").json()["items"]
            mine = [row for row in items if row["status"] == "ready" and self.node and row["pid"] and _lives(row["pid"])]
            return len(mine) >= want

        self.until(ready, 20, f"{want} workers to be ready")

    def _start(self, name: str, args: list[str], env: dict[str, str]) -> Process:
        process = Process(name, args, env, self.folder)
        self.processes.append(process)
        return process

    def _answers(self, url: str) -> bool:
        try:
            return httpx.get(url, timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        """Ends everything that this test started, by pid."""
        self.client.close()
        self.lab_client.close()
        for process in self.processes:
            process.kill()
        for left in self._left():
            try:
                left.kill()
            except psutil.NoSuchProcess:
                continue

    def _left(self) -> list[psutil.Process]:
        """Children, also those whose master is gone: one that was stopped cannot notice that and end by itself."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder.resolve()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def fired(self, place: str) -> bool:
        return (self.crash_folder / f"fired.{place}").exists()

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.log.read_text()[-4000:]}" for p in self.processes)

    # --- the API as a user calls it

    def create(self, device: str | None = "dev-001", content: str = "echo hello", **body: Any) -> dict[str, Any]:
        answer = self.client.post("/tasks", json=self.body(device, content, **body))
        assert answer.status_code == 201, answer.text
        return answer.json()

    def body(self, device: str | None = "dev-001", content: str = "echo hello", **body: Any) -> dict[str, Any]:
        task: dict[str, Any] = {"name": "a task", "script": {"language": "shell", "content": content}, **body}
        if device is not None:
            task["device_id"] = device
        return task

    def create_many(self, bodies: list[dict[str, Any]]) -> list[str]:
        found: list[str] = []
        for i in range(0, len(bodies), 1000):
            answer = self.client.post("/tasks/batch", json={"tasks": bodies[i : i + 1000]})
            assert answer.status_code == 200, answer.text
            assert answer.json()["failed"] == 0, answer.text
            found += [item["task"]["id"] for item in answer.json()["items"]]
        return found

    def task(self, task_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/tasks/{task_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def executions(self, task_id: str) -> list[dict[str, Any]]:
        return self.client.get(f"/tasks/{task_id}/executions").json()["items"]

    def history(self, task_id: str) -> list[dict[str, Any]]:
        return self.client.get(f"/tasks/{task_id}/history").json()["items"]

    def wait_status(self, task_id: str, *statuses: str, timeout: float = 30) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            task = self.task(task_id)
            return task if task["status"] in statuses else None

        return self.until(there, timeout, f"task {task_id} to become {statuses}")

    def wait_all(self, task_ids: list[str], *statuses: str, timeout: float = 60) -> None:
        """Until all of them are in one of the statuses (final ones unless said)."""
        wanted = statuses or ("success", "failed", "canceled")

        def there() -> bool:
            left = set(task_ids)
            for i in range(0, len(task_ids), 100):
                answer = self.client.get("/tasks", params={"ids": ",".join(task_ids[i : i + 100]), "limit": 100})
                left -= {row["id"] for row in answer.json()["items"] if row["status"] in wanted}
            return not left

        self.until(there, timeout, f"{len(task_ids)} tasks to become {wanted}", every=0.2)

    def until(self, condition: Callable[[], Any], timeout: float, what: str, every: float = 0.05) -> Any:
        """Waits for a condition; fails with the processes' logs when the time is over."""
        deadline = time.monotonic() + timeout
        last: Exception | None = None
        while time.monotonic() < deadline:
            try:
                if found := condition():
                    return found
            except (httpx.HTTPError, KeyError, json.JSONDecodeError) as error:
                last = error
            time.sleep(every)
        raise AssertionError(f"waited {timeout} s for {what} ({last!r})\n{self.logs()}")

    def ledger(self) -> list[dict[str, Any]]:
        path = self.folder / "lab" / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid)


def pages(client: httpx.Client, path: str, **params: Any) -> Iterator[dict[str, Any]]:
    """All rows of a list, page by page."""
    cursor: str | None = None
    while True:
        given = {**params, **({"cursor": cursor} if cursor else {})}
        answer = client.get(path, params=given).json()
        yield from answer["items"]
        cursor = answer.get("next_cursor")
        if not cursor:
            return


def stop_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
