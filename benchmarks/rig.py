"""The product as it is measured: lab, web and node as real processes on one SQLite file in a temporary folder, and what each
of them costs: CPU, memory, wake-ups."""

import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

from tests.system.harness import Cluster

PROBE = Path(__file__).parent / "probe"
SCRIPT_BYTES = 1024
UNFINISHED = "waiting,running,send_success,failed_waiting_retry,paused"
Cost = dict[str, float]  # by process


class Rig:
    """`looking`: with the probe inside every process, which costs a little and explains the rest."""

    def __init__(self, devices: int, *, log_lines: int = 5, workers: int = 2, looking: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sd-bench-"))
        self.devices, self._looking, self._snapshots = devices, looking, 0
        self._probe = self.folder / "probe"
        self._probe.mkdir()
        self.cluster = Cluster(self.folder, workers=workers, consumers=1, log_level="warning")
        self._lab = (
            "--simulate",
            "--duration",
            "0",
            "--devices",
            str(devices),
            "--log-lines",
            str(log_lines),
            "--seed",
            "1",
        )
        self.roles: dict[str, psutil.Process] = {}
        self._ledger_read, self._results = 0, 0

    def __enter__(self) -> "Rig":
        before = {name: os.environ.get(name) for name in ("PYTHONPATH", "BENCH_PROBE")}
        if self._looking:
            os.environ |= {"PYTHONPATH": str(PROBE), "BENCH_PROBE": str(self._probe)}
        try:
            self.cluster.start(lab=self._lab)
            self.cluster.until(self._has_consumer, 20, "the consumer to be there")
        except BaseException:
            self.__exit__()
            raise
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        self.roles = self._find_roles()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _has_consumer(self) -> bool:
        return self.cluster.node is not None and bool(self.cluster.node.children("consumer"))

    def _find_roles(self) -> dict[str, psutil.Process]:
        lab, web, node = self.cluster.lab, self.cluster.web, self.cluster.node
        assert lab is not None
        assert web is not None
        assert node is not None
        roles = {"lab": lab.pid, "web": web.pid, "master": node.pid}
        roles |= {f"worker {n}": child.pid for n, child in enumerate(node.children("worker"), 1)}
        roles |= {f"consumer {n}": child.pid for n, child in enumerate(node.children("consumer"), 1)}
        return {name: psutil.Process(pid) for name, pid in roles.items()} | {"client": psutil.Process()}

    # --- what it costs

    def cpu_s(self) -> Cost:
        times = {name: process.cpu_times() for name, process in self.roles.items()}
        return {name: used.user + used.system for name, used in times.items()}

    def memory_mb(self) -> dict[str, dict[str, float]]:
        """`rss` counts what processes share and the mapped part of the database; `own` is what would be free without it."""
        found = {}
        for name, process in self.roles.items():
            info = process.memory_full_info()
            found[name] = {"rss": round(info.rss / 1e6, 1), "own": round(info.uss / 1e6, 1)}
        return found

    def wake_ups(self) -> Cost:
        """Voluntary context switches of all threads: how often each process was woken."""
        return {name: float(sum(_switches(process.pid))) for name, process in self.roles.items()}

    # --- the work

    def bodies(self, count: int) -> list[dict[str, Any]]:
        """All with the same script of 1 KiB: the syntax check keeps its verdicts by hash, so this is not about `bash -n`."""
        content = ("echo working\n" + "# " + "x" * SCRIPT_BYTES)[:SCRIPT_BYTES]
        return [self.cluster.body(self.device(n), content) for n in range(count)]

    def device(self, n: int) -> str:
        return f"dev-{n % self.devices + 1:03d}"

    def results(self) -> int:
        """How many executions the lab has ended: from its ledger, which costs the product nothing."""
        path = self.folder / "lab" / "ledger.jsonl"
        with path.open("rb") as ledger:
            ledger.seek(self._ledger_read)
            new = ledger.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._ledger_read += len(whole)
        self._results += whole.count(b'"event":"result"')
        return self._results

    def all_done(self) -> bool:
        answer = self.cluster.client.get("/tasks", params={"status": UNFINISHED, "limit": 1})
        return answer.status_code == 200 and not answer.json()["items"]

    def wait_done(self, results: int, timeout_s: float) -> None:
        """Asks the API only once the lab has ended them all, so that the waiting itself costs next to nothing."""
        self.cluster.until(lambda: self.results() >= results, timeout_s, f"{results} results of the lab", every=0.01)
        self.cluster.until(self.all_done, timeout_s, "every task to be final", every=0.005)

    # --- looking inside

    def profile(self, role: str) -> None:
        for name, process in self.roles.items():
            if name.startswith(role):
                (self._probe / f"profile.{process.pid}").touch()

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """What the probes saw since the last one, by process."""
        self._snapshots += 1
        (self._probe / f"snapshot.{self._snapshots}").touch()
        inside = {name: process.pid for name, process in self.roles.items() if name != "client"}
        files = {name: self._probe / f"{pid}.{self._snapshots}.json" for name, pid in inside.items()}
        self.cluster.until(lambda: all(file.exists() for file in files.values()), 10, "the probes to answer")
        return {name: json.loads(file.read_text()) for name, file in files.items()}


def _switches(pid: int) -> list[int]:
    found = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue  # the thread has ended
        found += [int(line.split()[1]) for line in text.splitlines() if line.startswith("voluntary_ctxt_switches")]
    return found


def less(after: Cost, before: Cost) -> Cost:
    return {name: value - before[name] for name, value in after.items()}


def by_role(cost: Cost) -> Cost:
    """Processes of one kind together."""
    found: dict[str, float] = defaultdict(float)
    for name, value in cost.items():
        found[name.split()[0]] += value
    return dict(found)


def percentile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def sync_ms(folder: Path, times: int = 100) -> float:
    """What one `fdatasync` of a 4 KiB append costs here: the price of a durable commit."""
    path = folder / "sync"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        took = []
        for _ in range(times):
            os.write(handle, b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(handle)
            took.append(time.perf_counter() - began)
    finally:
        os.close(handle)
        path.unlink()
    return round(percentile(took, 0.5) * 1000, 3)
