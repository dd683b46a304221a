"""What several fault tests share: the lab's switches, messages as central control sends them, and the SQLite file itself."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw

from tests.system.harness import Cluster

# Short intervals, so that a test waits for the product and not for its timers.
FAST = {"heartbeat_interval": 0.5, "check_interval": 0.5, "lease_ttl": 5}
ONCE = {"strategy": "fixed", "max_retries": 0}


def again(retries: int = 1, delay: float = 0.2) -> dict[str, Any]:
    return {"strategy": "fixed", "max_retries": retries, "delay_seconds": delay}


@contextmanager
def installed(folder: Path, **settings: Any) -> Iterator[Cluster]:
    """An installation that several tests of one file share."""
    cluster = Cluster(folder, **{**FAST, **settings})
    try:
        yield cluster
    finally:
        cluster.stop()


def set_faults(cluster: Cluster, *rules: dict[str, Any]) -> None:
    answer = cluster.lab_client.put("/faults", json=list(rules))
    assert answer.status_code == 200, answer.text


def fired(cluster: Cluster) -> list[int]:
    """How often each rule of the lab was used."""
    return [rule["fired"] for rule in cluster.lab_client.get("/faults").json()["rules"]]


def pushes(cluster: Cluster, task_id: str, event: str = "accepted") -> list[dict[str, Any]]:
    return [entry for entry in cluster.ledger() if entry["event"] == event and entry.get("task_id") == task_id]


def message(execution: dict[str, Any], kind: str, **facts: Any) -> dict[str, Any]:
    about = {"execution_id": execution["id"], "task_id": execution["task_id"], "device_id": execution["device_id"]}
    return {**about, "type": kind, **facts}


def publish(cluster: Cluster, *messages: Any) -> dict[str, Any]:
    """As a central control that speaks HTTP."""
    answer = cluster.client.post("/execution-logs", json={"messages": list(messages)})
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def note_end(cluster: Cluster, execution: dict[str, Any]) -> None:
    """Into the lab's ledger: a script of which the lab says nothing has ended now, because the test, which speaks for it,
    is about to say so."""
    entry = {"event": "result", "at": datetime.now(UTC).isoformat(), "execution_id": execution["id"]}
    with (cluster.folder / "lab" / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps(entry) + "\n")


def lines(cluster: Cluster, task_id: str) -> list[dict[str, Any]]:
    answer = cluster.client.get(f"/tasks/{task_id}/logs", params={"limit": 500})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["items"])


def moves(cluster: Cluster, task_id: str) -> list[str]:
    """The statuses that a task went through, by its history."""
    return [row["to"] for row in cluster.history(task_id) if row["to"]]


def sql(cluster: Cluster, statement: str, *binds: Any) -> list[Any]:
    """Behind the product's back, on its file."""
    connection = apsw.Connection(str(cluster.folder / "sd.db"))
    connection.set_busy_timeout(10_000)
    try:
        with connection:
            return connection.execute(statement, binds).fetchall()
    finally:
        connection.close()


def lock_of(cluster: Cluster, device_id: str) -> str | None:
    """The value of a device's lock."""
    found = sql(cluster, "SELECT value FROM device_lock WHERE device_id = ?", device_id)
    return str(found[0][0]) if found else None
