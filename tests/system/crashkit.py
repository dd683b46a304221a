"""For tests that end, stop and restart processes of one installation: a fresh node per fault, signals by pid."""

import os
import signal
import time
from typing import Any

import psutil

from tests.system.harness import Cluster, Process

GONE_S = 20.0


def fresh_node(cluster: Cluster, crash: str = "", *, wait: bool = True, **settings: Any) -> Process:
    """Another node in place of the one that runs, with its own record of which faults fired."""
    kill_node(cluster)
    cluster.crash_folder = cluster.folder / f"crashes{len(cluster.processes)}"
    cluster.crash_folder.mkdir()
    node = cluster.start_node(crash=crash, wait=False, **settings)
    if wait:  # for its own workers: those of a node that was killed may still be on their way out
        cluster.until(lambda: len(set(ready(cluster)) & set(workers(cluster))) >= 2, 20, "its workers to be ready")
    return node


def kill_node(cluster: Cluster) -> None:
    """SIGKILL to master and children, all at once."""
    if cluster.node is not None:
        end(cluster, cluster.node)
        cluster.node = None


def end(cluster: Cluster, *processes: Process) -> None:
    """A power cut for these: each of them and its children, killed together."""
    children = [child for process in processes for child in every_child(process)]
    for process in processes:
        if process.alive():
            process.signal(signal.SIGKILL)
    for child in children:
        send(child.pid, signal.SIGKILL)
    for process in processes:
        process.wait(GONE_S)
    cluster.until(lambda: not any(lives(child.pid) for child in children), GONE_S, "the children to be gone")


def every_child(process: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself meanwhile


def lives(pid: int) -> bool:
    """A zombie has ended, whoever its parent is."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    return lives(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED


def hit(cluster: Cluster, place: str, timeout: float = 30) -> list[int]:
    """Waits until the fault has fired. The pids of those whom it met."""
    mark = cluster.crash_folder / f"fired.{place}"
    cluster.until(lambda: mark.exists() and mark.read_text().endswith("\n"), timeout, f"the fault at {place}", every=0.01)
    return [int(line.split()[0]) for line in mark.read_text().splitlines()]


def workers(cluster: Cluster) -> list[int]:
    """Live workers of the node, by pid."""
    assert cluster.node is not None
    return sorted(child.pid for child in cluster.node.children("worker"))


def ready(cluster: Cluster) -> list[int]:
    """Workers that the API calls ready and that live, by pid."""
    rows = cluster.client.get("/workers").json()["items"]
    return sorted(row["pid"] for row in rows if row["status"] == "ready" and lives(row["pid"]))


def replaced(cluster: Cluster, dead: int, count: int, within: float) -> float:
    """Waits until there are so many ready workers without that one. The seconds it took."""
    began = time.monotonic()
    cluster.until(lambda: dead not in (now := ready(cluster)) and len(now) >= count, within, f"worker {dead} to be replaced")
    return time.monotonic() - began


def accepted(cluster: Cluster, task_ids: list[str]) -> dict[str, int]:
    """How many pushes of each task central control accepted."""
    counts = dict.fromkeys(task_ids, 0)
    for entry in cluster.ledger():
        if entry["event"] == "accepted" and entry["task_id"] in counts:
            counts[entry["task_id"]] += 1
    return counts


def outcome(cluster: Cluster, task_id: str) -> tuple[str, int, int]:
    """(status, retry_count, pushes): what most faults are about."""
    task = cluster.task(task_id)
    return task["status"], task["retry_count"], accepted(cluster, [task_id])[task_id]


def rows(cluster: Cluster, task_id: str) -> list[tuple[str, str]]:
    """(status, push) of the task's executions, oldest first."""
    found = sorted(cluster.executions(task_id), key=lambda row: row["attempt"])
    return [(row["status"], row["push"]) for row in found]
